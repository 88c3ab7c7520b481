"""The ranks of one node, a process each, and how the engine reaches them.

They get the same messages. When one of the processes ends, the others of the node are ended too,
since they may wait for it in a collective: whoever waits for them finds the pipe closed, and
`on_end` is told why.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait

from forerun.core.errors import ConfigError, ExecutorError
from forerun.executor.process_executor import (
    CLOSE,
    CLOSE_SECONDS,
    FAILED,
    REFUSED,
    spawn,
)
from forerun.executor.rank_process import RankTask, run_rank


class RankGone(ExecutorError):
    """A rank or a node that ended without a word. Errors of others may follow from it."""


class NodeRanks(ABC):
    """The ranks of one node. A method that finds them ended raises EOFError or OSError."""

    on_end: Callable[[Exception], None]  # called once, from a thread, if they end by themselves

    @abstractmethod
    def wait_ready(self) -> None:
        """Until all are built."""

    @abstractmethod
    def send(self, message: bytes) -> None:
        """To each."""

    @abstractmethod
    def send_grammar(self, message: bytes) -> None:
        """To each; `receive_grammar` has the answer of the first one that fails, or the first."""

    @abstractmethod
    def receive_grammar(self) -> bytes: ...

    @abstractmethod
    def kill(self, cause: Exception) -> None:
        """At once, without a call of `on_end`. From any thread."""

    @abstractmethod
    def close(self) -> None:
        """Ends them in order."""


class Rank:
    """A rank's process on this node."""

    def __init__(self, task: RankTask) -> None:
        self.number = task.place.rank
        name = f"forerun-rank-{self.number}"
        self.connection, self.grammars, self.process = spawn(run_rank, (task,), name)
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


class LocalRanks(NodeRanks):
    """Those of this node: messages are sent over a pipe to each of them."""

    def __init__(self, ranks: Sequence[Rank], on_end: Callable[[Exception], None]) -> None:
        self.ranks, self.on_end = ranks, on_end
        self.info = b""  # the INFO message of the first one, after `wait_ready`
        self._closing = threading.Event()
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()

    @classmethod
    def start(cls, tasks: Sequence[RankTask], on_end: Callable[[Exception], None]) -> LocalRanks:
        """Starts the processes."""
        ranks: list[Rank] = []
        try:
            ranks += map(Rank, tasks)
            return cls(ranks, on_end)
        except BaseException:
            for rank in ranks:
                rank.process.kill()
            raise

    def wait_ready(self) -> None:
        self.info, *_ = [rank.receive() for rank in self.ranks]

    def send(self, message: bytes) -> None:
        for rank in self.ranks:
            rank.connection.send_bytes(message)

    def receive(self) -> bytes:
        """The next message of the first rank, which reports for all."""
        return self.ranks[0].receive()

    def send_grammar(self, message: bytes) -> None:
        for rank in self.ranks:
            rank.grammars.send_bytes(message)

    def receive_grammar(self) -> bytes:
        answers = [rank.grammars.recv_bytes() for rank in self.ranks]
        return next((each for each in answers if each[:1] in (REFUSED, FAILED)), answers[0])

    def kill(self, cause: Exception) -> None:
        self._closing.set()
        for rank in self.ranks:
            rank.process.kill()

    def close(self) -> None:
        """Those that do not end are killed. Repeated calls do nothing."""
        self._closing.set()
        for rank in self.ranks:
            if rank.process.is_alive():
                self._tell(rank, CLOSE)
        end = time.monotonic() + CLOSE_SECONDS
        for rank in self.ranks:
            rank.process.join(max(0.0, end - time.monotonic()))
            rank.process.kill()
            rank.process.join()
        self._watching.join()
        for rank in self.ranks:
            rank.connection.close()
            rank.grammars.close()

    def _tell(self, rank: Rank, message: bytes) -> None:
        try:
            rank.connection.send_bytes(message)
        except OSError:
            return  # it has ended meanwhile

    def _watch(self) -> None:
        """Body of the watching thread."""
        ended = wait([rank.process.sentinel for rank in self.ranks])
        if self._closing.is_set():
            return
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
