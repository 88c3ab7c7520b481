"""Limits on what a client may send and ask for."""

from __future__ import annotations

import asyncio
import time

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.core.errors import RequestError
from forerun.server.http.errors import ApiError
from forerun.server.http.exchange import current_exchange

BODY_SECONDS = 60.0  # between two parts of a body
WHOLE_BODY_SECONDS = 300.0  # from its first part to its end


class LimitBody:
    """Middleware: bodies of more than `max_bytes` are refused before they are read or kept.

    So are those that do not go on, or come too slowly.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared[:20]) > self._max_bytes:
            await ApiError(413, self._message, code="request_too_large").response()(
                scope, receive, send
            )
            return
        received, complete = 0, False
        begun = time.monotonic()

        async def counted() -> Message:
            nonlocal received, complete
            if complete:  # whoever asks now waits for the client to leave
                return await receive()
            left = begun + WHOLE_BODY_SECONDS - time.monotonic()
            try:
                async with asyncio.timeout(min(BODY_SECONDS, left)):
                    message = await receive()
            except TimeoutError:
                raise _too_slow(stopped=left > BODY_SECONDS) from None
            if message["type"] == "http.disconnect":
                current_exchange.get().has_left = True
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise HTTPException(413, self._message)
            complete = not message.get("more_body", False)
            return message

        await self._app(scope, counted, send)

    @property
    def _message(self) -> str:
        return (
            f"The body is larger than {self._max_bytes} bytes, the server's --max-body-bytes."
            " Send less, or raise it."
        )


def _too_slow(stopped: bool) -> HTTPException:
    if stopped:
        detail = f"The body stopped for {BODY_SECONDS:.0f} s before its end."
    else:
        detail = f"The body did not come within {WHOLE_BODY_SECONDS:.0f} s."
    return HTTPException(408, detail, headers={"Connection": "close"})


def check_queue(in_flight: int, new: int, slots: int, max_queued: int) -> None:
    """Refuses requests that would have to wait behind too many others.

    Args:
        in_flight: requests that run or wait.
        new: requests to be added.
        slots: requests that can run at the same time.

    Raises:
        RequestError: they would not fit into an empty queue either.
        ApiError: 429, try again later.
    """
    room = slots + max_queued
    if new > room:
        raise RequestError(
            f"{new} completions in one request; the server takes {room}"
            " (max_running_requests + max_queued_requests)."
        )
    if in_flight + new > room:
        raise ApiError(
            429,
            f"The queue is full: {in_flight} requests are running or waiting, and the server takes"
            f" {room}. Try again later.",
            code="queue_full",
            headers={"Retry-After": "1"},
        )
