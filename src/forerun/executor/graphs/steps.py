"""Step executors: the interface that runs decode steps and prompt chunks, and the eager one.

`cuda.py` replays captured steps on a GPU, `cpu.py` recorded ones on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from forerun.attention.base import HostBatch
from forerun.attention.model_attention import StepBuffers
from forerun.executor.step.device_step import DeviceStep
from forerun.executor.step.grammar_masks import GrammarBatch
from forerun.executor.step.inputs import DecodeOutput, PrefillBatch, PrefillTokens, StepShape
from forerun.sampling.logprobs import LogprobQuery
from forerun.sampling.sampler import SamplingFlags
from forerun.speculative.base import Draft, HostTokens


@dataclass(frozen=True)
class DecodeBatch:
    """Host-side description of one decode step."""

    slots: Sequence[int]
    num_verify_tokens: int  # W
    kv_len_ub: int  # upper bound of committed lengths plus the KV slots the step may write
    flags: SamplingFlags
    lengths: HostBatch  # for attention backends that plan on the host
    host: HostTokens | None = None  # if the algorithm reads tokens on the host
    logprobs: LogprobQuery | None = None  # of requests of the batch
    grammars: GrammarBatch | None = None  # of requests of the batch
    num_rows: int = 0  # N of a ragged pass; 0: W of every request
    num_drafting: int = 0  # of a ragged pass: the first requests, which draft; 0: all do

    @property
    def kind(self) -> Hashable:
        """Steps of one kind take about as long as each other."""
        tokens = self.num_verify_tokens, self.num_rows, self.num_drafting
        extra = self.logprobs is not None, self.grammars is not None
        return len(self.slots), tokens, self.kv_len_ub.bit_length(), self.flags, extra

    @property
    def shape(self) -> StepShape:
        return StepShape(
            self.num_verify_tokens,
            self.kv_len_ub,
            self.flags,
            self.logprobs,
            self.grammars,
            num_rows=self.num_rows,
            num_drafting=self.num_drafting,
        )


@dataclass(frozen=True)
class DeferredBatch:
    """Host-side description of a deferred observe."""

    slots: Sequence[int]
    counts: Sequence[int]  # tokens per slot
    kv_len_ub: int
    lengths: HostBatch  # before those tokens


class StepExecutor(Protocol):
    """Runs the steps of one `DeviceStep`. The next step may overwrite the tensors it returns."""

    captured: bool  # steps are graphs, captured at start
    drafts_for_some: bool  # whether `DecodeBatch.num_drafting` may be set
    drafting_parts: int  # and then to multiples of such a part of the batch
    cuts_drafts: bool  # whether W of a ragged pass may be less than that of `Limits.verify_shape`

    def measured_batches(self, largest: int) -> list[int]:
        """Batch sizes up to `largest` at which step costs are measured."""

    def repeatable(self, run: Callable[[], object]) -> Callable[[], None]:
        """Returns what runs the kernels of `run` again, as steps run theirs; to measure them."""

    def decode(self, batch: DecodeBatch) -> DecodeOutput:
        """Runs a decode step of B requests."""

    def observe_deferred(self, batch: DeferredBatch) -> None:
        """The algorithm observes tokens of earlier plain steps."""

    def prefill(self, batch: PrefillBatch) -> PrefillTokens:
        """Runs prompt chunks, and samples the first tokens after last chunks."""


class EagerSteps:
    """Launches every kernel separately."""

    captured = False
    drafting_parts = 8

    def __init__(self, step: DeviceStep) -> None:
        self.step = step
        # Backends that plan on the host would need a second plan.
        able = step.captures_drafts and not step.caps.makes_trees
        self.drafts_for_some = able and step.plan_buffers(1) is None
        self.cuts_drafts = step.caps.flexible and self.drafts_for_some
        # By (batch size, W), W = 0 for deferred observes. None: no backend plans on the host.
        self._buffers: dict[tuple[int, int], StepBuffers | None] = {}

    def measured_batches(self, largest: int) -> list[int]:
        return [1 << n for n in range(largest.bit_length())]

    def repeatable(self, run: Callable[[], object]) -> Callable[[], None]:
        def again() -> None:
            run()

        return again

    def decode(self, batch: DecodeBatch) -> DecodeOutput:
        slots = self.step.tables.upload(batch.slots, torch.int64)
        draft = self.propose(batch)
        buffers = self._prepared(len(batch.slots), batch.num_verify_tokens, batch.lengths)
        shape = batch.shape
        if shape.grammars is not None:
            drafts = self.step.new_draft_copy(slots, shape.num_verify_tokens)
            shape = replace(shape, drafts=drafts)
        return self.step.decode(slots, shape, draft, buffers)

    def propose(self, batch: DecodeBatch) -> Draft | None:
        """Proposes drafts if that is not part of the captured step; None: `decode` proposes."""
        width, caps = batch.num_verify_tokens, self.step.caps
        if width == 1 or self.step.captures_drafts:
            return None
        slots = self.step.tables.upload(batch.slots, torch.int64)
        if caps.needs_host_tokens and batch.host is None:  # measuring step costs
            return self.step.empty_draft(slots, width)
        buffers = self._prepared(len(batch.slots), width, batch.lengths)
        return self.step.propose(self.step.begin(slots, batch.shape, buffers), batch.host)

    def propose_row_layouts(self, batch: DecodeBatch) -> Tensor | None:
        """What `DeviceStep.propose_row_layouts` returns, for a step that has not begun."""
        slots = self.step.tables.upload(batch.slots, torch.int64)
        buffers = self._prepared(len(batch.slots), batch.num_verify_tokens, batch.lengths)
        # The step that follows marks its own beginning.
        given = self.step.begin(slots, batch.shape, buffers, proposed=True)
        return self.step.propose_row_layouts(given)

    def observe_deferred(self, batch: DeferredBatch) -> None:
        tables = self.step.tables
        slots = tables.upload(batch.slots, torch.int64)
        counts = tables.upload(batch.counts, torch.int32)
        buffers = self._prepared(len(batch.slots), 0, batch.lengths)
        self.step.observe_deferred(slots, counts, batch.kv_len_ub, buffers)

    def prefill(self, batch: PrefillBatch) -> PrefillTokens:
        return self.step.prefill(batch)

    def _prepared(self, batch_size: int, width: int, lengths: HostBatch) -> StepBuffers | None:
        """Buffers prepared by backends that plan on the host, for an eager step."""
        key = (batch_size, width)
        if key not in self._buffers:
            self._buffers[key] = self.step.plan_buffers(batch_size)
        buffers = self._buffers[key]
        if buffers is not None:
            buffers.begin(lengths)
        return buffers
