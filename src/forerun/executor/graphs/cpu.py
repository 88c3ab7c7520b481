"""Decode steps on a CPU, recorded once and run again: `kernels/cpu/graph.py`.

A step of a small model is hundreds of calls of a few microseconds, and calling them from Python
takes longer than they do. Like a CUDA graph, a step is recorded on the padding slot, per batch
size, W and sampling operations, when it is first used. Recording takes about as long as a step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TypeVar

import torch
from torch import Tensor

from forerun.executor.graphs.steps import DecodeBatch, DeferredBatch, EagerSteps
from forerun.executor.step.device_step import DeviceStep
from forerun.executor.step.inputs import DecodeOutput, PrefillBatch, PrefillTokens, StepShape
from forerun.kernels.cpu import library
from forerun.kernels.cpu.graph import CpuGraph, NotRecordable
from forerun.kernels.runtime.jit import use_triton
from forerun.speculative.base import Draft

log = logging.getLogger("forerun")
T = TypeVar("T")

MAX_TOKENS = 32  # of a recorded step; with more, computing takes longer than calling
MAX_DEFERRED = 16  # requests of a recorded deferred observe, for the same reason
MAX_BYTES = 256 << 20  # of all recorded steps' activations


@dataclass(frozen=True)
class _Key:
    """What a recorded step is specialised to. Whether drafts are trees never changes."""

    batch: int
    shape: StepShape


@dataclass
class _RecordedObserve:
    graph: CpuGraph
    slots: Tensor  # [B] int64, static
    counts: Tensor  # [B] int32, static


@dataclass
class _Recorded:
    graph: CpuGraph
    slots: Tensor  # [B] int64, static
    draft: Draft | None  # static, where drafts are proposed outside
    output: DecodeOutput  # static


class CpuGraphSteps:
    """The recorded decode steps of one executor; all else runs eagerly."""

    captured = False
    drafting_parts = EagerSteps.drafting_parts

    def __init__(self, step: DeviceStep, kv_len_ub: int) -> None:
        """`kv_len_ub`: largest number of KV slots of a request; lengths are read from tables."""
        # PyTorch does it at the first step that is recorded; that one would take seconds.
        import_module("torch._dynamo")
        self.step = step
        self._kv_len_ub = kv_len_ub
        self._eager = EagerSteps(step)
        self.drafts_for_some = self._eager.drafts_for_some
        self.cuts_drafts = self._eager.cuts_drafts
        self.recorded: dict[_Key, _Recorded | None] = {}  # None: runs eagerly
        self.observes: dict[int, _RecordedObserve | None] = {}  # by batch size

    @classmethod
    def serves(cls, step: DeviceStep) -> bool:
        """Whether all that a step calls can be recorded."""
        slots = step.tables.kv_len
        if slots.device.type != "cpu" or use_triton(slots) or library.library() is None:
            return False
        return step.records_on_cpu

    def measured_batches(self, largest: int) -> list[int]:
        return self._eager.measured_batches(largest)

    def repeatable(self, run: Callable[[], object]) -> Callable[[], None]:
        try:
            graph, _ = CpuGraph.record(run)
        except NotRecordable:
            return self._eager.repeatable(run)
        return graph.replay

    def decode(self, batch: DecodeBatch) -> DecodeOutput:
        if not self._records(batch):
            return self._eager.decode(batch)
        draft = self._eager.propose(batch)
        shape = replace(batch.shape, kv_len_ub=self._kv_len_ub)
        key = _Key(len(batch.slots), shape)
        if key not in self.recorded:
            self.recorded[key] = self._record(key, draft)
        recorded = self.recorded[key]
        if recorded is None:
            slots = self.step.tables.upload(batch.slots, torch.int64)
            return self.step.decode(slots, batch.shape, draft)
        recorded.slots.copy_(torch.tensor(batch.slots))
        for old, new in zip(_tensors(recorded.draft), _tensors(draft), strict=True):
            old.copy_(new)
        recorded.graph.replay()
        out = recorded.output  # the next step writes it again, perhaps before this one is read
        path, widths = (None if x is None else x.clone() for x in (out.path, out.widths))
        tokens = out.sampled.clone(), out.num_committed.clone()
        return DecodeOutput(*tokens, path=path, widths=widths)

    def observe_deferred(self, batch: DeferredBatch) -> None:
        size = len(batch.slots)
        if size > MAX_DEFERRED:
            return self._eager.observe_deferred(batch)
        if size not in self.observes:
            self.observes[size] = self._record_observe(size)
        recorded = self.observes[size]
        if recorded is None:
            return self._eager.observe_deferred(batch)
        recorded.slots.copy_(torch.tensor(batch.slots))
        recorded.counts.copy_(torch.tensor(batch.counts))
        recorded.graph.replay()

    def prefill(self, batch: PrefillBatch) -> PrefillTokens:
        return self._eager.prefill(batch)

    def _records(self, batch: DecodeBatch) -> bool:
        step, width = self.step, batch.num_verify_tokens
        tokens = batch.num_rows or len(batch.slots) * width
        if tokens > MAX_TOKENS or batch.shape.edits_logits:
            return False
        if step.timer is not None:  # it reads clocks
            return False
        deferred = width == 1 and step.deferred is not None
        return deferred or step.captures_drafts or not step.algorithm.observes

    def _record(self, key: _Key, draft: Draft | None) -> _Recorded | None:
        step, tables = self.step, self.step.tables
        slots = tables.upload([tables.padding_slot] * key.batch, torch.int64)
        if draft is not None:
            parents = None if draft.parents is None else draft.parents.clone()
            draft = Draft(draft.tokens.clone(), parents)
        name = f"decode {key.batch} x {key.shape.num_verify_tokens}"
        made = self._graph(name, lambda: step.decode(slots, key.shape, draft))
        if made is None:
            return None
        graph, output = made
        self._make_room(graph.nbytes)
        return _Recorded(graph, slots, draft, output)

    def _record_observe(self, size: int) -> _RecordedObserve | None:
        step, tables = self.step, self.step.tables
        slots = tables.upload([tables.padding_slot] * size, torch.int64)
        counts = tables.upload([0] * size, torch.int32)
        made = self._graph(
            f"deferred observe of {size}",
            lambda: step.observe_deferred(slots, counts, self._kv_len_ub),
        )
        return None if made is None else _RecordedObserve(made[0], slots, counts)

    def _graph(self, name: str, run: Callable[[], T]) -> tuple[CpuGraph, T] | None:
        """None: it reads values on the host, or the algorithm fails, which the eager step tells."""
        algorithm = self.step.algorithm
        earlier = algorithm.take_error()  # of the same step, perhaps
        try:
            with self.step.dummy_steps():
                made = CpuGraph.record(run)
        except NotRecordable as error:
            log.info("%s is not recorded: it reads %s", name, error)
            return None
        finally:
            failed = algorithm.take_error() is not None
            algorithm.put_back(earlier)
        return None if failed else made

    def _make_room(self, size: int) -> None:
        """Drops the oldest steps where all together would take too much memory."""
        graphs = {key: kept for key, kept in self.recorded.items() if kept is not None}
        used = size + sum(kept.graph.nbytes for kept in graphs.values())
        for key, kept in graphs.items():
            if used <= MAX_BYTES:
                return
            used -= kept.graph.nbytes
            del self.recorded[key]


def _tensors(draft: Draft | None) -> list[Tensor]:
    if draft is None:
        return []
    return [draft.tokens] if draft.parents is None else [draft.tokens, draft.parents]
