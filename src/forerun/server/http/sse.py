"""Answers that end when the client is gone: server-sent events, and plain ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forerun.server.http.errors import ApiError
from forerun.server.http.exchange import current_exchange

log = logging.getLogger("forerun")
T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # no proxy may hold it back
# In the OpenAPI document, of endpoints with streams.
DOCUMENTED_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
_encode = msgspec.json.Encoder().encode


def event(value: Any) -> bytes:
    """One server-sent event with JSON."""
    return b"data: " + _encode(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """One server-sent event with a name."""
    return b"event: " + name.encode() + b"\n" + event(value)


async def with_pings(
    source: AsyncGenerator[bytes, None], ping: bytes, seconds: float
) -> AsyncGenerator[bytes, None]:
    """The events of a source, and `ping` whenever it has been silent for so many seconds."""
    async with aclosing(source):
        waiting: asyncio.Future[bytes | None] | None = None
        try:
            while True:
                waiting = waiting or asyncio.ensure_future(_next(source))
                await asyncio.wait({waiting}, timeout=seconds)
                if not waiting.done():
                    yield ping
                    continue
                data = waiting.result()
                if data is None:
                    return
                waiting = None
                yield data
        finally:
            if waiting is not None and not waiting.done():
                waiting.cancel()
                await asyncio.wait({waiting})


async def _next(source: AsyncGenerator[bytes, None]) -> bytes | None:
    """The next event; None at the end."""
    return await anext(source, None)


class EventStream(Response):
    """Server-sent events. An error becomes the last event; a client that leaves ends the source.

    `send` waits while the client reads slowly; meanwhile the source's next event grows.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], on_end: Callable[[], None]) -> None:
        """`on_end`: called in any case, also if the client leaves before the first event."""
        self._events, self._on_end = events, on_end
        self.status_code = 200
        self.background: BackgroundTask | None = None
        self.init_headers(HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._write(send))
        except ClientDisconnect:
            log.debug("A client left its stream.")
            current_exchange.get().has_left = True
        finally:
            self._on_end()

    async def _write(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        async with aclosing(self._events) as events:
            try:
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except ApiError as error:
                data = event(error.body())
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Does the work, and cancels it as soon as the client is gone. The body has been read.

    Raises:
        ClientDisconnect: it was cancelled.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, watcher):
            if not one.done():
                one.cancel()
        await asyncio.wait({task, watcher})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
