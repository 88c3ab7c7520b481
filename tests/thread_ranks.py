"""Tensor-parallel ranks as threads of this process: quick to start, and the results of all of them
can be compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from forerun.config.engine_config import EngineConfig
from forerun.core.executor import ExecutorInfo, PendingStep
from forerun.core.grammar import Grammar
from forerun.core.plan import StepPlan, StepResult
from forerun.executor.build import build_executor
from forerun.executor.device_executor import DeviceExecutor
from forerun.layers.communication import Communicator

T = TypeVar("T")
SECONDS = 60.0  # until a rank that waits for the others gives up


class ThreadRank(Communicator):
    """One of several threads that exchange tensors."""

    def __init__(self, rank: int, shelf: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(shelf)
        self._shelf, self._barrier = shelf, barrier

    @classmethod
    def group(cls, size: int) -> list[ThreadRank]:
        shelf: list[Tensor | None] = [None] * size
        barrier = threading.Barrier(size)
        return [cls(rank, shelf, barrier) for rank in range(size)]

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._all(x)).sum(0)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return torch.stack(self._all(x)).amax(0)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._all(x), -1)

    def all_to_all(self, x: Tensor) -> Tensor:
        return torch.stack([each[self.rank] for each in self._all(x)])

    def give_up(self) -> None:
        """So that no other rank waits."""
        self._barrier.abort()

    def _all(self, x: Tensor) -> list[Tensor]:
        self._shelf[self.rank] = x.clone()
        self._barrier.wait(SECONDS)
        out = [each for each in self._shelf if each is not None]
        self._barrier.wait(SECONDS)
        assert len(out) == self.size
        return out


class Team:
    """A thread per rank, which does one thing at a time."""

    def __init__(self, size: int) -> None:
        self.ranks = ThreadRank.group(size)
        self._threads = [ThreadPoolExecutor(1) for _ in self.ranks]

    def start(self, work: Callable[[ThreadRank], T]) -> list[Future[T]]:
        def run(rank: ThreadRank) -> T:
            try:
                return work(rank)
            except BaseException:
                rank.give_up()
                raise

        pairs = zip(self._threads, self.ranks, strict=True)
        return [thread.submit(run, rank) for thread, rank in pairs]

    def do(self, work: Callable[[ThreadRank], T]) -> list[T]:
        """`work` of every rank, by rank."""
        return [each.result() for each in self.start(work)]

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()


def on_ranks(size: int, work: Callable[[Communicator], T]) -> list[T]:
    """`work` of every rank, by rank."""
    team = Team(size)
    try:
        return team.do(torch.inference_mode()(work))
    finally:
        team.close()


@dataclass(eq=False)
class _Pending:
    executor: ThreadRanksExecutor
    launched: list[Future[PendingStep]]

    def result(self) -> StepResult:
        return self.executor.result(self.launched)


class ThreadRanksExecutor:
    """As `RanksExecutor`; every step's result is that of all ranks."""

    def __init__(self, config: EngineConfig, model_path: Path, overlap_depth: int | None) -> None:
        self._team = Team(config.tp_size)
        self.executors: list[DeviceExecutor] = self._team.do(
            lambda rank: build_executor(config, model_path, overlap_depth, rank)
        )

    @property
    def info(self) -> ExecutorInfo:
        return self.executors[0].info

    def launch(self, plan: StepPlan) -> PendingStep:
        return _Pending(self, self._team.start(lambda rank: self._own(rank).launch(plan)))

    def result(self, launched: list[Future[PendingStep]]) -> StepResult:
        results = self._team.do(lambda rank: launched[rank.rank].result().result())
        first = results[0]
        for other in results[1:]:
            assert (other.decode, other.prefill) == (first.decode, first.prefill)
            assert (other.failed, other.error) == (first.failed, first.error)
            assert other.decode_widths == first.decode_widths
        return first

    def compile_grammar(self, grammar: Grammar, client: str = "") -> None:
        for executor in self.executors:
            executor.compile_grammar(grammar, client)

    def prepare_grammars(self) -> None:
        for executor in self.executors:
            executor.prepare_grammars()

    def disable_drafts(self) -> None:
        for executor in self.executors:
            executor.disable_drafts()

    def close(self) -> None:
        self._team.close()

    def _own(self, rank: Communicator) -> DeviceExecutor:
        return self.executors[rank.rank]
