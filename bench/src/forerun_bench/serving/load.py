"""Sends requests at their times, and observes the client's own delays.

Open loop: a request is sent when it is due, however many are in flight. Times are absolute, so a
late request does not move the later ones. With a bound on the requests in flight it is a closed
loop: those that are due wait for a place, and count as due when they get it.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from forerun_bench.serving.client import Live, Outcome

LEAD: Final = 0.02  # seconds from the call to the first request
TICK: Final = 0.02  # seconds between samples of the event loop's delay
SHOW: Final = 25  # ticks between updates of the display

Send = Callable[[int, float], Awaitable[Outcome]]  # request number, due time
Watch = Callable[[Live, float], None]  # counters, seconds since the start


@dataclass(frozen=True)
class Load:
    """A run. `lags`: seconds by which the event loop was late for its ticks."""

    outcomes: list[Outcome]
    started: float
    ended: float
    peak: int  # most requests in flight
    lags: list[float]

    @property
    def seconds(self) -> float:
        return self.ended - self.started


async def run_load(
    send: Send,
    arrivals: Sequence[float],
    live: Live,
    max_concurrency: int | None = None,
    watch: Watch = lambda live, seconds: None,
) -> Load:
    """Sends request i at `arrivals[i]` seconds, not decreasing, and waits for all answers."""
    time = asyncio.get_running_loop().time
    places = asyncio.Semaphore(max_concurrency or len(arrivals))

    async def one(number: int, due: float) -> Outcome:
        waits = places.locked()
        async with places:
            return await send(number, time() if waits else due)

    gc.collect()
    gc.disable()  # a collection would delay every request in flight
    started = time() + LEAD
    lags: list[float] = []
    ticker = asyncio.create_task(_tick(lags, lambda: watch(live, time() - started)))
    tasks = []
    try:
        for number, offset in enumerate(arrivals):
            wait = started + offset - time()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(number, started + offset)))
        outcomes = await asyncio.gather(*tasks)
    finally:
        gc.enable()
        for task in (ticker, *tasks):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await ticker
    ended = max((outcome.ended for outcome in outcomes), default=started)
    return Load(outcomes, started, ended, live.peak, lags)


async def _tick(lags: list[float], show: Callable[[], None]) -> None:
    time = asyncio.get_running_loop().time
    while True:
        due = time() + TICK
        await asyncio.sleep(TICK)
        lags.append(time() - due)
        if len(lags) % SHOW == 0:
            show()
