"""Engines on backends over stand-ins of other libraries' calls: the text of plain decoding."""

from __future__ import annotations

import pytest

from tests.attention import stand_ins
from tests.engine.test_matrix import hold

KINDS = stand_ins.stand_ins()


@pytest.mark.parametrize(
    ("name", "algorithm", "page", "chunk", "tight"),
    [
        ("fa3-vllm", "DFLASH", 16, 4, True),
        ("fa3-upstream", "NGRAM", 1, 512, False),
        pytest.param("fa3-sgl", None, 16, 4, False, marks=pytest.mark.exhaustive),
        pytest.param("fa3-vllm", "NGRAM", 16, 512, True, marks=pytest.mark.exhaustive),
        pytest.param("fa3-sgl", "DFLASH", 1, 4, False, marks=pytest.mark.exhaustive),
    ],
)
def test_the_text_is_that_of_plain_decoding(
    name: str, algorithm: str | None, page: int, chunk: int, tight: bool
) -> None:
    stand_ins.calls.clear()
    with stand_ins.registered(KINDS[name]) as backend:
        hold(algorithm, page, chunk, 1, tight, attention_backend=backend)
    assert "fwd" in stand_ins.calls
