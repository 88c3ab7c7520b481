"""Runs a plan: `launch(plan) -> StepFuture`. The host queues the step and never waits in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.core.plan import DecodeRow, StepPlan, StepResult
from forerun.engine.graphs import StepGraphs
from forerun.engine.step import DeviceStep
from forerun.sampling.sampler import SamplingFlags


@dataclass
class StepFuture:
    """The tokens of a launched step, on their way to the host."""

    plan: StepPlan
    drawn: Tensor | None  # [B, W] int64
    new: Tensor | None  # [B] int32
    first: Tensor | None  # [last prefill chunks] int64
    event: torch.cuda.Event | None

    def result(self) -> StepResult:
        """Waits for the device."""
        if self.event is not None:
            self.event.synchronize()
        decode: list[list[int]] = []
        if self.drawn is not None and self.new is not None:
            pairs = zip(self.drawn.tolist(), self.new.tolist(), strict=True)
            decode = [row[:count] for row, count in pairs]
        tokens = iter(self.first.tolist() if self.first is not None else [])
        return StepResult(decode, [next(tokens) if c.last else None for c in self.plan.prefill])


class Runner:
    """Launches steps, through a graph where there is one."""

    def __init__(self, step: DeviceStep, graphs: StepGraphs | None = None) -> None:
        self.step = step
        self.tables = step.tables
        self.graphs = graphs

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepFuture:
        """Queues the whole step on the device and returns at once (on a CPU: computes it)."""
        self.tables.apply(plan)
        drawn, new = self._decode(plan.decode) if plan.decode else (None, None)
        # What a graph returns lives until its next replay; the copies are queued before that.
        decode = self._to_host(drawn), self._to_host(new)
        first = self._to_host(self.step.prefill(plan.prefill) if plan.prefill else None)
        event = None
        if self.tables.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        return StepFuture(plan, *decode, first, event)

    def _decode(self, rows: Sequence[DecodeRow]) -> tuple[Tensor, Tensor]:
        slots = [row.slot for row in rows]
        flags = SamplingFlags.of(row.request.params for row in rows)
        if self.graphs is not None and self.graphs.holds(len(slots)):
            return self.graphs.run(slots, sampled=flags.sampled or flags.min_tokens)
        bound = max(row.kv_len_ub for row in rows) + self.step.caps.width
        return self.step.decode(self.tables.upload(slots, torch.int64), bound, flags)

    def _to_host(self, tensor: Tensor | None) -> Tensor | None:
        if tensor is None or tensor.device.type != "cuda":
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)
