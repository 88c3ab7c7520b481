"""The limit of prompt tokens beside decode, against simulated step times."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.scheduler.prefill_budget import MIN_TOKENS, TILE, PrefillBudget
from forerun.scheduler.schedule_policy import SchedulePolicy
from forerun.scheduler.step_times import StepTimes
from tests.property_examples import examples
from tests.scheduler.test_scheduler import make, plain, request, run

BOUND = 0.2


def made(max_tokens: int, bound: float = BOUND, decode: float = 0.0) -> PrefillBudget:
    """One that knows the time of decode, if it is over 0."""
    times = StepTimes()
    times.record(0, True, decode)
    return PrefillBudget(max_tokens, bound, times)


def record_step(budget: PrefillBudget, decode: float, per_token: float) -> tuple[int, float]:
    """A mixed step that uses the whole limit; returns its tokens and seconds."""
    tokens = budget.tokens(mixed=True)
    seconds = decode + per_token * tokens
    budget.record(tokens, True, seconds)
    return tokens, seconds


@examples(200)
@given(
    decode=st.floats(0.001, 0.3),
    per_token=st.floats(1e-6, 0.01),
    later=st.floats(1e-6, 0.01),
    max_tokens=st.sampled_from([3, 40, 512, 8192]),
)
def test_it_follows_the_cost_of_a_token(
    decode: float, per_token: float, later: float, max_tokens: int
) -> None:
    budget = made(max_tokens, decode=decode)
    for cost in (per_token, later, per_token):
        for _ in range(12):
            tokens, seconds = record_step(budget, decode, cost)
        assert budget.tokens(mixed=False) == max_tokens
        assert min(MIN_TOKENS, max_tokens) <= tokens <= max_tokens
        if tokens > MIN_TOKENS:
            assert seconds <= BOUND * 1.0001
        if tokens < max_tokens and decode < 0.9 * BOUND:  # another tile would be too much
            assert seconds + 2 * cost * TILE >= BOUND * 0.9999


@pytest.mark.parametrize("known", [0.0, 0.02, 1.0])
def test_a_wrong_time_of_decode_is_harmless(known: float) -> None:
    """It changes with the batch; steps stay near the limit."""
    budget = made(4096, decode=known)
    steps = [record_step(budget, 0.05, 1e-4) for _ in range(30)][-10:]
    assert max(seconds for _, seconds in steps) < 1.25 * BOUND
    assert known > BOUND or min(tokens for tokens, _ in steps) >= 1200


def test_it_starts_low() -> None:
    """The first long prompt stalls nobody; where its tokens are cheap the limit is soon gone."""
    budget = made(2048)
    assert [record_step(budget, 0.01, 2e-5)[0] for _ in range(5)] == [256, 512, 1024, 2048, 2048]


def test_a_slow_step_is_forgotten() -> None:
    budget = made(4096, decode=0.01)
    budget.record(8, False, 3.0)  # something was compiled
    limits = [record_step(budget, 0.01, 1e-4)[0] for _ in range(7)]
    assert limits == [128, 256, 512, 1024, 1888, 1888, 1888]


def test_prompts_alone_lower_the_limit_in_advance() -> None:
    budget = made(2048)
    budget.record(2048, False, 2.0)
    assert budget.tokens(mixed=True) == 192  # 204 would take 0.2 s
    assert budget.tokens(mixed=False) == 2048
    budget.record(2048, False, 0.1)  # what decode adds is not known
    assert budget.tokens(mixed=True) == 192
    budget.record(10, True, 0.01)  # a short prompt says nothing about long ones
    assert budget.tokens(mixed=True) == 192


def test_zero_is_no_limit() -> None:
    budget = made(2048, 0.0)
    budget.record(2048, True, 60.0)
    assert budget.tokens(mixed=True) == 2048


def test_steps_of_a_scheduler_stay_below_the_bound() -> None:
    """Requests that decode get their tokens while a long prompt is computed."""
    policy = SchedulePolicy(max_mixed_step=0.05)
    scheduler, device = make(
        page_size=16, pages=200, chunk=1024, slots=4, context=1200, policy=policy
    )
    launch, times = device.launch, []

    def timed(plan):  # type: ignore[no-untyped-def]
        seconds = 0.002 * bool(plan.decode) + sum(
            chunk.num_tokens * (1.5e-4 + 1e-7 * chunk.start) for chunk in plan.prefill
        )
        times.append((bool(plan.decode), bool(plan.prefill), seconds))
        result = launch(plan)
        return type(result)(result.decode, result.prefill, seconds)

    device.launch = timed  # type: ignore[method-assign]
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(6) for _ in range(n)) for n in (200, 30, 900)]
    requests = [request(i, p, 100, eos=False) for i, p in enumerate(prompts)]
    scheduler.add(requests[0])
    scheduler.add(requests[1])
    while len(requests[1].output) < 20:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.complete(device.launch(plan))
    times.clear()
    run(scheduler, device, [requests[2]], rng)
    mixed = [seconds for decode, prefill, seconds in times if decode and prefill]
    assert len(mixed) >= 4 and max(mixed) <= 0.1
    # Each chunk costs more than the one before, which the limit follows a step later.
    assert sorted(mixed)[len(mixed) // 2] <= 0.06
    assert all(r.output == plain(r.prompt, 100, None) for r in requests)
