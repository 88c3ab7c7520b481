"""Responses that run in the background: no connection waits for their end."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from forerun.server.generation import Call
from forerun.server.http.errors import ApiError
from forerun.server.http.exchange import current_exchange
from forerun.server.openai.response_state import ResponseState, owner
from forerun.server.openai.responses_output import CANCELLED, FAILED, IN_PROGRESS, QUEUED

log = logging.getLogger("forerun")


class BackgroundAnswer(Protocol):
    """A response whose generation runs."""

    state: ResponseState

    @property
    def call(self) -> Call: ...

    def begun(self, status: str) -> dict[str, Any]:
        """The response before there is any output."""

    async def finished(self) -> dict[str, Any]:
        """Waits for the response."""


@dataclass(eq=False)
class Run:
    """One of them. It is stored when it ends, unless it was deleted."""

    answer: BackgroundAnswer
    owner: str = field(default_factory=owner)
    cancelled: bool = False
    deleted: bool = False
    response: dict[str, Any] | None = None  # once it has ended

    def now(self) -> Mapping[str, Any]:
        """The response as it is."""
        if self.response is not None:
            return self.response
        begun = any(generation.record.output for generation in self.answer.call.generations)
        return self.answer.begun(IN_PROGRESS if begun else QUEUED)

    async def finish(self) -> None:
        """Waits for the end, and stores what has come of it."""
        try:
            response = await self.answer.finished()
        except ApiError as error:
            failure = {"code": error.code or "server_error", "message": error.message}
            response = {**self.answer.begun(FAILED), "error": failure}
        if self.cancelled:
            response |= {"status": CANCELLED, "incomplete_details": None}
        if not self.deleted:
            try:
                await self.answer.state.keep(response)
            except ApiError as error:
                log.error("The response %s is lost: %s", response["id"], error.message)
        self.response = response


class Background:
    """All that run now, by id."""

    def __init__(self) -> None:
        self._runs: dict[str, tuple[Run, asyncio.Task[None]]] = {}
        self._starting: Counter[str] = Counter()  # by owner

    @property
    def promised(self) -> int:
        """How many of the client's responses will be stored when they end."""
        whose = owner()
        return self._starting[whose] + sum(run.owner == whose for run, _ in self._runs.values())

    @contextmanager
    def starting(self) -> Iterator[int]:
        """Promises a place to one that starts in the block; yields how many others have one."""
        whose, others = owner(), self.promised
        self._starting[whose] += 1
        try:
            yield others
        finally:
            self._starting[whose] -= 1

    def start(self, answer: BackgroundAnswer) -> Mapping[str, Any]:
        """Lets a response run on, and returns what it is now. It counts for its API key."""
        run = Run(answer)
        response = run.now()
        ident = response["id"]
        task = asyncio.create_task(run.finish())
        task.add_done_callback(lambda _: self._runs.pop(ident, None))
        self._runs[ident] = run, task
        current_exchange.get().task = task
        return response

    def find(self, ident: str) -> Run | None:
        """The one with this id, if it runs and is the client's."""
        run, _ = self._runs.get(ident, (None, None))
        return run if run is not None and run.owner == owner() else None

    async def end(self, ident: str, delete: bool) -> Mapping[str, Any]:
        """Ends one that runs, and returns what it had.

        Args:
            delete: it is not stored.
        """
        run, task = self._runs[ident]
        run.cancelled, run.deleted = True, run.deleted or delete
        run.answer.call.close()
        await asyncio.wait({task})
        return run.now()
