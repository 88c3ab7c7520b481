"""The executor of `tp_size` ranks: a process each, which run the same plans.

Every rank gets the same bytes over a pipe of its own. Results are read from rank 0 alone. A thread
watches the processes: when one ends, it ends the others, which may wait for it in a collective, so
that whoever waits for them finds the pipe closed and raises what has happened.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from forerun.config.engine_config import EngineConfig
from forerun.core.codec import decode_info, decode_result, encode
from forerun.core.errors import ConfigError, ExecutorError
from forerun.core.executor import ExecutorInfo, PendingStep
from forerun.core.grammar import Grammar
from forerun.core.plan import StepPlan, StepResult
from forerun.executor.process_executor import (
    CLOSE,
    CLOSE_SECONDS,
    DISABLE_DRAFTS,
    FAILED,
    INFO,
    PLAN,
    PREPARE,
    REFUSED,
    RESULT,
    RemoteStep,
    compiled_body,
    message_body,
    spawn,
)
from forerun.executor.rank_process import RankTask, run_rank
from forerun.executor.tensor_parallel import config_of_rank
from forerun.layers.torch_communicator import RankPlace, meeting_point

WHO = "A rank"  # in errors
JOIN_SECONDS = 5.0  # until the watching thread has seen how a process ended


@dataclass(frozen=True)
class _Rank:
    connection: Connection
    grammars: Connection
    process: BaseProcess


class RanksExecutor:
    """The engine's side. Results arrive in the order of the plans."""

    def __init__(self, ranks: Sequence[_Rank], store: Any) -> None:
        """Waits until all ranks are ready.

        Raises:
            ConfigError: the settings are invalid.
            ExecutorError: a rank failed to start.
        """
        self._ranks, self._store = ranks, store
        self._pending: deque[RemoteStep] = deque()
        self._compiling = threading.Lock()  # a request and its answers in the pipes of grammars
        self._closing = threading.Event()
        self._cause: Exception | None = None  # why the ranks have ended; set by `_watch`
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()
        infos = [self._receive(rank.connection, INFO) for rank in ranks]
        self._info = decode_info(infos[0])

    @classmethod
    def start(
        cls, config: EngineConfig, model_path: Path, overlap_depth: int | None = None
    ) -> RanksExecutor:
        """Starts the processes, with `spawn`, which CUDA requires."""
        store = meeting_point()
        ranks: list[_Rank] = []
        try:
            for i in range(config.tp_size):
                place = RankPlace(
                    i,
                    config.tp_size,
                    store.port,
                    config.dist_timeout,
                    not config.disable_custom_all_reduce,
                )
                own = config_of_rank(config, i)
                ranks.append(_start(RankTask(place, own, str(model_path), overlap_depth)))
            return cls(ranks, store)
        except BaseException:
            for rank in ranks:
                rank.process.kill()
                rank.process.join()
            raise

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def launch(self, plan: StepPlan) -> PendingStep:
        self._send(PLAN + encode(plan))
        step = RemoteStep(self.wait)
        self._pending.append(step)
        return step

    def compile_grammar(self, grammar: Grammar) -> None:
        self._ask_grammars(encode(grammar))

    def prepare_grammars(self) -> None:
        """As `DeviceExecutor.prepare_grammars`, on every rank."""
        self._info.explain["grammars"] = self._ask_grammars(PREPARE).decode()

    def disable_drafts(self) -> None:
        self._send(DISABLE_DRAFTS)

    def close(self) -> None:
        """Ends the processes; repeated calls do nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        for rank in self._ranks:
            if rank.process.is_alive():
                self._send_to(rank, CLOSE)
        end = time.monotonic() + CLOSE_SECONDS
        for rank in self._ranks:
            rank.process.join(max(0.0, end - time.monotonic()))
            rank.process.kill()
            rank.process.join()
        self._watching.join()
        for rank in self._ranks:
            rank.connection.close()
            rank.grammars.close()

    def wait(self, step: RemoteStep) -> StepResult:
        """Receives results up to that of `step`."""
        while step.value is None:
            result = self._receive(self._ranks[0].connection, RESULT)
            self._pending.popleft().value = decode_result(result)
        return step.value

    def _send(self, message: bytes) -> None:
        for rank in self._ranks:
            self._send_to(rank, message)

    def _send_to(self, rank: _Rank, message: bytes) -> None:
        try:
            rank.connection.send_bytes(message)
        except OSError as error:
            if not self._closing.is_set():
                raise self._ended() from error

    def _receive(self, connection: Connection, expected: bytes) -> bytes:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        return message_body(message, expected, WHO)

    def _ask_grammars(self, message: bytes) -> bytes:
        """Every rank; returns the first one's answer."""
        with self._compiling:
            try:
                for rank in self._ranks:
                    rank.grammars.send_bytes(message)
                answers = [rank.grammars.recv_bytes() for rank in self._ranks]
            except (EOFError, OSError) as error:
                raise self._ended() from error
        bodies = [compiled_body(answer, WHO) for answer in answers]
        return bodies[0]

    # --- processes that end -----------------------------------------------------------------------

    def _watch(self) -> None:
        """Body of the watching thread."""
        ended = wait([rank.process.sentinel for rank in self._ranks])
        if self._closing.is_set():
            return
        self._cause = self._why(ended)
        for rank in self._ranks:
            rank.process.kill()

    def _why(self, ended: Sequence[object]) -> Exception:
        """Of the ranks that have ended: the error of one that says nothing, or the first one's.

        `ended`: their sentinels, which are seen before the processes can be waited for.
        """
        said: list[Exception] = []
        for i, rank in enumerate(self._ranks):
            if rank.process.sentinel not in ended:
                continue
            rank.process.join()
            error = _last_words(i, rank)
            if error is None:
                code = rank.process.exitcode
                return ExecutorError(f"Rank {i} ended unexpectedly (exit code {code}).")
            said.append(error)
        return said[0]

    def _ended(self) -> Exception:
        self._watching.join(JOIN_SECONDS)
        return self._cause or ExecutorError("A rank ended unexpectedly.")


def _last_words(index: int, rank: _Rank) -> Exception | None:
    """What a process that has ended sent before; None: nothing about an error."""
    try:
        while rank.connection.poll():
            message = rank.connection.recv_bytes()
            if message[:1] == REFUSED:
                return ConfigError(message[1:].decode())
            if message[:1] == FAILED:
                return ExecutorError(f"Rank {index} failed: {message[1:].decode(errors='replace')}")
    except (EOFError, OSError):
        return None
    return None


def _start(task: RankTask) -> _Rank:
    return _Rank(*spawn(run_rank, (task,), f"forerun-rank-{task.place.rank}"))
