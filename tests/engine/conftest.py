"""Drafts for the golden target, created once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM
from tests import chain_models as models
from tests.golden_engine import golden_llm


@pytest.fixture(scope="session")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Draft folders by algorithm."""
    folder = tmp_path_factory.mktemp("drafts")
    makers: dict[str, Callable[[Path], Path]] = {
        "EAGLE3": models.eagle3,
        "NEXTN": models.nextn,
        "STANDALONE": models.standalone,
    }
    return {name: make(folder / name) for name, make in makers.items()}


@pytest.fixture(scope="session")
def chain_llm(drafts: dict[str, Path]) -> Callable[..., LLM]:
    """`golden_llm` with one of these drafts."""

    def make(name: str, **settings: Any) -> LLM:
        settings.setdefault("speculative_draft_model_path", str(drafts[name]))
        return golden_llm(name, **settings)

    return make
