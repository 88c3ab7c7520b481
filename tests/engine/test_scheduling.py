"""Priorities, policies and deadlines of an engine: what runs when, and always the same text."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from forerun import LLM, RequestError
from forerun.core.request import State
from forerun.core.sampling_params import SamplingParams
from forerun.core.scheduling_params import SchedulingParams
from forerun.engine.deadlines import MIN_SIZE, Deadlines
from tests.golden_engine import CASES, golden_llm
from tests.scheduler.test_scheduler import request

PROMPTS = [case["prompt"] for case in CASES[:4]]
# Beginnings in common, so that lpm has something to choose from.
ASKED = [*PROMPTS, *([*prompt[:24], i] for i, prompt in enumerate(PROMPTS))]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True},
    {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True, "sampling_seed": 3},
]
EXACT = SamplingParams(temperature=0.0, max_new_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    """Of plain decoding, each prompt alone."""
    with golden_llm(max_running_requests=1, disable_radix_cache=True) as llm:
        return [
            llm.generate(input_ids=p, sampling_params=k).output_ids for k in KINDS for p in ASKED
        ]


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("algorithm", [None, "DFLASH"])
@pytest.mark.parametrize(
    "settings",
    [
        {"schedule_policy": "lpm", "max_mixed_step_ms": 1, "max_running_requests": 2},
        {"schedule_policy": "lpm", "max_running_requests": 1, "overlap_depth": 1},
        {"max_mixed_step_ms": 1, "chunked_prefill_size": 64, "overlap_depth": 1},
        {"max_mixed_step_ms": 0, "max_prefill_tokens": 7, "max_running_requests": 3},
        {"schedule_low_priority_values_first": True, "max_running_requests": 2},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_the_text_depends_on_no_policy(
    algorithm: str | None, settings: dict[str, Any], wanted: list[list[int]]
) -> None:
    with golden_llm(algorithm, page_size=16, **settings) as llm:
        got = [
            output.output_ids
            for kind in KINDS
            for output in llm.generate(
                input_ids=ASKED,
                sampling_params=kind,
                priority=[i % 3 - 1 for i in range(len(ASKED))],
            )
        ]
        assert got == wanted
        llm.engine.check()


@pytest.mark.parametrize(("low_first", "order"), [(False, "bcad"), (True, "dacb")])
def test_priorities_of_an_llm(low_first: bool, order: str) -> None:
    priorities = {"a": 0, "b": 7, "c": 7, "d": -2}
    if low_first:
        priorities["c"] = 6
    with golden_llm(max_running_requests=1, schedule_low_priority_values_first=low_first) as llm:
        engine = llm.engine
        for rid, priority in priorities.items():
            scheduling = SchedulingParams(priority)
            engine.submit(engine.make_request(PROMPTS[0], EXACT, rid, scheduling=scheduling))
        assert engine.metrics().waiting_by_priority == (
            {0: 1, 7: 1, 6: 1, -2: 1} if low_first else {0: 1, 7: 2, -2: 1}
        )
        ended = []
        while engine.has_work:
            ended += [each.rid for each in engine.step() if each.state is State.FINISHED]
        assert "".join(ended) == order
        assert engine.metrics().waiting_by_priority == {}


def test_steps_with_decode_and_prompts_are_counted() -> None:
    with golden_llm(max_mixed_step_ms=1, max_running_requests=2) as llm:
        llm.generate(input_ids=ASKED, sampling_params=[
            {**KINDS[0], "max_new_tokens": 4 + 4 * i} for i in range(len(ASKED))
        ])  # fmt: skip
        metrics = llm.engine.metrics()
        assert sum(metrics.mixed_seconds.counts) > 0
        assert sum(metrics.prefill_seconds.counts) > 0
        assert metrics.mixed_prefill_tokens <= 256


# --- deadlines --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_slot() -> Iterator[LLM]:
    with golden_llm(max_running_requests=1) as llm:
        yield llm


def test_a_request_leaves_the_queue_when_it_has_waited_too_long(one_slot: LLM) -> None:
    """One that has run, and lost its slot, stays."""
    engine = one_slot.engine
    timeouts = SchedulingParams(queue_timeout=0.05)
    runs = engine.make_request(PROMPTS[0], EXACT, "runs", scheduling=timeouts)
    engine.submit(runs)
    engine.step()
    waits = engine.make_request(PROMPTS[1], EXACT, "waits", scheduling=timeouts)
    engine.submit(waits)
    time.sleep(0.06)
    engine.scheduler._preempt(runs)
    assert waits in engine.step()
    assert waits.finish is not None and waits.finish.as_dict() == {
        "type": "abort",
        "message": "The request waited longer than its queue_timeout of 0.05 s.",
        "err_type": "queue_timeout",
    }
    while engine.has_work:
        engine.step()
    assert runs.finish is not None and runs.finish.type == "length"
    for each in (runs, waits):
        engine.close_request(each)
    engine.check()


def test_a_request_ends_with_what_it_has_when_its_time_is_over(one_slot: LLM) -> None:
    params = {**KINDS[0], "max_new_tokens": 100}
    whole = one_slot.generate(input_ids=PROMPTS[0], sampling_params=params)
    cut, waited = one_slot.generate(
        input_ids=[PROMPTS[0], PROMPTS[1]],
        sampling_params=[params, {**params, "max_new_tokens": 2}],
        request_timeout=[whole.meta_info["e2e_latency"] / 3, None],
    )
    reason = cut.finish_reason
    assert reason["type"] == "abort" and reason["err_type"] == "request_timeout"
    assert cut.output_ids == whole.output_ids[: len(cut.output_ids)]
    assert len(cut.output_ids) < len(whole.output_ids)
    assert waited.finish_reason["type"] == "length"
    one_slot.engine.check()


def test_values_are_checked_before_anything_is_queued(one_slot: LLM) -> None:
    for options, words in (
        ({"priority": [1, 2]}, "2 values of priority for 1 prompts"),
        ({"priority": 1.5}, "priority must be an integer"),
        ({"queue_timeout": -1}, "queue_timeout must be > 0"),
        ({"request_timeout": float("nan")}, "request_timeout must be finite"),
        ({"priorty": 1}, "Did you mean 'priority'"),
    ):
        with pytest.raises(RequestError, match=words):
            one_slot.generate(input_ids=PROMPTS[:1], sampling_params=KINDS[0], **options)
    with pytest.raises(RequestError, match=r"generate\(..., priority=...\)"):
        one_slot.generate(input_ids=PROMPTS[0], sampling_params={"priority": 1})
    assert not one_slot.engine.has_work


def test_deadlines_of_ended_requests_are_dropped() -> None:
    deadlines, open_ = Deadlines(), []
    for i in range(20 * MIN_SIZE):
        one = request(i, (1,), 1)
        one.scheduling = SchedulingParams(queue_timeout=1000.0, request_timeout=2000.0)
        if i % 100:
            one.state = State.FINISHED
        else:
            open_.append(one)
        deadlines.add(one)
    assert len(deadlines) < 2 * MIN_SIZE + 2 * len(open_)
    late = time.monotonic() + 10_000
    assert len(list(deadlines.passed(late))) == 2 * len(open_)
    assert len(deadlines) == 0 and not list(deadlines.passed(late))
