"""Memory budget: a profiling run of the largest steps, memory for graphs, and K/V in the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

import torch

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.core.plan import (
    Admission,
    DecodeRequest,
    DeferredCount,
    Limits,
    PrefillChunk,
    SlotSampling,
    StepPlan,
)
from forerun.executor.cuda_graphs import CudaGraphSteps
from forerun.executor.device_executor import DeviceExecutor
from forerun.kernels.gemm.dispatch import LARGE_M
from forerun.kvcache.layouts import ModelLayout
from forerun.kvcache.pools import pages_for
from forerun.platform.device import memory

CPU_BUDGET = 4 << 30  # bytes; a CPU shares its memory with everything else
SNAPSHOT_SHARE = 0.1  # of K/V memory, for snapshots of recurrent states
SLACK = 256 << 20  # bytes; fragments, and what a driver takes late
GIB = 2**30
# Prompt tokens for which there are other kernels than for many, or which take more memory.
FEW_TOKENS = (1, 32, 64, 128, LARGE_M - 1)


@dataclass(frozen=True)
class ProfilingRun:
    """Bytes that steps need besides weights and K/V, as measured before the pools are made."""

    activations: int = 0  # the peak of one step
    graphs: int = 0  # of all captured steps, estimated from two of them


@dataclass(frozen=True)
class KVDemand:
    """What the models keep, and how much of it can be used."""

    layouts: Sequence[ModelLayout]
    page_size: int
    tokens_wanted: int  # every slot at the full context
    tokens_least: int  # one request of one token
    num_slots: int = 0  # the padding slot included
    num_verify_tokens: int = 1
    snapshots_wanted: int = 0  # recurrent states for the prefix cache, at most

    @property
    def token_bytes(self) -> int:
        """Per KV slot, over all models."""
        return sum(layout.token_bytes for layout in self.layouts)

    @property
    def slots_bytes(self) -> int:
        """Recurrent states of all slots."""
        return self.num_slots * sum(
            layout.slot_bytes(self.num_verify_tokens) for layout in self.layouts
        )

    @property
    def state_bytes(self) -> int:
        """Of one snapshot."""
        return sum(layout.state_bytes for layout in self.layouts)


@dataclass(frozen=True)
class KVBudget:
    num_pages: int  # the null page included
    token_bytes: int  # per KV slot, over all models
    num_snapshots: int = 0  # recurrent states that the prefix cache can keep

    def describe(self, page_size: int) -> str:
        tokens = (self.num_pages - 1) * page_size
        return f"{tokens} tokens, {tokens * self.token_bytes / 2**20:.0f} MiB"


def kv_budget(
    config: EngineConfig, demand: KVDemand, device: torch.device, seen: ProfilingRun
) -> KVBudget:
    """Pages from what memory is left, never more than can be used.

    Of a GPU the share `mem_fraction_static` is for weights and K/V; where steps and graphs need
    more than the rest, they get it. Recurrent states of all slots come first, then at most
    `SNAPSHOT_SHARE` of the rest for snapshots of them.

    Raises:
        ConfigError: not even one request fits.
    """
    page, most = demand.page_size, -(-demand.tokens_wanted // demand.page_size)
    free, total = memory(device)
    if device.type == "cpu":
        budget = min(int(free * config.mem_fraction_static), CPU_BUDGET)
    else:
        steps = seen.activations + seen.graphs + SLACK
        budget = free - max(int(total * (1 - config.mem_fraction_static)), steps)
    if demand.slots_bytes > max(budget, 0):
        raise ConfigError(
            f"The recurrent states of {demand.num_slots - 1} requests take"
            f" {demand.slots_bytes / GIB:.1f} GiB and {max(budget, 0) / GIB:.1f} are there;"
            " lower max_running_requests or raise mem_fraction_static."
        )
    budget = max(budget - demand.slots_bytes, 0)
    snapshots = demand.snapshots_wanted if demand.state_bytes else 0
    if snapshots and config.max_state_snapshots is None:
        snapshots = min(snapshots, int(budget * SNAPSHOT_SHARE) // demand.state_bytes)
    if config.max_total_tokens is not None:
        pages = min(-(-config.max_total_tokens // page), most)
    else:
        budget = max(budget - snapshots * demand.state_bytes, 0)
        pages = min(pages_for(budget, demand.layouts, page) - 1, most)  # the null page comes on top
    if pages * page < demand.tokens_least:
        raise ConfigError(
            f"K/V memory holds {max(pages, 0) * page} tokens and one request needs"
            f" {demand.tokens_least}; raise mem_fraction_static or max_total_tokens, or lower"
            " page_size, chunked_prefill_size or max_running_requests."
        )
    return KVBudget(pages + 1, demand.token_bytes, snapshots)


# --- measuring, on a GPU ------------------------------------------------------------------------


def profile_run(
    executor: DeviceExecutor, limits: Limits, widths: Sequence[int], graphs: CudaGraphSteps | None
) -> ProfilingRun:
    """Runs the largest prefill and steps of many shapes, and captures a few of the graphs.

    All of it runs on the padding slot, so one page of K/V is enough. Kernels are loaded and the
    libraries' workspaces allocated afterwards; everything else is given back.
    """
    device, step = executor.tables.device, executor.step
    before = _reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    step.dummy = True
    for plan in profiling_plans(limits, widths, executor.tables.padding_slot):
        executor.launch(plan).result()
    step.dummy = False
    peak = torch.cuda.max_memory_reserved(device)
    kept = _reserved(device) - before
    activations = max(0, peak - before - kept)
    return ProfilingRun(activations, 0 if graphs is None else _graph_bytes(graphs, device))


def profiling_plans(limits: Limits, widths: Sequence[int], padding_slot: int) -> Iterator[StepPlan]:
    """Prefills of as many tokens as a step takes and of few; decode steps of all slots and of one.

    Decode steps come last: they leave the padding slot's length at 0.
    """
    greedy = SlotSampling(0.0, -1, 1.0, 0.0, 0)
    sampled = SlotSampling(1.0, 9, 0.9, 0.1, 0, stop_ids=(0,), min_position=1)
    most = limits.chunked_prefill_size
    counts = [*(few for few in FEW_TOKENS if few < most), most]
    for sampling in (sampled, greedy):  # the padding slot is greedy afterwards
        admission = Admission(padding_slot, "profiling run", (0,), 0, 0, sampling)
        for i, tokens in enumerate(counts):
            admitted = [] if i else [admission]
            yield StepPlan(admitted=admitted, prefill=_chunks(limits, padding_slot, tokens))
        for width, batch in product(widths, (1, limits.slots)):
            request = DecodeRequest(padding_slot, kv_len_ub=limits.context_length)
            defers = limits.max_pending_observe and width > 1
            yield StepPlan(
                deferred=[DeferredCount(padding_slot, 0)] * batch if defers else [],
                decode=[request] * batch,
                num_verify_tokens=width,
            )


def _chunks(limits: Limits, slot: int, tokens: int) -> list[PrefillChunk]:
    """So many tokens in prompts as long as can be, as far as there are slots."""
    lengths = [limits.context_length] * (tokens // limits.context_length)
    if tokens % limits.context_length:
        lengths.append(tokens % limits.context_length)
    return [PrefillChunk(slot, 0, length, last=True) for length in lengths[: limits.slots]]


def _graph_bytes(graphs: CudaGraphSteps, device: torch.device) -> int:
    """What all graphs will take, from those of the largest and those of the smallest batch.

    The largest come first and bring the shared pool; every other adds about what the smallest do.
    """
    sizes = sorted({graphs.sizes[0], graphs.sizes[-1]})
    free: list[int] = []
    graphs.capture(lambda _: free.append(_free(device)), sizes)
    free.append(_free(device))
    graphs.clear()
    each = (len(free) - 1) // len(sizes)
    more = max(0, free[each] - free[-1]) * (len(graphs.sizes) - 1)
    return max(0, free[0] - free[each]) + more


def _reserved(device: torch.device) -> int:
    """Bytes of a GPU that PyTorch holds, once it has given back what is not in use."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def _free(device: torch.device) -> int:
    """Bytes free on the device, those that PyTorch holds idle counted in."""
    if device.type == "cuda":
        _reserved(device)
    return memory(device)[0]


class MemoryLog:
    """Bytes taken by what a start does, by name of the stage.

    On a CPU nothing is booked: what a process takes there is not exact.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.taken: dict[str, int] = {}

    @contextmanager
    def stage(self, name: str, fix: str) -> Iterator[None]:
        """Books what the block takes under `name`.

        Raises:
            ConfigError: it runs out of memory; `fix` says what to change.
        """
        free, total = _free(self.device), memory(self.device)[1]
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            raise ConfigError(
                f"{self.device} ran out of memory for the {name}: {free / GIB:.1f} of"
                f" {total / GIB:.1f} GiB were free; {fix}."
            ) from None
        if self.device.type == "cuda":
            self.taken[name] = max(0, free - _free(self.device))

    def report(self, seen: ProfilingRun) -> dict[str, int]:
        """Bytes by use, K/V left out; `activations` come and go, `free` has room for them."""
        if self.device.type != "cuda":
            return {}
        return {
            "weights": self.taken["weights"],
            "slots": self.taken["slot tables"],
            "workspaces": self.taken["profiling run"],  # what it leaves allocated
            "graphs": self.taken.get("graphs", 0),
            "activations": seen.activations,
            "free": _free(self.device),
        }


def _is_out_of_memory(error: Exception) -> bool:
    """PyTorch, its libraries, Triton and the host's allocator each say it in their own way."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    words = str(error).lower()
    return any(sign in words for sign in ("out of memory", "alloc_failed", "can't allocate memory"))
