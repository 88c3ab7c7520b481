"""Memory budget: a profiling run measures steps and graphs; KV pools get what remains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeVar

import torch

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.core.logprobs import MAX_TOP_LOGPROBS, LogprobParams
from forerun.core.plan import (
    Admission,
    DecodeRequest,
    DeferredCount,
    Limits,
    PrefillChunk,
    SlotLogprobs,
    SlotSampling,
    StepPlan,
)
from forerun.core.pooling import Pooling
from forerun.executor.device_executor import DeviceExecutor
from forerun.executor.graphs.cuda import CudaGraphSteps
from forerun.executor.step.inputs import dummy_chunks
from forerun.kernels.gemm.dispatch import LARGE_M
from forerun.kvcache.layouts import ModelLayout
from forerun.platform.device import is_out_of_memory, memory

MAX_CPU_KV_BYTES = 4 << 30  # main memory is shared with other processes
# Of a prompt, of what it shares with others, and two of a text that is generated.
SNAPSHOTS_PER_SLOT = 4
SNAPSHOT_RATIO = 0.1  # of memory for snapshots of recurrent states to that for K/V, at most
RESERVED_BYTES = 256 << 20  # for fragmentation and later allocations of the driver
GRAPH_ESTIMATES = 3  # at most, of which the smallest counts
USUAL_GRAPH_SHARE = 1 / 16  # of a GPU's memory that all captured steps take, at most, as a rule
GIB = 2**30
FOREIGN = 2 * GIB  # of a GPU's memory, more than a process holds besides PyTorch's: others hold it
T = TypeVar("T")
# Prompt lengths below the largest that use other kernels, or more memory.
SHORT_PROMPTS = (1, 8, 16, 32, 64, 128, LARGE_M - 1)


@dataclass(frozen=True)
class ProfilingRun:
    """Bytes that steps need besides weights and K/V, measured before the pools are allocated."""

    activations: int = 0  # peak of one step
    graphs: int = 0  # all captured steps, estimated from those of two batch sizes


@dataclass(frozen=True)
class KVDemand:
    """What target and draft store in pools, and how much of it they can use."""

    layouts: Sequence[ModelLayout]  # of models whose pools are not windowed
    page_size: int
    max_tokens: int  # all slots at full context length
    min_tokens: int  # one request of one token
    num_slots: int = 0  # including the padding slot
    num_verify_tokens: int = 1
    num_snapshots: int | None = None  # recurrent states for the prefix cache; None: from memory
    window_layouts: Sequence[ModelLayout] = ()  # of models whose pools are windowed
    slot_window_pages: int = 0  # that a request in decode holds at most
    min_window_pages: int = 0  # that one request alone holds at most

    @property
    def token_bytes(self) -> int:
        """Bytes per token, target and draft, without windowed pools."""
        return sum(layout.token_bytes for layout in self.layouts)

    @property
    def window_token_bytes(self) -> int:
        """Bytes per token of windowed pools."""
        return sum(layout.token_bytes for layout in self.window_layouts)

    @property
    def max_pages(self) -> int:
        return -(-self.max_tokens // self.page_size)

    @property
    def slots_bytes(self) -> int:
        """Recurrent states of all slots."""
        return self.num_slots * sum(
            layout.slot_bytes(self.num_verify_tokens) for layout in self._all_layouts
        )

    @property
    def state_bytes(self) -> int:
        """Bytes per snapshot."""
        return sum(layout.state_bytes for layout in self._all_layouts)

    @property
    def _all_layouts(self) -> Sequence[ModelLayout]:
        return [*self.layouts, *self.window_layouts]


@dataclass(frozen=True)
class KVBudget:
    num_pages: int  # including the null page
    token_bytes: int = 0  # per token, target and draft, without windowed pools
    num_snapshots: int = 0  # recurrent states that the prefix cache can keep
    num_window_pages: int = 1  # including the null page
    window_token_bytes: int = 0  # per token of windowed pools

    def least(self, least: Callable[[Sequence[int]], list[int]]) -> KVBudget:
        """What every rank has room for; `least`: of each number, the smallest of all ranks."""
        pages, snapshots, window_pages = least(
            (self.num_pages, self.num_snapshots, self.num_window_pages)
        )
        return replace(
            self, num_pages=pages, num_snapshots=snapshots, num_window_pages=window_pages
        )

    def describe(self, page_size: int) -> str:
        tokens = (self.num_pages - 1) * page_size
        text = f"{tokens} tokens, {tokens * self.token_bytes / 2**20:.0f} MiB"
        if not self.window_token_bytes:
            return text
        tokens = (self.num_window_pages - 1) * page_size
        size = tokens * self.window_token_bytes / 2**20
        return f"{text}; of windowed layers {tokens} tokens, {size:.0f} MiB"


def kv_budget(
    config: EngineConfig, demand: KVDemand, device: torch.device, profiled: ProfilingRun
) -> KVBudget:
    """Divides the free memory into pages and snapshots, never more than can be used.

    On a GPU, the fraction `mem_fraction_static` is for weights and K/V, or less if steps and graphs
    need more than the rest. Recurrent states of all slots are subtracted first, then snapshots of
    them.

    Raises:
        ConfigError: not even one request fits.
    """
    page = demand.page_size
    free, total = memory(device)
    if device.type == "cpu":
        budget = min(int(free * config.mem_fraction_static), MAX_CPU_KV_BYTES)
    else:
        steps = profiled.activations + profiled.graphs + RESERVED_BYTES
        budget = gpu_kv_bytes(config, free, total, steps)
    if demand.slots_bytes > max(budget, 0):
        raise ConfigError(
            f"The recurrent states of {demand.num_slots - 1} requests take"
            f" {demand.slots_bytes / GIB:.1f} GiB, and {max(budget, 0) / GIB:.1f} GiB are"
            " available; lower max_running_requests or raise"
            f" mem_fraction_static.{held_by_others(device)}"
        )
    budget = max(budget - demand.slots_bytes, 0)
    snapshots = _num_snapshots(config, demand, budget)
    if config.max_total_tokens is not None:
        pages = min(-(-config.max_total_tokens // page), demand.max_pages)
        window_pages = min(pages, _wanted_window_pages(demand))
    else:
        budget = max(budget - snapshots * demand.state_bytes, 0)
        pages, window_pages = _divide(budget, demand)
    if pages * page < demand.min_tokens:
        raise ConfigError(
            f"K/V memory holds {max(pages, 0) * page} tokens and one request needs"
            f" {demand.min_tokens}; raise mem_fraction_static or max_total_tokens, or lower"
            f" page_size, chunked_prefill_size or max_running_requests.{held_by_others(device)}"
        )
    return KVBudget(
        pages + 1, demand.token_bytes, snapshots, window_pages + 1, demand.window_token_bytes
    )


def gpu_kv_bytes(config: EngineConfig, free: int, total: int, steps: int) -> int:
    """Bytes for K/V and recurrent states on a GPU, of those that are free after loading weights.

    Args:
        steps: bytes that steps and graphs need.
    """
    return free - max(int(total * (1 - config.mem_fraction_static)), steps)


def _num_snapshots(config: EngineConfig, demand: KVDemand, budget: int) -> int:
    """States that the prefix cache keeps; `budget`: bytes for them and for K/V."""
    if not demand.state_bytes:
        return 0
    if demand.num_snapshots is not None:
        return demand.num_snapshots
    ratio = config.mamba_full_memory_ratio
    share = SNAPSHOT_RATIO if ratio is None else ratio
    fitting = int(budget * share / (1 + share)) // demand.state_bytes
    return (
        fitting if ratio is not None else min(fitting, SNAPSHOTS_PER_SLOT * (demand.num_slots - 1))
    )


def _wanted_window_pages(demand: KVDemand) -> int:
    """Returns how many let no request ever wait for window pages; 0: no pools are windowed."""
    if not demand.window_token_bytes:
        return 0
    slots = demand.num_slots - 1
    return slots * demand.slot_window_pages + demand.min_window_pages


def _divide(budget: int, demand: KVDemand) -> tuple[int, int]:
    """(pages, window pages) in `budget` bytes, each without its null page.

    Window pages: for the windows of all slots in at most half of the memory, or for those of all
    requests of full context that fit, whichever is more. At least what one request alone needs, and
    at most as many as pages. Where every pool is windowed, pages of the first space cost nothing.
    """
    size, max_pages = demand.page_size, demand.max_pages
    page, window_page = demand.token_bytes * size, demand.window_token_bytes * size
    budget -= page + window_page  # the null pages
    if not window_page:
        return (min(budget // page, max_pages) if page else max_pages), 0
    alone = demand.min_window_pages
    if not page:
        window_pages = min(budget // window_page, max_pages)
        return (max_pages if window_pages >= alone else window_pages), window_pages
    full_context = -(-max_pages // (demand.num_slots - 1)) * page
    requests = budget // (full_context + demand.slot_window_pages * window_page)
    wanted = min(_wanted_window_pages(demand), budget // 2 // window_page)
    window_pages = max(wanted, requests * demand.slot_window_pages, alone)
    pages = (budget - window_pages * window_page) // page
    if pages < window_pages:
        pages = window_pages = budget // (page + window_page)
    pages = min(pages, max_pages)
    return pages, min(pages, (budget - pages * page) // window_page)


# --- profiling run, on a GPU --------------------------------------------------------------------


def profile_run(
    executor: DeviceExecutor,
    limits: Limits,
    widths: Sequence[float],
    graphs: CudaGraphSteps | None,
    largest: Callable[[float], float] = float,
) -> ProfilingRun:
    """Runs the largest prefill and steps of many shapes, and captures some graphs.

    Everything runs on the padding slot, so one page of K/V is enough. Loaded kernels and library
    workspaces remain allocated; all other memory is released.

    Args:
        largest: of a number, the largest of all ranks', which decides how many graphs are captured.
    """
    device = executor.tables.device
    before = _reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    with executor.step.dummy_steps():
        for plan in profiling_plans(limits, widths, executor.tables.padding_slot):
            executor.launch(plan).result()
    peak = torch.cuda.max_memory_reserved(device)
    kept = _reserved(device) - before
    activations = max(0, peak - before - kept)
    return ProfilingRun(activations, 0 if graphs is None else _graph_bytes(graphs, device, largest))


def profiling_plans(
    limits: Limits, widths: Sequence[float], padding_slot: int
) -> Iterator[StepPlan]:
    """Prefills of `chunked_prefill_size` tokens and fewer; decode steps with all slots and one.

    Decode steps come last, because they reset the padding slot's length to 0. Some requests have
    penalties, pool hidden states and return log-probabilities, also of their prompt.
    """
    logprobs = SlotLogprobs(
        LogprobParams(0, MAX_TOP_LOGPROBS, token_ids=(0,)), 1, limits.context_length
    )
    greedy = SlotSampling(temperature=0.0)
    sampled = SlotSampling(top_k=9, top_p=0.9, min_p=0.1, stop_ids=(0,), min_position=1)
    edited = replace(sampled, frequency_penalty=1.0, logit_bias=((0, 1.0),))
    max_tokens = limits.chunked_prefill_size
    counts = [*(n for n in SHORT_PROMPTS if n < max_tokens), max_tokens]
    # The padding slot must be greedy afterwards.
    for sampling, asked in ((edited, logprobs), (sampled, None), (greedy, None)):
        pooling: Pooling | None = None if asked is None else "mean"
        admission = Admission(
            padding_slot, "profiling run", (0,), 0, 0, sampling, logprobs=asked, pooling=pooling
        )
        for i, tokens in enumerate(counts if asked is None else [max_tokens]):
            admitted = [] if i else [admission]
            yield StepPlan(admitted=admitted, prefill=_chunks(limits, padding_slot, tokens))
        for width, batch in product(widths, (1, limits.slots)):
            request = DecodeRequest(padding_slot, kv_len_ub=limits.context_length)
            most, rows = limits.verify_shape(batch, width)
            defers = limits.max_pending_observe and width > 1
            yield StepPlan(
                deferred=[DeferredCount(padding_slot, 0)] * batch if defers else [],
                decode=[request] * batch,
                num_verify_tokens=most,
                num_rows=rows,
            )


def _chunks(limits: Limits, slot: int, tokens: int) -> list[PrefillChunk]:
    """Splits `tokens` into prompts of at most the context length and at most one per slot."""
    return dummy_chunks(slot, tokens, limits.context_length, last=True)[: limits.slots]


def _graph_bytes(
    graphs: CudaGraphSteps, device: torch.device, largest: Callable[[float], float] = float
) -> int:
    """Estimates the memory of all graphs, in bytes; `largest`: as in `profile_run`.

    What another process of the GPU allocates meanwhile, an engine that starts too for example,
    looks like memory of a graph. So an unusual estimate is made again, and the smallest counts. All
    ranks make it again: what is captured has their collectives.
    """

    def estimate() -> float:
        return largest(_estimate_graph_bytes(graphs, device))

    usual, smallest = memory(device)[1] * USUAL_GRAPH_SHARE, estimate()
    for _ in range(GRAPH_ESTIMATES - 1):
        if smallest <= usual:
            break
        smallest = min(smallest, estimate())
    return int(smallest)


def _estimate_graph_bytes(graphs: CudaGraphSteps, device: torch.device) -> int:
    """Extrapolates from the graphs of the largest and of the smallest shapes of each kind.

    The largest are captured first and allocate the shared pool; all others of a kind add about as
    much as the smallest.
    """
    sizes, prompts, buckets = graphs.sizes, graphs.prompts, graphs.piecewise.buckets
    some_prompts, some_buckets = _ends(prompts), _ends(buckets)
    free: list[int] = []
    graphs.capture_some(
        _ends(sizes), some_prompts, some_buckets, lambda _: free.append(_free(device))
    )
    free.append(_free(device))
    graphs.clear()
    prefill = len(free) - 1 - len(some_buckets)  # of decode steps and whole prefills
    decode = prefill - len(some_prompts)
    largest, smallest = graphs.num_decode(sizes[-1:]), graphs.num_decode(sizes[:1])
    rest = (graphs.num_decode(sizes) - largest) / smallest
    total = _extrapolated(free[: decode + 1], largest, rest)
    total += _extrapolated(free[decode : prefill + 1], 1, len(prompts) - 1) if prompts else 0
    return total + (_extrapolated(free[prefill:], 1, len(buckets) - 1) if buckets else 0)


def _ends(items: Sequence[T]) -> list[T]:
    return [items[0], items[-1]] if len(items) > 1 else list(items)


def _extrapolated(free: Sequence[int], largest: int, rest: float) -> int:
    """Bytes of all graphs; `free` before each one and after the last.

    The first `largest` graphs are those of the largest shape, the others those of the smallest. Of
    these there are in truth `rest` times as many.
    """
    others = int(max(0, free[largest] - free[-1]) * rest)
    return max(0, free[0] - free[largest]) + others


def _reserved(device: torch.device) -> int:
    """Bytes of GPU memory that PyTorch reserves, after it has emptied its cache."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def _free(device: torch.device) -> int:
    """Free bytes on the device, including PyTorch's unused reserves."""
    if device.type == "cuda":
        _reserved(device)
    return memory(device)[0]


def held_by_others(device: torch.device) -> str:
    """What other processes hold of a GPU, a sentence of an error; empty where it is little."""
    if device.type != "cuda":
        return ""
    free, total = memory(device)
    others = total - free - torch.cuda.memory_reserved(device)
    if others < FOREIGN:
        return ""
    return f" Other processes hold {others / GIB:.1f} of {device}'s {total / GIB:.1f} GiB."


class MemoryLog:
    """Memory that each stage of the start allocates on a GPU, in bytes.

    On a CPU nothing is recorded, because a process's memory is not known exactly.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.allocated: dict[str, int] = {}

    @contextmanager
    def stage(self, name: str, fix: str) -> Iterator[None]:
        """Records the memory that the block allocates as `name`.

        Raises:
            ConfigError: out of memory; `fix` says what to change.
        """
        free, total = _free(self.device), memory(self.device)[1]
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise ConfigError(
                f"{self.device} ran out of memory for the {name}: {free / GIB:.1f} of"
                f" {total / GIB:.1f} GiB were free; {fix}.{held_by_others(self.device)}"
            ) from None
        if self.device.type == "cuda":
            self.allocated[name] = max(0, free - _free(self.device))

    def report(self, profiled: ProfilingRun) -> dict[str, int]:
        """Bytes by use, without K/V. `activations` are temporary and allocated from `free`."""
        if self.device.type != "cuda":
            return {}
        return {
            "weights": self.allocated["weights"],
            "slots": self.allocated["slot tables"],
            "workspaces": self.allocated["profiling run"],  # what remains allocated
            "graphs": self.allocated.get("graphs", 0),
            "activations": profiled.activations,
            "free": _free(self.device),
        }
