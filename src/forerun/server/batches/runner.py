"""Runs the lines of a batch on the server's endpoints, several at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from starlette.types import ASGIApp, Message

from forerun.server.batches.lines import Line, failure, result
from forerun.server.http.exchange import Exchange, current_exchange

MAX_TRIES = 5  # of a request, while the engine starts again or fails it
BUSY, UNAVAILABLE = 429, 503
WAIT_SECONDS = 1.0  # before another try; times the number of tries


@dataclass(frozen=True)
class Client:
    """Whoever requests are made for."""

    name: str
    key: str | None = None
    tenant: int = 0
    max_requests: int | None = None  # at a time

    def exchange(self) -> Exchange:
        exchange = Exchange(uuid4().hex, client=self.name, key=self.key, tenant=self.tenant)
        exchange.is_admin = False
        return exchange


@dataclass
class Counts:
    """How many requests there are and how they ended, as OpenAI's batches say it."""

    total: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(frozen=True)
class Answered:
    """The line of the output for a line of the input."""

    output: bytes
    completed: bool  # the answer is not an error


@dataclass(frozen=True)
class Runner:
    """Runs lines of one client."""

    app: ASGIApp  # of `requests_app`
    client: Client
    width: int  # requests at a time
    is_ready: Callable[[], bool] = lambda: True  # there is an engine
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of bodies

    async def run(self, lines: Iterable[Line], write: Callable[[Answered], None]) -> None:
        """Writes a result for each line, in the order in which they come.

        Cancelled, it ends the requests that run.
        """
        running: set[asyncio.Task[Answered]] = set()
        try:
            for line in lines:
                while len(running) >= self.width:
                    running = await _write_some(running, write)
                running.add(asyncio.create_task(self._answer(line)))
                await asyncio.sleep(0)
            while running:
                running = await _write_some(running, write)
        finally:
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running)

    async def _answer(self, line: Line) -> Answered:
        if line.error is not None or line.body is None:
            return Answered(failure(line, "invalid_line", line.error or ""), completed=False)
        stateless = {"store": False} if line.url.endswith("/responses") else {}
        body = json.dumps({**stateless, **self.defaults, **line.body}).encode()
        tries = 0
        while True:
            while not self.is_ready():
                await asyncio.sleep(WAIT_SECONDS)
            exchange = self.client.exchange()
            current_exchange.set(exchange)
            status, answer = await post(self.app, line.url, body)
            tries += status == UNAVAILABLE
            if status not in (BUSY, UNAVAILABLE) or tries >= MAX_TRIES:
                return Answered(result(line, status, answer, exchange.request_id), status < 400)
            await asyncio.sleep(WAIT_SECONDS * max(tries, 1))


async def _write_some(
    running: set[asyncio.Task[Answered]], write: Callable[[Answered], None]
) -> set[asyncio.Task[Answered]]:
    """Waits for one task or more, writes what they return, and returns the others."""
    done, others = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        write(task.result())
    return others


async def post(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of the application's answer, without a network."""
    status, parts, received = 500, list[bytes](), False

    async def receive() -> Message:
        nonlocal received
        if received:  # whoever asks now waits for the client to leave, which it never does
            await asyncio.Event().wait()
        received = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "headers": [(b"content-type", b"application/json")],
        "client": None, "server": None,
    }  # fmt: skip
    serving = asyncio.ensure_future(_call(app, scope, receive, send))
    try:
        await asyncio.wait({serving})
        serving.exception()  # of a bug: it has been logged and answered with 500
    finally:
        serving.cancel()
    return status, b"".join(parts)


async def _call(app: ASGIApp, scope: Any, receive: Any, send: Any) -> None:
    await app(scope, receive, send)
