"""Device graphs: a whole decode step, from the draft to the slot update, as one launch.

A graph is captured per batch bucket and width, greedy and sampled apart. A batch takes the smallest
bucket that holds it; the rest is filled with the padding slot.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from forerun.attention.base import HostBatch
from forerun.attention.model_attention import StepBuffers
from forerun.core.errors import AlgorithmError, ConfigError
from forerun.executor.step import DeviceStep
from forerun.sampling.sampler import GREEDY, SAMPLED, SamplingFlags
from forerun.speculative.base import Draft


def buckets(largest: int) -> list[int]:
    """Batch sizes to capture: dense where a row more costs most, then every 8, 16, 32."""
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, largest + 1, 32), largest}
    return sorted(size for size in sizes if size <= largest)


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    slots: Tensor  # [bucket] int64, static
    draft: Draft | None  # [bucket, W - 1], static, where it is made outside of the graph
    drawn: Tensor  # [bucket, W], static
    new: Tensor  # [bucket], static
    buffers: StepBuffers | None  # what attention plans on the host
    last: tuple[int, ...] | None = None  # what `slots` holds


class StepGraphs:
    """The captured decode steps of one engine."""

    def __init__(
        self, step: DeviceStep, kv_len_ub: int, largest: int, widths: Sequence[int]
    ) -> None:
        """`kv_len_ub`: the most rows any request can have; lengths are read on the device."""
        self._step = step
        self.bound = kv_len_ub
        self.sizes = buckets(largest)
        self.widths = tuple(widths)
        self._graphs: dict[tuple[int, int, SamplingFlags], _Captured] = {}
        self._pool: Any = None

    @property
    def count(self) -> int:
        return 2 * len(self.sizes) * len(self.widths)

    @torch.inference_mode()
    def capture(self, progress: Callable[[str], Any] | None = None) -> None:
        """Captures all, the largest first so that the others fit into its memory.

        Raises:
            ConfigError: the algorithm does what cannot be captured.
        """
        self._pool = torch.cuda.graph_pool_handle()
        for size, width in product(reversed(self.sizes), reversed(self.widths)):
            for flags in (GREEDY, SAMPLED):
                if progress is not None:
                    progress(f"{size} x {width} {'sampled' if flags.sampled else 'greedy'}")
                self._graphs[size, width, flags] = self._guarded(size, width, flags)
        if self._step.late is not None:
            self._beside()

    def _beside(self) -> None:
        """Late observations, so that nothing of them is compiled when they are first needed."""
        for size in self.sizes:
            slots = self._padding_slots(size)
            counts = slots.new_zeros(size, dtype=torch.int32)
            buffers = self._step.plan_buffers(size)
            self._step.observe_deferred(slots, counts, self.bound, buffers)
        error = self._step.guard.take_error()
        if error is not None:
            raise error

    def _guarded(self, size: int, width: int, flags: SamplingFlags) -> _Captured:
        failed: Exception | None = None
        try:
            captured = self._capture(size, width, flags)
        except RuntimeError as error:  # what broke the capture may have been kept by the guard
            failed = error
        failed = self._step.guard.take_error() or failed
        if isinstance(failed, AlgorithmError):
            raise ConfigError(
                f"The algorithm cannot be captured: {failed} It must not read the device on the"
                " host, nor make tensors from host values, in propose and observe;"
                " disable_cuda_graph runs it uncaptured."
            ) from failed
        if failed is not None:
            raise failed
        return captured

    def _capture(self, size: int, width: int, flags: SamplingFlags) -> _Captured:
        tables, slots = self._step.tables, self._padding_slots(size)
        draft = self._outside(slots, width)
        buffers = self._step.plan_buffers(size)
        stream = torch.cuda.Stream(tables.device)
        stream.wait_stream(torch.cuda.current_stream(tables.device))
        with torch.cuda.stream(stream):  # lazy initialisation must not land in the graph
            for _ in range(2):
                self._step.decode(slots, self.bound, width, flags, draft, buffers)
        torch.cuda.current_stream(tables.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            drawn, new = self._step.decode(slots, self.bound, width, flags, draft, buffers)
        return _Captured(graph, slots, draft, drawn, new, buffers)

    def _padding_slots(self, size: int) -> Tensor:
        tables = self._step.tables
        return torch.full((size,), tables.padding_slot, dtype=torch.int64, device=tables.device)

    def _outside(self, slots: Tensor, width: int) -> Draft | None:
        """Room for drafts that are made before the graph runs."""
        if not self._step.caps.needs_host_tokens or width == 1:
            return None
        return self._step.filler(slots, width)

    def holds(self, batch: int) -> bool:
        return batch <= self.sizes[-1]

    def padded(self, slots: Sequence[int]) -> tuple[int, ...]:
        """The slots of a bucket, if one holds the batch: the padding slot at the end."""
        if not self.holds(len(slots)):
            return tuple(slots)
        size = self.sizes[bisect.bisect_left(self.sizes, len(slots))]
        return (*slots, *[self._step.tables.padding_slot] * (size - len(slots)))

    def run(
        self,
        slots: Sequence[int],
        width: int,
        flags: SamplingFlags,
        draft: Draft | None = None,
        host: HostBatch | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Replays the step; the tensors returned are overwritten by the next replay.

        `host`: what is known of the requests, for attention that plans on it; None: padding slots.
        """
        tables, batch, rows = self._step.tables, len(slots), self.padded(slots)
        captured = self._graphs[len(rows), width, flags.widened()]
        if rows != captured.last:
            captured.slots.copy_(tables.upload(rows, torch.int64), non_blocking=True)
            captured.last = rows
        if captured.draft is not None and draft is not None:
            captured.draft.tokens[:batch] = draft.tokens
            if captured.draft.parents is not None and draft.parents is not None:
                captured.draft.parents[:batch] = draft.parents
        if captured.buffers is not None:
            captured.buffers.begin(host)
        captured.graph.replay()
        return captured.drawn[:batch], captured.new[:batch]


def capture_with_bar(graphs: StepGraphs, quiet: bool) -> None:
    """Captures all graphs under a progress bar."""
    from rich.progress import Progress

    bar = nullcontext() if quiet else Progress(transient=True)
    with bar as progress:
        if progress is None:
            graphs.capture()
            return
        task = progress.add_task("Capturing graphs", total=graphs.count)
        graphs.capture(
            lambda name: progress.update(task, advance=1, description=f"Capturing graphs: {name}")
        )
