"""The time at which a process that keeps dying is started again."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_DELAY, MAX_DELAY = 0.5, 30.0  # seconds
HEALTHY_SECONDS = 60.0  # who lived this long had a good start
MAX_QUICK_DEATHS = 5  # in a row


class Backoff:
    """Delays that double with every quick death, until it gives up."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._quick_deaths = 0

    def started(self) -> None:
        """The process is being started."""
        self._started = self._clock()

    def died(self) -> float | None:
        """Seconds to wait before the next start; None: give up."""
        if self._clock() - self._started >= HEALTHY_SECONDS:
            self._quick_deaths = 0
        self._quick_deaths += 1
        if self._quick_deaths > MAX_QUICK_DEATHS:
            return None
        return min(FIRST_DELAY * 2.0 ** (self._quick_deaths - 1), MAX_DELAY)
