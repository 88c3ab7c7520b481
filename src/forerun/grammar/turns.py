"""Whose costly grammar is compiled next."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from forerun.core.errors import BusyError

AT_ONCE = 2  # costly grammars, each of another client
MAX_WAITING, MAX_WAITING_PER_CLIENT = 16, 4  # for a turn

_AGAIN = "try again later, or send simpler ones"


class Turns:
    """One at a time for every client, in order; the first who may goes on. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: set[str] = set()  # clients
        self._waiting: list[tuple[str, object]] = []

    @contextmanager
    def turn(self, client: str, seconds: float) -> Iterator[None]:
        """Waits for a turn, which the block has.

        Raises:
            BusyError: too many wait, or there was none within `seconds`.
        """
        ticket = (client, object())
        with self._changed:
            of_client = sum(each == client for each, _ in self._waiting)
            if of_client >= MAX_WAITING_PER_CLIENT:
                raise BusyError(
                    f"{of_client} of your grammars wait to be compiled, which take long; {_AGAIN}."
                )
            if len(self._waiting) >= MAX_WAITING:
                raise BusyError(f"Too many grammars wait that take long to compile; {_AGAIN}.")
            self._waiting.append(ticket)
            try:
                has_turn = self._changed.wait_for(lambda: self._may_go(ticket), seconds)
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
            if not has_turn:
                raise BusyError(f"Other grammars are taking too long to compile; {_AGAIN}.")
            self._running.add(client)
        try:
            yield
        finally:
            with self._changed:
                self._running.remove(client)
                self._changed.notify_all()

    def _may_go(self, ticket: tuple[str, object]) -> bool:
        free = (each for each in self._waiting if each[0] not in self._running)
        return len(self._running) < AT_ONCE and next(free, None) == ticket
