"""How decode steps and prompt chunks are run: the interface, and the eager implementation.

`cuda_graphs.py` replays captured steps on a GPU, `compiled_cpu.py` runs compiled ones on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from forerun.attention.base import HostBatch
from forerun.attention.model_attention import StepBuffers
from forerun.core.plan import PrefillChunk
from forerun.executor.step import DecodeOutput, DeviceStep, StepShape
from forerun.sampling.sampler import SamplingFlags
from forerun.speculative.base import Draft, HostTokens


@dataclass(frozen=True)
class DecodeBatch:
    """One decode step, as the host knows it."""

    slots: Sequence[int]
    num_verify_tokens: int  # W
    kv_len_ub: int  # of every committed length plus the KV slots the step may write
    flags: SamplingFlags
    lengths: HostBatch  # what attention backends may plan with on the host
    host: HostTokens | None = None  # where the algorithm reads tokens on the host

    @property
    def shape(self) -> StepShape:
        return StepShape(self.num_verify_tokens, self.kv_len_ub, self.flags)


@dataclass(frozen=True)
class DeferredBatch:
    """A deferred observe, as the host knows it."""

    slots: Sequence[int]
    counts: Sequence[int]  # tokens of each slot
    kv_len_ub: int
    lengths: HostBatch  # before those tokens


class StepExecutor(Protocol):
    """Runs the steps of one `DeviceStep`. What it returns may be overwritten by the next step."""

    captured: bool  # steps are graphs, made before the first request

    def measured_batches(self, largest: int) -> list[int]:
        """Batch sizes whose cost is worth measuring, up to `largest`."""

    def decode(self, batch: DecodeBatch) -> DecodeOutput:
        """A decode step of B requests: `sampled` [B, W] and `num_committed` [B]."""

    def observe_deferred(self, batch: DeferredBatch) -> None:
        """The algorithm observes the newest tokens of each slot, which were deferred."""

    def prefill(self, chunks: Sequence[PrefillChunk], flags: SamplingFlags) -> Tensor | None:
        """Prompt chunks; [n] int64, the first tokens of requests whose last chunk is among them."""


class EagerSteps:
    """Every kernel is launched by itself."""

    captured = False

    def __init__(self, step: DeviceStep) -> None:
        self.step = step
        # By (batch size, W); W is 0 for deferred observes. None: nothing is planned on the host.
        self._buffers: dict[tuple[int, int], StepBuffers | None] = {}

    def measured_batches(self, largest: int) -> list[int]:
        return [1 << n for n in range(largest.bit_length())]

    def decode(self, batch: DecodeBatch) -> DecodeOutput:
        slots = self.step.tables.upload(batch.slots, torch.int64)
        draft = self.propose(batch)
        buffers = self._prepared(len(batch.slots), batch.num_verify_tokens, batch.lengths)
        return self.step.decode(slots, batch.shape, draft, buffers)

    def propose(self, batch: DecodeBatch) -> Draft | None:
        """Drafts that are made outside of the captured step; None: `decode` makes them."""
        width, caps = batch.num_verify_tokens, self.step.caps
        if width == 1 or self.step.captures_drafts:
            return None
        slots = self.step.tables.upload(batch.slots, torch.int64)
        if caps.needs_host_tokens and batch.host is None:  # a measurement
            return self.step.empty_draft(slots, width)
        buffers = self._prepared(len(batch.slots), width, batch.lengths)
        return self.step.propose(slots, batch.shape, batch.host, buffers)

    def observe_deferred(self, batch: DeferredBatch) -> None:
        tables = self.step.tables
        slots = tables.upload(batch.slots, torch.int64)
        counts = tables.upload(batch.counts, torch.int32)
        buffers = self._prepared(len(batch.slots), 0, batch.lengths)
        self.step.observe_deferred(slots, counts, batch.kv_len_ub, buffers)

    def prefill(self, chunks: Sequence[PrefillChunk], flags: SamplingFlags) -> Tensor | None:
        return self.step.prefill(chunks, flags)

    def _prepared(self, batch_size: int, width: int, lengths: HostBatch) -> StepBuffers | None:
        """What attention plans on the host for a step that is not captured."""
        key = (batch_size, width)
        if key not in self._buffers:
            self._buffers[key] = self.step.plan_buffers(batch_size)
        buffers = self._buffers[key]
        if buffers is not None:
            buffers.begin(lengths)
        return buffers
