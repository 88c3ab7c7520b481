"""A replica: a whole server without an address, in a Ray actor; its engine is a child process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.types import Message

from forerun.llm.setup import checked_config, with_models
from forerun.server.app import build_app
from forerun.server.engines.client import EngineState
from forerun.server.run import make_service
from forerun.server.settings import ServerSettings

# Every message passes the ingress and Serve's proxy, which spend up to a millisecond on it each.
PAUSE_SECONDS = 0.0025  # per running request, after a part of an answer
LONGEST_PAUSE_SECONDS = 0.1


class Engine:
    """Answers HTTP requests that the ingress passes on, as ASGI messages."""

    async def __init__(  # type: ignore[misc]  # Serve waits for it
        self, server: dict[str, Any], engine: dict[str, Any]
    ) -> None:
        """Settings, as checked by `Arguments`."""
        config = checked_config(engine)
        # Serve's proxy listens, under names that are not known here.
        name = {"served_model_name": config.model_path, "allowed_hosts": "*"} | server
        config, target = with_models(config)
        self._service = make_service(ServerSettings.of(name), config, target)
        await self._service.engine.start()
        self._app = build_app(self._service)
        self._tasks: set[asyncio.Task[None]] = set()

    async def check_health(self) -> None:
        """Ray replaces a replica whose engine stays away for some checks.

        Raises:
            RuntimeError: the engine does not serve.
        """
        state = self._service.engine.state
        if state is not EngineState.READY:
            raise RuntimeError(f"The engine is {state.value}.")

    async def answer(
        self, keys: Sequence[int], scope: dict[str, Any], body: bytes
    ) -> AsyncGenerator[list[Message], None]:
        """The messages of an answer. The first part of it is sent at once, later ones with what
        comes within a pause, which grows with the number of running requests.

        A caller that stops reading is a client that has left.

        Args:
            keys: of the prompt's blocks; `PrefixRouter` has read them.
            scope: of the HTTP request.
            body: all of it.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        gone = asyncio.Event()

        async def receive() -> Message:
            if request:
                return request.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        task = asyncio.ensure_future(self._app(scope, receive, messages.put))
        self._tasks.add(task)  # it may outlive this call
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while True:
                ready = [await messages.get()]
                while not messages.empty():
                    ready.append(messages.get_nowait())
                batch = [message for message in ready if message is not None]
                if batch:
                    yield batch
                if len(batch) < len(ready):
                    return
                if any(message.get("body") for message in batch):
                    pause = min(PAUSE_SECONDS * len(self._tasks), LONGEST_PAUSE_SECONDS)
                    await asyncio.wait({task}, timeout=pause)
        finally:
            gone.set()
