"""`forerun bench long-prompt`."""

from __future__ import annotations

import json

import pytest

from forerun.main import run
from forerun_bench.long_prompt import Run, run_once, summary
from tests.golden_engine import golden_llm


def test_requests_leave_no_state() -> None:
    with golden_llm(max_running_requests=4) as llm:
        for step_ms in (0, 1):
            one = run_once(llm.engine, 2, 100, step_ms)
            assert min(one.first_tokens) > 0
            assert len(one.gaps) >= 2 and len(one.alone) >= 50
            llm.engine.check()


def test_summary() -> None:
    runs = [Run([0.01], [0.1, 0.2], (3.0, 1.0)), Run([0.03], [0.3], (5.0, 2.0))]
    row = summary(200, runs)
    assert row.alone == pytest.approx(0.02)
    assert (row.step_ms, row.p50, row.longest) == (200, 0.2, 0.3)
    assert (row.first_token, row.short_first_token) == (4.0, 1.5)


@pytest.mark.exhaustive
def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    line = "bench long-prompt --running 2 --input-len 64 --step-ms 0 50 --repetitions 1"
    options = ["--device", "cpu", "--speculative-algorithm", "NONE", "--json"]
    assert run([*line.split(), *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["step_ms"] for row in report["results"]] == [0, 50]
    assert run(["bench", "long-prompt", "--running", "0"]) == 2
    assert ">= 1" in capsys.readouterr().err
