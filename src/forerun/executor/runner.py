"""Runs a plan: `launch(plan) -> StepFuture`. The host queues the step and never waits in it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.attention.base import HostBatch
from forerun.attention.model_attention import StepBuffers
from forerun.core.errors import AlgorithmError
from forerun.core.plan import DecodeRow, StepPlan, StepResult
from forerun.executor.cuda_graphs import StepGraphs
from forerun.executor.step import DeviceStep
from forerun.sampling.sampler import SamplingFlags

if TYPE_CHECKING:
    from forerun.executor.compiled_cpu import CompiledSteps

# Measuring step costs at start, with captured steps and without: seconds it may take, steps in a
# row (as they follow each other when the host runs ahead), and how often.
MEASURING = {True: (5.0, 2, 3), False: (2.0, 1, 2)}


@dataclass
class StepFuture:
    """The tokens of a launched step, on their way to the host."""

    plan: StepPlan
    drawn: Tensor | None  # [B, W] int64
    new: Tensor | None  # [B] int32
    first: Tensor | None  # [last prefill chunks] int64
    event: torch.cuda.Event | None
    error: AlgorithmError | None  # the drafts of this step failed
    launched: float  # time.monotonic() before it was
    timestamps: Tensor | None = None  # [4] int64, where steps are traced

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

    def __init__(self, step: DeviceStep, graphs: StepGraphs | CompiledSteps | None = None) -> None:
        self.step = step
        self.tables = step.tables
        self.graphs = graphs
        # For steps that are not captured; by (batch size, width).
        self._buffers: dict[tuple[int, int], StepBuffers | None] = {}

    def bind_to_thread(self) -> None:
        """Makes the device the current one of this thread."""
        device = self.tables.device
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepFuture:
        """Queues the whole step on the device and returns at once (on a CPU: computes it)."""
        launched = time.monotonic()
        self.tables.apply(plan)
        if plan.late:
            self._observe_deferred(plan)
        drawn, new = self._decode(plan.decode, plan.width) if plan.decode else (None, None)
        # What a graph returns lives until its next replay; the copies are queued before that.
        decode = self._to_host(drawn), self._to_host(new)
        clock = self.step.clock
        timestamps = clock.take() if clock is not None and plan.decode else None
        first = self._to_host(self.step.prefill(plan.prefill) if plan.prefill else None)
        event = None
        if self.tables.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        error = self.step.guard.take_error()
        return StepFuture(plan, *decode, first, event, error, launched, timestamps)

    def _decode(self, rows: Sequence[DecodeRow], width: int) -> tuple[Tensor, Tensor]:
        slots = [row.slot for row in rows]
        flags = self.step.flags(row.request for row in rows)
        bound = self._bound(rows)
        host = HostBatch([row.kv_len_ub for row in rows], self.tables.host_pages_of(slots))
        draft = None
        if self.step.caps.needs_host_tokens and width > 1:
            requests = [row.request for row in rows]
            tokens, names = [r.tokens for r in requests], [r.rid for r in requests]
            index = self.tables.upload(slots, torch.int64)
            buffers = self._prepared(len(slots), width, host)
            draft = self.step.propose(index, bound, width, tokens, names, buffers)
        if self.graphs is not None and self.graphs.holds(len(slots)):
            return self.graphs.run(slots, width, flags, draft, host)
        index = self.tables.upload(slots, torch.int64)
        buffers = self._prepared(len(slots), width, host)
        return self.step.decode(index, bound, width, flags, draft, buffers)

    def _prepared(self, batch_size: int, width: int, host: HostBatch) -> StepBuffers | None:
        """What attention plans on the host for a step that is not captured."""
        key = (batch_size, width)
        if key not in self._buffers:
            self._buffers[key] = self.step.plan_buffers(batch_size)
        buffers = self._buffers[key]
        if buffers is not None:
            buffers.begin(host)
        return buffers

    def _observe_deferred(self, plan: StepPlan) -> None:
        slots: Sequence[int] = [request.slot for request, _ in plan.late]
        counts = [count for _, count in plan.late]
        if self.graphs is not None:
            slots = self.graphs.padded(slots)
            counts += [0] * (len(slots) - len(counts))
        index, new = self.tables.upload(slots, torch.int64), self.tables.upload(counts, torch.int32)
        known = {row.slot: row.kv_len_ub for row in plan.decode}
        lengths = [
            known.get(slot, count) - count for slot, count in zip(slots, counts, strict=True)
        ]
        host = HostBatch(lengths, self.tables.host_pages_of(slots))
        buffers = self._prepared(len(slots), 0, host)
        self.step.observe_deferred(index, new, self._bound(plan.decode), buffers)

    def _bound(self, rows: Sequence[DecodeRow]) -> int:
        if self.graphs is not None and self.graphs.bound is not None:
            return self.graphs.bound  # what runs beside them takes the same kernels
        return max(row.kv_len_ub for row in rows) + self.step.caps.kv_reserve

    def _to_host(self, tensor: Tensor | None) -> Tensor | None:
        if tensor is None or tensor.device.type != "cuda":
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    # --- costs ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def measure(self, widths: Sequence[int], largest: int) -> dict[int, list[float]]:
        """Seconds of a decode step of every width, by batch size; on the padding slot.

        Stops at the batch size where time runs out: beyond it costs are taken to be in proportion.
        """
        sizes = self.graphs.sizes if self.graphs else [1 << n for n in range(largest.bit_length())]
        sizes = [size for size in sizes if size <= largest]
        costs, end = {}, time.monotonic() + MEASURING[self.graphs is not None][0]
        for size in sizes:
            costs[size] = [self._cost(size, width) for width in widths]
            if time.monotonic() > end:
                break
        return costs

    def _cost(self, batch: int, width: int) -> float:
        _, in_row, times = MEASURING[self.graphs is not None]
        slots = [self.tables.padding_slot] * batch
        flags, bound = SamplingFlags(), 1 + self.step.caps.kv_reserve
        draft = None
        if self.step.caps.needs_host_tokens and width > 1:
            index = self.tables.upload(slots, torch.int64)
            draft = self.step.filler(index, width)

        def step() -> None:
            if self.graphs is not None:
                self.graphs.run(slots, width, flags, draft)
            else:
                index = self.tables.upload(slots, torch.int64)
                buffers = self._prepared(batch, width, HostBatch.padding(batch))
                self.step.decode(index, bound, width, flags, draft, buffers)

        def seconds() -> float:
            self._wait()
            begin = time.monotonic()
            for _ in range(in_row):
                step()
            self._wait()
            return (time.monotonic() - begin) / in_row

        step()
        return min(seconds() for _ in range(times))

    def _wait(self) -> None:
        if self.tables.device.type == "cuda":
            torch.cuda.synchronize(self.tables.device)
