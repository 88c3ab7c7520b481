"""Notices an engine process that hangs: it is asked for a sign of life between two steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

WATCHDOG_TIMEOUT = 300.0  # seconds; SGLang's default
QUESTIONS = 20  # within the timeout: a step may take all of it but one part
MAX_INTERVAL = 5.0  # seconds between two questions


class Watchdog:
    """Watches one engine process. All methods belong to the event loop's thread.

    Silence is counted in intervals, not by the clock: while this process itself could not run, it
    could not hear anything either.
    """

    def __init__(self, timeout: float) -> None:
        """`timeout`: seconds without a message, after which the process is taken to hang."""
        self._interval = min(timeout / QUESTIONS, MAX_INTERVAL)
        self._chances = round(timeout / self._interval) - 1  # intervals in which to answer
        self._heard = False

    def heard(self) -> None:
        """A message has come."""
        self._heard = True

    async def watch(self, ask: Callable[[], None]) -> None:
        """Returns once nothing was heard for too long. `ask`: for a message."""
        self._heard = True
        while self._heard:
            self._heard = False
            ask()
            for _ in range(self._chances):
                await asyncio.sleep(self._interval)
                if self._heard:
                    break
