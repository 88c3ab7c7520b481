"""Where the memory goes: a rehearsal of the largest steps, room for graphs, and K/V in the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

import torch

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.core.plan import DecodeRow, PrefillChunk, StepPlan
from forerun.core.request import Request
from forerun.core.sampling_params import SamplingParams
from forerun.executor.cuda_graphs import StepGraphs
from forerun.executor.runner import Runner
from forerun.executor.step import DeviceStep
from forerun.kernels.gemm.dispatch import LARGE_M
from forerun.kvcache.layouts import ModelLayout
from forerun.kvcache.pools import pages_for
from forerun.platform.device import memory
from forerun.scheduler.scheduler import Limits

CPU_BUDGET = 4 << 30  # bytes; a CPU shares its memory with everything else
SNAPSHOT_SHARE = 0.1  # of K/V memory, for snapshots of recurrent states
SLACK = 256 << 20  # bytes; fragments, and what a driver takes late
GIB = 2**30
# Prompt tokens for which there are other kernels than for many, or which take more room.
FEW = (1, 32, 64, 128, LARGE_M - 1)


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
    step: DeviceStep, limits: Limits, widths: Sequence[int], graphs: StepGraphs | None
) -> ProfilingRun:
    """Runs the largest prefill and steps of many shapes, and captures a few of the graphs.

    All rows are the padding slot's, so one page of K/V is enough. Kernels are loaded and the
    libraries'
    workspaces are there afterwards; what else was taken is given back.
    """
    device = step.tables.device
    runner = Runner(step)
    before = _reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    for plan in _steps(limits, widths, step.tables.padding_slot):
        runner.launch(plan).result()
    peak = torch.cuda.max_memory_reserved(device)
    kept = _reserved(device) - before
    activations = max(0, peak - before - kept)
    return ProfilingRun(activations, 0 if graphs is None else _graph_bytes(graphs, device))


def _steps(limits: Limits, widths: Sequence[int], padding_slot: int) -> Iterator[StepPlan]:
    """Prefills of as many tokens as a step takes and of few; decode steps of all slots and of one.

    Decoding comes last: it leaves the padding slot's length at 0.
    """
    sampled = SamplingParams(temperature=1.0, top_k=9, top_p=0.9, min_p=0.1, min_new_tokens=1)
    requests = [
        Request("rehearsal", (0,), params, 0, frozenset(), slot=padding_slot)
        for params in (SamplingParams(temperature=0.0), sampled)
    ]
    counts = [*(few for few in FEW if few < limits.prefill_tokens), limits.prefill_tokens]
    for request, tokens in product(requests, counts):
        yield StepPlan(prefill=_prompts(limits, request, tokens))
    for request, width, batch in product(requests, widths, (1, limits.slots)):
        row = DecodeRow(request, padding_slot, kv_len_ub=limits.context_length)
        late = [(request, 0)] * batch if limits.max_pending_observe and width > 1 else []
        yield StepPlan(decode=[row] * batch, late=late, width=width)


def _prompts(limits: Limits, request: Request, tokens: int) -> list[PrefillChunk]:
    """So many tokens in prompts as long as can be, as far as there are slots."""
    lengths = [limits.context_length] * (tokens // limits.context_length)
    if tokens % limits.context_length:
        lengths.append(tokens % limits.context_length)
    return [
        PrefillChunk(request, request.slot, 0, (0,) * length, last=True)
        for length in lengths[: limits.slots]
    ]


def _graph_bytes(graphs: StepGraphs, device: torch.device) -> int:
    """What all graphs will take, from those of the largest and those of the smallest batch.

    The largest come first and bring the shared pool; every other adds about what the smallest do.
    """
    sizes = len(graphs.sizes)
    graphs.sizes = sorted({graphs.sizes[0], graphs.sizes[-1]})
    free: list[int] = []
    graphs.capture(lambda _: free.append(_free(device)))
    free.append(_free(device))
    each = (len(free) - 1) // len(graphs.sizes)
    more = max(0, free[each] - free[-1]) * (sizes - 1)
    return max(0, free[0] - free[each]) + more


def _reserved(device: torch.device) -> int:
    """Bytes of a GPU that PyTorch holds, once it has given back what padding_slot uses."""
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
            "workspaces": self.taken["largest steps"],  # what they leave behind
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
