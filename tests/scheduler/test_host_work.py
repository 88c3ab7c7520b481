"""What a step costs the host: Python's calls for each request, counted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from forerun.config.engine_config import EngineConfig
from forerun.core.sampling_params import SamplingParams
from forerun.engine.engine import Engine
from forerun.scheduler.adaptive_width import AdaptiveWidth, FixedWidth, WidthPolicy
from forerun_bench.simulated_load import H200_8B, PAGE, TOKEN, Clock, SimulatedExecutor

SLOTS = 48


def calls(run: Callable[[], object]) -> int:
    """Calls of Python's and of C's functions while it runs."""
    count = 0

    def on_event(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(on_event)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def step_calls(requests: int, widths: WidthPolicy) -> int:
    """Calls of a step in which so many requests decode and none needs a page."""
    engine = Engine(EngineConfig(), SimulatedExecutor(H200_8B, 8192, SLOTS, Clock()))
    engine.scheduler.widths = widths
    params = SamplingParams(temperature=0.0, max_new_tokens=512, ignore_eos=True)
    for i in range(requests):
        engine.submit(engine.make_request([2 + i % 6] * (PAGE + 1), params, rid=str(i)))
    for _ in range(6):
        engine.step()
    return min(calls(engine.step) for _ in range(8))


@pytest.mark.parametrize(
    ("policy", "most"),
    [
        (lambda: FixedWidth((1,)), 24),
        (lambda: AdaptiveWidth((1, 2, 4), {1: [1.0, 9.0, 9.0], 64: [1.0, 9.0, 9.0]}), 32),
    ],
    ids=["plain", "adaptive"],
)
def test_each_request_of_a_plain_step_takes_few_calls(
    policy: Callable[[], WidthPolicy], most: int
) -> None:
    few, many = step_calls(16, policy()), step_calls(48, policy())
    assert (many - few) / 32 <= most


def test_only_new_pages_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(EngineConfig(), SimulatedExecutor(H200_8B, 8192, SLOTS, Clock()))
    params = SamplingParams(temperature=0.0, max_new_tokens=3 * PAGE, ignore_eos=True)
    request = engine.make_request([2] * PAGE, params)
    engine.submit(request)
    looked = []
    grow = engine.scheduler._grow

    def counted(*args: Any) -> bool:
        looked.append(len(request.output))
        return grow(*args)

    monkeypatch.setattr(engine.scheduler, "_grow", counted)
    while engine.has_work:
        engine.step()
    assert len(looked) <= 3


def test_a_plain_step_is_no_outcome_of_drafts() -> None:
    class Policy(FixedWidth):
        plain_steps = 0

        def record_plain_step(self, requests: Any) -> None:
            self.plain_steps += len(requests)

        def record_outcomes(self, outcomes: Any) -> None:
            raise AssertionError("there were no drafts")

    engine = Engine(EngineConfig(), SimulatedExecutor(H200_8B, 8192, SLOTS, Clock()))
    engine.scheduler.widths = policy = Policy((1,))
    request = engine.make_request([2] * 5, SamplingParams(max_new_tokens=9, ignore_eos=True))
    engine.submit(request)
    while engine.has_work:
        engine.step()
    assert request.output == [TOKEN] * 9
    assert policy.plain_steps == 8  # the first token is the prompt's
