"""Step times are measured by the executor: a slow consumer does not change them."""

from __future__ import annotations

import pytest

from forerun import SamplingParams
from forerun.engine import engine as engine_module
from forerun.executor.step import clock as step_clock
from forerun.executor.step import costs as step_costs
from tests.golden_engine import CASES, golden_llm


class Clock:
    """Replaces the `time` module: every call advances it by 2^-10 s, so sums are exact."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 2**-10
        return self.now


@pytest.mark.parametrize("consumer_seconds", [0.0, 10.0])
@pytest.mark.parametrize("overlap_depth", [0, 1])
def test_a_slow_consumer_does_not_change_step_costs(
    overlap_depth: int, consumer_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are measured as one tick at start, and every step takes one."""
    clock = Clock()
    for module in (engine_module, step_clock, step_costs):
        monkeypatch.setattr(module, "time", clock)
    of_all_sizes = step_costs.MeasurementBudget(1.0, 1, 2)
    monkeypatch.setattr(step_costs, "EAGER", of_all_sizes)
    settings = {"overlap_depth": overlap_depth, "speculative_adaptive": True}
    with golden_llm("DFLASH", max_running_requests=2, **settings) as llm:
        measured = llm.stats()["width"]["step_costs"]
        params = SamplingParams(temperature=0.0, max_new_tokens=48, ignore_eos=True)
        engine = llm.engine
        requests = [engine.make_request(case["prompt"], params) for case in CASES[:2]]
        for request in requests:
            engine.submit(request)
        while engine.has_work:
            if engine.step():
                clock.now += consumer_seconds
        for request in requests:
            assert len(request.output) == 48
            engine.close_request(request)
        width = llm.stats()["width"]
    assert sum(width["steps_by_width"].values()) > 5
    assert width["step_costs"] == measured
