"""Outputs under random JSON schemas parse and validate."""

from __future__ import annotations

import pytest

from forerun import LLM

pytest.importorskip("xgrammar")

from tests.grammar.random_schemas import run


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("algorithm", "count"),
    [("DFLASH", 48), ("DDTREE", 400)],
)
def test_outputs_parse_and_validate(algorithm: str, count: int) -> None:
    settings = {"constrained_json_disable_any_whitespace": True, "max_running_requests": 24}
    with LLM(speculative_algorithm=algorithm, **settings) as llm:
        ended = run(llm, 0, count)
        llm.engine.check()
    assert ended > 0.8 * count
