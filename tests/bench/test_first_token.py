"""`forerun bench first-token`."""

from __future__ import annotations

import json

import pytest

from forerun.main import run
from forerun_bench.first_token import FirstToken, covered, first_token
from tests.golden_engine import golden_llm


def test_requests_leave_no_state() -> None:
    with golden_llm() as llm:
        row = first_token(llm.engine, 5, repetitions=2)
        assert row.input_len == 5 and row.seconds > 0
        assert first_token(llm.engine, 5, repetitions=1, batch_size=3).batch_size == 3
        llm.engine.check()
        assert llm.engine.stats()["decode_steps"] == 0  # the first token comes from the prefill


def test_ratio() -> None:
    assert FirstToken(16, 0.006, 0.004).ratio == pytest.approx(1.5)
    assert FirstToken(16, 0.006, None).ratio is None


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    line = "bench first-token --input-len 1 8 --repetitions 1 --device cpu --json"
    assert run([*line.split(), "--speculative-algorithm", "NONE"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["input_len"] for row in report["results"]] == [1, 8]
    assert run(["bench", "first-token", "--input-len", "0"]) == 2
    assert ">= 1" in capsys.readouterr().err


def test_overlapping_kernels_count_once() -> None:
    assert covered([(5, 8), (0, 2), (1, 3), (6, 7), (8, 9)]) == 3 + 4
    assert covered([]) == 0
