"""The ingress: takes HTTP requests and passes each on to the replica that probably has its prefix.

It reads the prompt's text out of the body, no more; all routes and errors are the replicas' own.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ray.exceptions import RayActorError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from forerun.ray.prompt_keys import prompt_keys
from forerun.server.http.errors import EngineUnavailable
from forerun.server.http.sse import event, until_disconnect

log = logging.getLogger("forerun")

ATTEMPTS = 2  # a request may be what its replica died of
SCOPE = (
    "type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers",
    "client", "server",
)  # fmt: skip


class Ingress:
    """One per application; stateless, but for what the router of its handle knows."""

    def __init__(self, engine: Any) -> None:
        """`engine`: the handle of the replicas."""
        self._answer = engine.options(method_name="answer", stream=True)

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        scope = {name: request.scope[name] for name in SCOPE if name in request.scope}
        scope |= {"asgi": {"version": "3.0"}, "root_path": ""}
        keys = prompt_keys(body)
        for _ in range(ATTEMPTS):
            batches = self._answer.remote(keys, scope, body)
            try:
                return Forwarded(await anext(batches), batches)
            except RayActorError as error:  # nothing was sent yet
                log.warning("A replica has died; its request runs again. %s", _line(error))
        return EngineUnavailable("The replica has died. The request was lost.").response()


class Forwarded(Response):
    """An answer whose first messages have come."""

    def __init__(self, first: Sequence[Message], batches: Any) -> None:
        self._first, self._batches = first, batches
        self.status_code = first[0]["status"]
        self.raw_headers = list(first[0]["headers"])
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._write(send))
        except ClientDisconnect:
            log.debug("A client left its answer.")
        finally:
            self._batches.cancel()

    async def _write(self, send: Send) -> None:
        try:
            async for message in self._messages():
                await send(message)
        except RayActorError as error:
            log.warning("A replica has died. %s", _line(error))
            if b"text/event-stream" not in dict(self.raw_headers).get(b"content-type", b""):
                raise  # the connection closes: the answer is not complete
            lost = EngineUnavailable("The replica has died. The request was lost.")
            data = event(lost.body())
            await send({"type": "http.response.body", "body": data, "more_body": False})

    async def _messages(self) -> AsyncIterator[Message]:
        for message in self._first:
            yield message
        async for batch in self._batches:
            for message in batch:
                yield message


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]
