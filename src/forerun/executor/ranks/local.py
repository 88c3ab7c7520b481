"""The ranks of one node, a process each, and how the engine reaches them.

They get the same messages. When one of the processes ends, the others of the node are ended too,
since they may wait for it in a collective: whoever waits for them finds the pipe closed, and
`on_end` is told why.
"""

from __future__ import annotations

import logging
import multiprocessing
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from forerun.core.errors import ConfigError, ExecutorError
from forerun.executor.ranks.messages import (
    CLOSE,
    CLOSE_SECONDS,
    COMPILED,
    FAILED,
    REFUSED,
)
from forerun.executor.ranks.plan_ring import PlanRing, RingWriter
from forerun.executor.ranks.rank import RankTask, run_rank
from forerun.platform.signals import without_ctrl_c
from forerun.platform.stacks import where_it_hangs

log = logging.getLogger("forerun")

ROOM_SECONDS = 1e-4  # between two looks whether the ring has room again


class RankGone(ExecutorError):
    """A rank or a node that ended without a word. Errors of others may follow from it."""


class NodeRanks(ABC):
    """The ranks of one node. A method that finds them ended raises EOFError or OSError."""

    on_end: Callable[[Exception], None]  # called once, from a thread, if they end by themselves

    @abstractmethod
    def wait_ready(self) -> None:
        """Waits until all are built."""

    @abstractmethod
    def send(self, message: bytes) -> None:
        """Sends it to each."""

    @abstractmethod
    def send_grammar(self, message: bytes) -> None:
        """Asks each; `receive_grammar` has the answer of the first one that fails, or the first."""

    @abstractmethod
    def receive_grammar(self) -> bytes: ...

    @abstractmethod
    def kill(self, cause: Exception) -> None:
        """Ends them at once, without a call of `on_end`. Any thread may call it."""

    @abstractmethod
    def close(self) -> None:
        """Ends them in order."""


def spawn(
    target: Callable[..., None], args: tuple[Any, ...], name: str | None = None
) -> tuple[Connection, Connection, BaseProcess]:
    """Starts `target(connection, grammars, *args)` in a process, with `spawn`, which CUDA requires.

    Returns:
        This side's ends of both pipes, and the process.
    """
    context = multiprocessing.get_context("spawn")
    connection, child_connection = context.Pipe()
    grammars, child_grammars = context.Pipe()
    process = context.Process(
        target=target, args=(child_connection, child_grammars, *args), name=name, daemon=True
    )
    with without_ctrl_c():
        process.start()
    for end in (child_connection, child_grammars):
        end.close()  # so that the child's ends of the pipes close with the child
    return connection, grammars, process


class Rank:
    """A rank's process on this node."""

    def __init__(self, task: RankTask, ring: PlanRing, index: int) -> None:
        """`index`: among those of the node, which read from `ring`."""
        self.number = task.place.rank
        name, args = f"forerun-rank-{self.number}", (task, ring, index)
        self.connection, self.grammars, self.process = spawn(run_rank, args, name)
        self._reading = threading.Lock()
        self._error: Exception | None = None  # what it said before it ended

    def receive(self) -> bytes:
        """The next message that is no error. One thread at a time calls this."""
        with self._reading:
            message = self.connection.recv_bytes()
            text = message[1:]
            if message[:1] == REFUSED:
                self._error = ConfigError(text.decode())
            elif message[:1] == FAILED:
                said = text.decode(errors="replace")
                self._error = ExecutorError(f"Rank {self.number} failed: {said}")
            else:
                return message
        raise EOFError("nothing follows an error")

    def why(self) -> Exception:
        """Why the process has ended."""
        self.process.join()
        try:
            while self._error is None:
                self.receive()
        except (EOFError, OSError):
            code = self.process.exitcode
            gone = RankGone(f"Rank {self.number} ended unexpectedly (exit code {code}).")
            return self._error or gone
        return self._error

    def log_if_it_hangs(self) -> None:
        """Logs where it is if it did not end. Its process may be continued if it was stopped."""
        if self.process.is_alive() and self.process.pid is not None:
            for text in where_it_hangs(self.process.pid):
                log.error("Rank %d does not end: %s", self.number, text)


class LocalRanks(NodeRanks):
    """Those of this node: messages reach them through shared memory."""

    def __init__(
        self, ranks: Sequence[Rank], ring: PlanRing, on_end: Callable[[Exception], None]
    ) -> None:
        self.ranks, self.on_end = ranks, on_end
        self._ring = RingWriter(ring, [rank.connection for rank in ranks], self._wait_for_room)
        self.info = b""  # the INFO message of the first one, after `wait_ready`
        self._closing = threading.Event()
        self._ended = threading.Event()  # some or all of them; whoever is to know has been told
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()

    @classmethod
    def start(cls, tasks: Sequence[RankTask], on_end: Callable[[Exception], None]) -> LocalRanks:
        """Starts the processes."""
        ring = PlanRing(len(tasks))
        ranks: list[Rank] = []
        try:
            ranks += (Rank(task, ring, index) for index, task in enumerate(tasks))
            return cls(ranks, ring, on_end)
        except BaseException:
            for rank in ranks:
                rank.process.kill()
            raise

    def wait_ready(self) -> None:
        self.info, *_ = [rank.receive() for rank in self.ranks]

    def send(self, message: bytes) -> None:
        if self._ended.is_set():
            raise EOFError("a rank has ended")
        self._ring.send(message)

    def _wait_for_room(self) -> None:
        if self._ended.wait(ROOM_SECONDS):
            raise EOFError("a rank has ended")

    def receive(self) -> bytes:
        """The next message of the first rank, which reports for all."""
        return self.ranks[0].receive()

    def send_grammar(self, message: bytes) -> None:
        for rank in self.ranks:
            rank.grammars.send_bytes(message)

    def receive_grammar(self) -> bytes:
        answers = [rank.grammars.recv_bytes() for rank in self.ranks]
        return next((each for each in answers if each[:1] != COMPILED), answers[0])

    def kill(self, cause: Exception) -> None:
        self._closing.set()
        for rank in self.ranks:
            rank.process.kill()

    def close(self) -> None:
        """Those that do not end are killed. Repeated calls do nothing."""
        self._closing.set()
        end = time.monotonic() + CLOSE_SECONDS
        while self._ring.is_full and time.monotonic() < end and not self._ended.wait(ROOM_SECONDS):
            pass  # they still read a long plan, or no longer read
        if not (self._ended.is_set() or self._ring.is_full):
            self._ring.send(CLOSE)
        for rank in self.ranks:
            rank.process.join(max(0.0, end - time.monotonic()))
            rank.log_if_it_hangs()
            rank.process.kill()
            rank.process.join()
        self._watching.join()
        for rank in self.ranks:
            rank.connection.close()
            rank.grammars.close()

    def _watch(self) -> None:
        """Body of the watching thread."""
        ended = wait([rank.process.sentinel for rank in self.ranks])
        try:
            if not self._closing.is_set():
                self._end_all(ended)
        finally:
            self._ended.set()

    def _end_all(self, ended: Sequence[object]) -> None:
        """`ended`: sentinels of those that have ended by themselves."""
        cause = self._why(ended)
        for rank in self.ranks:
            rank.process.kill()
        self.on_end(cause)

    def _why(self, ended: Sequence[object]) -> Exception:
        """The error of one that says nothing, or the first one's.

        `ended`: sentinels of those to ask.
        """
        causes = [rank.why() for rank in self.ranks if rank.process.sentinel in ended]
        return next((each for each in causes if isinstance(each, RankGone)), causes[0])
