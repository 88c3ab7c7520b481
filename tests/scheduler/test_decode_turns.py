"""Which steps decode beside prompts, and how long steps are expected to take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.plan import DecodeRequest, PrefillChunk, StepPlan
from forerun.scheduler.decode_turns import DecodeTurns
from forerun.scheduler.schedule_policy import SchedulePolicy
from forerun.scheduler.step_times import MIN_EFFICIENT, MIN_FIXED_TOKENS, StepTimes
from tests.property_examples import examples
from tests.scheduler.test_scheduler import request

DECODE = 0.01


@examples(200)
@given(
    fixed=st.floats(0, 0.05),
    per_token=st.floats(1e-6, 1e-3),
    sizes=st.lists(st.integers(16, 8192), min_size=3, max_size=40),
)
def test_times_follow_a_line(fixed: float, per_token: float, sizes: list[int]) -> None:
    times = StepTimes()
    assert (times.expected(100, False), times.tokens(1.0), times.least(5, False)) == (None, 0, 0.0)
    for size in sizes:
        times.record(size, False, fixed + per_token * size)
    if min(sizes) * 2 < max(sizes) and sizes[-1] != sizes[-2]:
        for size in (64, 4096):
            want = fixed + per_token * size
            assert times.expected(size, False) == pytest.approx(want, rel=0.01)
            assert abs(times.tokens(want) - size) <= 1 + 0.01 * size
        efficient = times.efficient_tokens
        assert efficient is not None
        if efficient > MIN_EFFICIENT:  # a tenth of its time is fixed
            assert fixed == pytest.approx(0.1 * (fixed + per_token * efficient), rel=0.05)
    assert times.expected(0, True) is None  # no step has decoded
    times.record(0, True, DECODE)
    assert times.expected(0, True) == times.least(0, True) == DECODE


def test_equal_steps_tell_the_mean_only() -> None:
    times = StepTimes()
    for _ in range(9):
        times.record(1000, False, 0.02)
    assert times.efficient_tokens is None and times.shortest_wait(10**6) is None
    assert times.expected(500, False) == pytest.approx(0.01)


@examples(100)
@given(fixed=st.floats(0, 0.2), prompts=st.integers(1, 60))
def test_steps_have_the_prompts_with_the_shortest_mean_wait(fixed: float, prompts: int) -> None:
    """Beside the best division into steps, found by trying all; one prompt takes a second."""
    size, times = 8 * MIN_EFFICIENT, StepTimes()
    fixed = max(fixed, MIN_FIXED_TOKENS / size)
    for tokens in (size, 2 * size, size):
        times.record(tokens, False, fixed + tokens / size)
    best, chosen = [0.0], [0.0]  # sums of the waits, by the number of prompts
    for left in range(1, prompts + 1):
        waits = [left * (fixed + n) + best[left - n] for n in range(1, left + 1)]
        best.append(min(waits))
        tokens = times.shortest_wait(left * size)
        assert tokens is not None
        n = min(max(round(tokens / size), 1), left)
        chosen.append(left * (fixed + n) + chosen[left - n])
    assert chosen[prompts] <= 1.01 * best[prompts]


def test_decode_beside_prompts_is_what_they_do_not_take() -> None:
    times = StepTimes()
    times.record(100, True, 0.05)  # nothing is known about prompts
    assert times.expected(0, True) is None
    times.record(100, False, 0.04)
    times.record(100, True, 0.05)
    assert times.expected(0, True) == pytest.approx(0.01)


def test_a_slow_step_is_forgotten() -> None:
    times = StepTimes()
    times.record(1000, False, 3.0)  # something was compiled
    times.record(500, False, 0.01)
    assert times.expected(1000, False) == pytest.approx(0.02)
    for seconds in (0.01, 0.2, 0.01):
        times.record(0, True, seconds)
    assert times.least(0, True) == 0.01


def known(max_gap: float, max_first_gap: float) -> DecodeTurns:
    """A token of a prompt takes 1 ms, decode 10 ms."""
    policy = SchedulePolicy(max_mixed_step=max_gap, max_first_gap=max_first_gap)
    turns = DecodeTurns(policy, 20)
    for size in (10, 20):
        turns.times.record(size, False, 0.001 * size)
    turns.times.record(0, True, DECODE)
    return turns


def prefill(count: int) -> StepPlan:
    return StepPlan(prefill=[PrefillChunk(0, 0, count, True)])


def test_decode_waits_for_prompts_as_long_as_it_may() -> None:
    turns, running = known(0.1, 0.0), [request(0, (1,), 9)]
    tokens = []
    for _ in range(6):
        count = turns.tokens_before_decode(running, 0)
        tokens.append(count)
        if count:
            turns.planned(prefill(count), [])
        else:
            turns.planned(StepPlan(decode=[DecodeRequest(0, 1)]), running)
            break
    # The last of 0.1 s are for a step with decode and 20 tokens, of 0.03 s.
    assert tokens == [20, 20, 20, 0]


def test_nothing_waits_while_times_are_unknown_or_nobody_may_wait() -> None:
    running = [request(0, (1,), 9)]
    unknown = DecodeTurns(SchedulePolicy(max_mixed_step=0.1, max_first_gap=9.0), 20)
    unknown.add(running[0])
    assert unknown.tokens_before_decode(running, 0) == 0
    assert known(0.0, 0.0).tokens_before_decode(running, 0) == 0
    assert known(0.1, 0.0).tokens_before_decode([], 0) == 0
    assert known(0.1, 0.0).tokens_before_decode(running, None) == 0  # there are no prompts


def test_new_requests_wait_until_their_time_is_over() -> None:
    turns = known(0.0, 0.05)
    old, new, again = (request(i, (1,), 9) for i in range(3))
    again.preemptions = 1
    turns.add(new)
    turns.add(again)
    assert not turns.waits(new, 0)  # for whom?
    assert turns.burst_tokens == pytest.approx(500, abs=1)
    turns.begin_burst()
    assert turns.burst_tokens == 0  # it lasts
    assert [turns.waits(r, 0) for r in (old, new, again)] == [False, True, False]
    assert not turns.waits(new, None) and not turns.waits(new, 1)  # a less urgent prompt
    assert turns.tokens_before_decode([new], 0) == 20
    assert turns.tokens_before_decode([new, old], 0) == 0  # it is due: no gap is allowed
    for _ in range(3):
        turns.planned(prefill(20), [])
    assert not turns.waits(new, 0)
    turns.add(new)
    turns.no_prompts()
    assert not turns.waits(new, 0)
