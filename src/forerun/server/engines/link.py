"""One engine process, as the API process sees it: two sockets and a process to watch."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from forerun.core.errors import ConfigError
from forerun.core.executor import ExecutorInfo
from forerun.platform.stacks import where_it_hangs
from forerun.server.engines.messages import (
    FromEngine,
    Ping,
    Ready,
    Refused,
    Shutdown,
    ToEngine,
    decode_from_engine,
    encode,
)
from forerun.server.engines.placement import Placement
from forerun.server.engines.process import EngineTask, start_engine
from forerun.server.engines.watchdog import Watchdog
from forerun.server.http.errors import ServerStartError

log = logging.getLogger("forerun")

LAST_WORDS_SECONDS = 0.5  # that messages of an ended process may be on their way
TURN_SECONDS = 0.01  # of reading messages that wait, before others get their turn
CLOSE_SECONDS = 10.0  # until a process that does not exit is killed


class EngineLink:
    """Starts an engine process; a new one gets a new link, so no message of an old one survives."""

    _numbers = itertools.count()

    def __init__(
        self,
        placement: Placement,
        model_path: Path,
        folder: Path,
        log_format: str,
        watchdog_timeout: float,
    ) -> None:
        """
        Args:
            folder: for the sockets; only this user may enter it.
            watchdog_timeout: seconds after which a silent engine is taken to hang; 0: never.
        """
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
        self._watchdog_timeout = watchdog_timeout
        self._watchdog = Watchdog(watchdog_timeout) if watchdog_timeout else None
        self._watching: asyncio.Task[None] | None = None  # done: the process hangs
        self._loop.add_reader(self._process.sentinel, self._on_end)

    @property
    def hangs(self) -> bool:
        """Whether it has been silent for too long. Nothing of it is received any more."""
        watching = self._watching
        return watching is not None and watching.done() and not watching.cancelled()

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
                if self._watchdog is not None:
                    watching = self._watchdog.watch(lambda: self.send(Ping()))
                    self._watching = asyncio.create_task(watching, name="forerun-watchdog")
                return info
            case Refused(error=error):
                raise ConfigError(error)
        raise ServerStartError(self.end())

    def send(self, message: ToEngine) -> None:
        """Only after `ready`. The message is queued: this never waits."""
        self._sender.send(encode(message), zmq.NOBLOCK)

    async def receive(self) -> FromEngine | None:
        """The next message; None once the process has ended and said everything, or hangs.

        While messages wait, the event loop still runs everything else every `TURN_SECONDS`.
        """
        data: asyncio.Future[bytes] = asyncio.ensure_future(self._receiver.recv())
        if not data.done():
            first: set[asyncio.Future[Any]] = {data, self._ended}
            first |= {self._watching} if self._watching is not None else set()
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not (data.done() or self.hangs):
                await asyncio.wait({data}, timeout=LAST_WORDS_SECONDS)
            self._turn_began = time.monotonic()
        elif time.monotonic() > self._turn_began + TURN_SECONDS:
            await asyncio.sleep(0)
            self._turn_began = time.monotonic()
        if self.hangs or not data.done():
            data.cancel()
            return None
        if self._watchdog is not None:
            self._watchdog.heard()
        message: FromEngine = decode_from_engine(data.result())
        return message

    def end(self) -> str:
        """How the process ended, in words."""
        if self.hangs:
            seconds = f"{self._watchdog_timeout:g} s"
            return f"The engine process has not answered for {seconds} (watchdog_timeout)."
        code = self._process.exitcode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return f"The engine process ended unexpectedly ({how})."

    async def log_stacks(self) -> None:
        """Logs the stacks of a process that hangs, and of its ranks."""
        if self.pid is not None:
            where = partial(where_it_hangs, self.pid, self._task.folder)
            for text in await self._loop.run_in_executor(None, where):
                log.error("Where the engine hangs: %s", text)

    async def close(self, at_once: bool = False) -> None:
        """Ends the process, with `at_once` by killing it, and closes the sockets."""
        if self._connected and not self._ended.done() and not at_once:
            self.send(Shutdown())
            await asyncio.wait({self._ended}, timeout=CLOSE_SECONDS)
            if not self._ended.done():
                log.warning("The engine has not ended within %g s; it is killed.", CLOSE_SECONDS)
        self._kill()
        await self._loop.run_in_executor(None, self._process.join)
        self._on_end()
        self._receiver.close()
        self._sender.close()
        self._receiving.term()
        self._sending.term()

    def _kill(self) -> None:
        """Kills it with the processes that it has started: a stopped one would not end with it."""
        if self._process.is_alive() and self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()

    def _on_end(self) -> None:
        if not self._ended.done():
            self._loop.remove_reader(self._process.sentinel)
            if self._watching is not None:
                self._watching.cancel()
            self._process.join()
            self._ended.set_result(None)
            if self.on_end is not None:
                self.on_end()
