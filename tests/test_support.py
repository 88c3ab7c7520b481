"""docs/support.md is what the code and the recorded results say."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.models.registry import ARCHITECTURES
from forerun.speculative.registry import BUILT_IN
from tests.support_cells import read_cells
from tests.support_table import ALIKE, BACKENDS, MODELS, table

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _not_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.exhaustive
def test_the_page_is_current() -> None:
    pytest.importorskip("triton")
    page = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    assert page == table(), "run: python -m tests.support_table > docs/support.md"


def test_every_architecture_is_in_the_table() -> None:
    rows = {config["architectures"][0] for config in MODELS.values()}
    assert rows | set(ALIKE) == set(ARCHITECTURES) and not rows & set(ALIKE)


def test_recorded_cells_are_of_today() -> None:
    for cell, test in read_cells().items():
        assert cell.architecture in ARCHITECTURES and cell.backend in BACKENDS
        assert cell.algorithm in BUILT_IN
        assert "passed(llm, __file__)" in (ROOT / test).read_text(encoding="utf-8")
