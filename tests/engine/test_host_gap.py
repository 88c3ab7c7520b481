"""How long the device waits for the host: of single steps, and what the engine counts."""

from __future__ import annotations

import time

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.executor.step.clock import StepClock
from tests.golden_engine import golden_llm

CPU = torch.device("cpu")
PARAMS = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)


def clocked(previous: StepClock | None, pause: float, work: float) -> StepClock:
    """A step on a CPU, `pause` seconds after the previous one."""
    time.sleep(pause)
    clock = StepClock.after(previous, CPU)
    time.sleep(work)
    clock.stop()
    return clock


def test_the_time_between_two_steps_is_a_gap_on_a_cpu() -> None:
    first = clocked(None, pause=0.0, work=0.01)
    second = clocked(first, pause=0.03, work=0.02)
    assert first.gap_seconds == 0  # nothing was before it
    assert 0.01 <= first.wait() < 0.03
    assert 0.02 <= second.wait() < 0.05
    assert 0.03 <= second.gap_seconds < 0.06


def run(llm: LLM, pause: float) -> float:
    """Two requests, one after the other, with a pause before every step; the gap of both."""
    engine = llm.engine
    before = engine.metrics().gap_seconds
    for _ in range(2):
        request = engine.make_request([1, 2, 3], PARAMS)
        engine.submit(request)
        while engine.has_work:
            time.sleep(pause)
            engine.step()
        engine.close_request(request)
        engine.drain()
        time.sleep(0.5)  # idle: no gap
    return engine.metrics().gap_seconds - before


@pytest.mark.parametrize("pause", [0.0, 0.02])
def test_idle_times_do_not_count(pause: float) -> None:
    with golden_llm(None) as llm:
        gap = run(llm, pause)
    # 8 tokens: 7 decode steps of each request, the first of them after its prefill.
    assert 14 * pause <= gap < 14 * pause + 0.4


@pytest.mark.gpu
@pytest.mark.parametrize("late", [False, True])
def test_steps_that_are_queued_in_time_have_no_gap(late: bool) -> None:
    device = torch.device("cuda")
    x = torch.randn(4096, 4096, device=device)
    x @ x
    torch.cuda.synchronize()
    clocks: list[StepClock] = []
    for _ in range(4):
        clocks.append(StepClock.after(clocks[-1] if clocks else None, device))
        for _ in range(20):
            x @ x
        clocks[-1].stop()
        if late:
            torch.cuda.synchronize()
            time.sleep(0.01)
    for clock in clocks[1:]:
        assert clock.wait() > 0
        assert clock.gap_seconds >= 0.01 if late else clock.gap_seconds == 0
