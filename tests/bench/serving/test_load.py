"""When requests are sent: on time, whatever the server and the client do."""

from __future__ import annotations

import asyncio
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun_bench.serving.client import Live, Outcome
from forerun_bench.serving.load import LEAD, TICK, Load, run_load
from tests.bench.serving.stand_in import VirtualLoop, virtually
from tests.property_examples import examples

GAPS = st.lists(st.floats(0, 0.2), min_size=1, max_size=12)


def run(
    arrivals: list[float],
    seconds: float,
    max_concurrency: int | None = None,
    stall: tuple[int, float] = (-1, 0.0),
) -> Load:
    """Requests that take `seconds` each; in number `stall[0]` the client's thread is blocked."""

    async def work() -> Load:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        live = Live(total=len(arrivals))

        async def send(number: int, due: float) -> Outcome:
            outcome = Outcome(due=due, sent=loop.time())
            live.in_flight += 1
            live.peak = max(live.peak, live.in_flight)
            if number == stall[0]:
                loop.now += stall[1]
            await asyncio.sleep(seconds)
            live.in_flight -= 1
            outcome.ended = loop.time()
            return outcome

        return await run_load(send, arrivals, live, max_concurrency)

    return virtually(work)


@examples(20)
@given(GAPS)
def test_an_open_loop_does_not_wait_for_answers(gaps: list[float]) -> None:
    arrivals = [at - gaps[0] for at in accumulate(gaps)]
    load = run(arrivals, seconds=0.5)
    assert load.started == pytest.approx(LEAD)
    for outcome, at in zip(load.outcomes, arrivals, strict=True):
        assert outcome.sent == pytest.approx(load.started + at, abs=1e-6)
        assert outcome.due == load.started + at
    assert load.seconds == pytest.approx(arrivals[-1] + 0.5)


def test_a_stalled_client_is_late_once_and_says_so() -> None:
    """Times are absolute: requests after the stall are on time again."""
    load = run([0.0, 0.1, 0.2, 0.4, 0.5], seconds=0.01, stall=(1, 0.25))
    delays = [outcome.sent - outcome.due for outcome in load.outcomes]
    assert delays == pytest.approx([0, 0, 0.15, 0, 0], abs=1e-6)
    assert max(load.lags) == pytest.approx(0.25, abs=TICK + 1e-6)


@examples(20)
@given(st.integers(1, 4), st.integers(1, 9))
def test_a_closed_loop_keeps_its_bound(bound: int, count: int) -> None:
    load = run([0.0] * count, seconds=0.1, max_concurrency=bound)
    assert load.peak == min(bound, count)
    assert load.seconds == pytest.approx(0.1 * -(-count // bound))
    for outcome in load.outcomes:  # waiting for a place is not the client's delay
        assert outcome.sent - outcome.due == pytest.approx(0, abs=1e-6)


def test_an_error_of_ours_ends_the_run() -> None:
    async def work() -> Load:
        async def send(number: int, due: float) -> Outcome:
            raise ZeroDivisionError

        return await run_load(send, [0.0, 5.0], Live(total=2))

    with pytest.raises(ZeroDivisionError):
        virtually(work)
