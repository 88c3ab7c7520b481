"""The executor of `tp_size` ranks: a process each, which run the same plans.

Who runs where: the engine's process has `RanksExecutor`, `LocalRanks` for the ranks of its machine
(node 0) and `RemoteRanks` for those of each other node; a rank's process runs `rank.py`; a process
per other node runs `host.py`, and has `LocalRanks` for its own. Nodes find each other in `join.py`.

Every rank gets the same bytes, those of other nodes through the process that has joined from there
(`host.py`). Results are read from rank 0 alone. When ranks end, all others are ended too, so
that whoever waits for them finds the pipe closed and raises what has happened.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from forerun.config.engine_config import EngineConfig
from forerun.core.codec import decode_info, decode_result, encode
from forerun.core.errors import ConfigError, ExecutorError
from forerun.core.executor import ExecutorInfo, PendingStep
from forerun.core.grammar import Grammar
from forerun.core.plan import StepPlan, StepResult
from forerun.core.profile import ProfileParams
from forerun.executor.ranks.join import gather_nodes
from forerun.executor.ranks.local import LocalRanks, NodeRanks, RankGone
from forerun.executor.ranks.messages import (
    CHECK_PROFILE,
    DISABLE_DRAFTS,
    INFO,
    PLAN,
    PREPARE,
    RESULT,
    SIMULATE,
    START_PROFILE,
    STOP_PROFILE,
    RemoteStep,
    compiled_body,
    message_body,
    waiting_for,
)
from forerun.executor.ranks.rank import rank_tasks
from forerun.executor.ranks.remote import Start
from forerun.executor.tensor_parallel import check_heads
from forerun.layers.torch_communicator import meeting_point

WHO = "A rank"  # in errors
FOLLOWING_SECONDS = 1.0  # between a rank that is gone and other ranks' errors that follow from it
CAUSE_SECONDS = 5.0  # until it is known why ranks have ended

T = TypeVar("T")
Ends = SimpleQueue[Exception | None]  # causes; None: closed


class RanksExecutor:
    """The engine's side. Results arrive in the order of the plans."""

    def __init__(self, local: LocalRanks, remote: Sequence[NodeRanks], ends: Ends) -> None:
        """Waits until all ranks are ready. `ends`: where the nodes report why theirs have ended.

        Raises:
            ConfigError: the settings are invalid.
            ExecutorError: a rank failed to start.
        """
        self.local, self._nodes = local, [local, *remote]
        self._pending: deque[RemoteStep] = deque()
        self._compiling = threading.Lock()  # a request and its answers, of grammars
        self._ends = ends
        self._cause: Exception | None = None  # why the ranks have ended
        self._has_cause = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()
        self.store: Any = None  # of the ranks' meeting point: open as long as this object lives
        for node in self._nodes:
            self._try(node.wait_ready)
        self._info = decode_info(message_body(local.info, INFO, WHO))

    @classmethod
    def start(
        cls, config: EngineConfig, model_path: Path, overlap_depth: int | None = None
    ) -> RanksExecutor:
        """Waits for the other nodes, if there are some, and starts the ranks on all of them.

        Raises:
            ConfigError: the settings are invalid, or a node does not join.
            ExecutorError: a rank failed to start.
        """
        ends: Ends = SimpleQueue()
        remote = gather_nodes(config, model_path)
        nodes: list[NodeRanks] = [*remote]
        try:
            check_heads(config, model_path)
            store = meeting_point()
            for each in remote:
                each.start(Start(store.port, overlap_depth), ends.put)
            tasks = rank_tasks(config, model_path, overlap_depth, store.port)
            local = LocalRanks.start(tasks, ends.put)
            nodes.append(local)
            executor = cls(local, remote, ends)
        except BaseException as error:
            for node in nodes:
                node.kill(ExecutorError(f"the start failed: {error}"))
            raise
        executor.store = store
        return executor

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def launch(self, plan: StepPlan) -> PendingStep:
        self._send(PLAN + encode(plan))
        step = RemoteStep(self.wait)
        self._pending.append(step)
        return step

    def compile_grammar(self, grammar: Grammar, client: str = "") -> None:
        self._ask_grammars(encode(grammar))

    def prepare_grammars(self) -> None:
        """Does what `DeviceExecutor.prepare_grammars` does, on every rank."""
        self._info.explain["grammars"] = self._ask_grammars(PREPARE).decode()

    def can_resume(self, rid: str) -> bool:
        """True: steps of several ranks wait for all masks."""
        return True

    def disable_drafts(self) -> None:
        self._send(DISABLE_DRAFTS)

    def simulate_accept_lengths(self, means: Sequence[float]) -> None:
        self._send(SIMULATE + encode(list(means)))

    def start_profile(self, params: ProfileParams) -> None:
        """Every rank writes files of its own; other nodes need the folder too."""
        self._send(START_PROFILE + encode(params))

    def stop_profile(self) -> None:
        self._send(STOP_PROFILE)

    def check_profile(self, name: str) -> None:
        self._ask_grammars(CHECK_PROFILE + name.encode())

    def close(self) -> None:
        """Ends the processes; repeated calls do nothing."""
        self._ends.put(None)
        for node in self._nodes:
            node.close()

    def wait(self, step: RemoteStep) -> StepResult:
        """Receives results up to that of `step`."""
        while step.value is None:
            result = message_body(self._try(self.local.receive), RESULT, WHO)
            self._pending.popleft().value = decode_result(result)
        return step.value

    def _send(self, message: bytes) -> None:
        # Other nodes first: their way is longer.
        for node in reversed(self._nodes):
            self._try(partial(node.send, message))

    def _ask_grammars(self, message: bytes) -> bytes:
        """Every rank; returns the first one's answer."""
        with waiting_for(self._compiling):
            for node in self._nodes:
                self._try(partial(node.send_grammar, message))
            answers = [self._try(node.receive_grammar) for node in self._nodes]
        bodies = [compiled_body(answer, WHO) for answer in answers]
        return bodies[0]

    # --- ranks that end ---------------------------------------------------------------------------

    def _try(self, action: Callable[[], T]) -> T:
        """
        Raises:
            ConfigError, ExecutorError: why the ranks have ended.
        """
        try:
            return action()
        except (EOFError, OSError) as error:
            self._has_cause.wait(CAUSE_SECONDS)
            raise self._cause or ExecutorError("A rank ended unexpectedly.") from error

    def _watch(self) -> None:
        """Body of the watching thread: when ranks have ended, ends the others."""
        cause = self._ends.get()
        if cause is None:
            return  # closed
        if len(self._nodes) > 1 and not isinstance(cause, ConfigError):
            cause = self._first_cause(cause)
        self._cause = cause
        self._has_cause.set()
        for node in self._nodes:
            node.kill(cause)

    def _first_cause(self, cause: Exception) -> Exception:
        """Returns a rank or node that is gone, if soon reported after an error; else the error.

        An error may follow from that, and be heard of first.
        """
        end = time.monotonic() + FOLLOWING_SECONDS
        while not isinstance(cause, RankGone):
            try:
                later = self._ends.get(timeout=max(0.0, end - time.monotonic()))
            except Empty:
                return cause
            cause = later if isinstance(later, RankGone) else cause
        return cause
