"""The HTTP request that is being served, as all code that runs for it can see it."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from uuid import uuid4

from forerun.server.generation import Call

REQUEST_ID = re.compile(r"[!-~]{1,128}")  # printable ASCII without spaces


@dataclass(eq=False)
class Exchange:
    """One HTTP request, and what was started for it."""

    request_id: str
    # Who asks, opaque: the name of the API key, or the connection where there is none.
    client: str = ""
    key: str | None = None  # the name of its API key; requests belong to the key that made them
    tenant: int = 0  # of the key; 0 without one
    is_admin: bool = True  # may use what concerns all clients
    has_left: bool = False  # the client, before it had its answer
    started: float = field(default_factory=time.monotonic)
    trace_context: dict[str, str] = field(default_factory=dict)  # headers of its span
    calls: list[Call] = field(default_factory=list)
    status: int = 0  # of the answer; 0: none was begun
    task: asyncio.Task[None] | None = None  # that goes on after the answer

    def when_over(self, end: Callable[[], None]) -> None:
        """Calls `end` as soon as nothing runs for it; its answer is complete."""
        if self.task is None:
            end()
        else:
            self.task.add_done_callback(lambda _: end())


current_exchange: ContextVar[Exchange] = ContextVar("current_exchange")


def request_id(given: str | None) -> str:
    """What the client sent as X-Request-Id, if that can be an id; else a new one."""
    if given is not None and REQUEST_ID.fullmatch(given):
        return given
    return uuid4().hex
