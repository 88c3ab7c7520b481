"""One engine process, as the API process sees it: two sockets and a process to watch."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from forerun.core.errors import ConfigError
from forerun.core.executor import ExecutorInfo
from forerun.server.engine_process import EngineTask, start_engine
from forerun.server.errors import ServerStartError
from forerun.server.messages import (
    FromEngine,
    Ready,
    Refused,
    Shutdown,
    ToEngine,
    decode_from_engine,
    encode,
)
from forerun.server.placement import Placement

LAST_WORDS_SECONDS = 0.5  # that messages of an ended process may be on their way
TURN_SECONDS = 0.01  # of reading messages that wait, before others get their turn
CLOSE_SECONDS = 10.0  # until a process that does not exit is killed


class EngineLink:
    """Starts an engine process; a new one gets a new link, so no message of an old one survives."""

    _numbers = itertools.count()

    def __init__(
        self, placement: Placement, model_path: Path, folder: Path, log_format: str
    ) -> None:
        """`folder`: for the sockets; only this user may enter it."""
        self._task = EngineTask(
            placement.config,
            str(model_path),
            folder,
            next(self._numbers),
            log_format,
            placement.cpus,
        )
        self._receiving, self._sending = zmq.asyncio.Context(), zmq.Context()
        self._receiver = self._receiving.socket(zmq.PULL)
        self._sender = self._sending.socket(zmq.PUSH)
        for socket in (self._receiver, self._sender):
            socket.set_hwm(0)
            socket.linger = 0
        self._receiver.bind(self._task.outbox)
        self._connected = False
        self._turn_began = time.monotonic()
        self.on_end: Callable[[], None] | None = None  # called when the process has ended
        self._process = start_engine(self._task)
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._process.sentinel, self._on_end)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def ready(self) -> ExecutorInfo:
        """Waits until the engine is built.

        Raises:
            ConfigError: the settings cannot work.
            ServerStartError: the process ended without saying why.
        """
        message = await self.receive()
        match message:
            case Ready(info=info):
                self._sender.connect(self._task.inbox)
                self._connected = True
                return info
            case Refused(error=error):
                raise ConfigError(error)
        raise ServerStartError(self.end())

    def send(self, message: ToEngine) -> None:
        """Only after `ready`. The message is queued: this never waits."""
        self._sender.send(encode(message), zmq.NOBLOCK)

    async def receive(self) -> FromEngine | None:
        """The next message; None once the process has ended and said everything.

        While messages wait, the event loop still runs everything else every `TURN_SECONDS`.
        """
        data: asyncio.Future[bytes] = asyncio.ensure_future(self._receiver.recv())
        if not data.done():
            either: set[asyncio.Future[Any]] = {data, self._ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not data.done():
                await asyncio.wait({data}, timeout=LAST_WORDS_SECONDS)
            self._turn_began = time.monotonic()
        elif time.monotonic() > self._turn_began + TURN_SECONDS:
            await asyncio.sleep(0)
            self._turn_began = time.monotonic()
        if not data.done():
            data.cancel()
            return None
        message: FromEngine = decode_from_engine(data.result())
        return message

    def end(self) -> str:
        """How the process ended, in words."""
        code = self._process.exitcode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return f"The engine process ended unexpectedly ({how})."

    async def close(self, at_once: bool = False) -> None:
        """Ends the process, with `at_once` by killing it, and closes the sockets."""
        if self._connected and not self._ended.done() and not at_once:
            self.send(Shutdown())
            await asyncio.wait({self._ended}, timeout=CLOSE_SECONDS)
        self._process.kill()
        await self._loop.run_in_executor(None, self._process.join)
        self._on_end()
        self._receiver.close()
        self._sender.close()
        self._receiving.term()
        self._sending.term()

    def _on_end(self) -> None:
        if not self._ended.done():
            self._loop.remove_reader(self._process.sentinel)
            self._process.join()
            self._ended.set_result(None)
            if self.on_end is not None:
                self.on_end()
