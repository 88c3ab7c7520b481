"""Puts the engine's parts together, and the memory they may take."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.executor.cuda_graphs import StepGraphs, capture_with_bar
from forerun.executor.deferred_observe import DeferredObserve
from forerun.executor.memory import (
    KVBudget,
    KVDemand,
    MemoryLog,
    ProfilingRun,
    kv_budget,
    profile_run,
)
from forerun.executor.resolve import Settings, resolve
from forerun.executor.runner import Runner
from forerun.executor.slot_tables import SlotTables
from forerun.executor.step import DeviceStep
from forerun.executor.step_timing import StepTimer
from forerun.kvcache.pages import PageAllocator
from forerun.kvcache.pools import PoolShape
from forerun.kvcache.prefix import NoPrefixCache, PrefixCache, PrefixStore
from forerun.models.base import CausalLM
from forerun.models.loader import load_target
from forerun.platform.device import dtype_name
from forerun.scheduler.adaptive_width import AdaptiveWidth, FixedWidth, WidthPolicy
from forerun.scheduler.scheduler import Limits
from forerun.speculative.base import DraftContext, TargetHandle
from forerun.speculative.check import slot_rows
from forerun.speculative.registry import get_algorithm
from forerun.speculative.simulate import SimulatedAcceptance

log = logging.getLogger("forerun")
MAX_GRAPH_BATCH = 256


@dataclass
class Parts:
    runner: Runner
    limits: Limits
    allocator: PageAllocator
    prefix: PrefixStore
    widths: WidthPolicy
    explain: dict[str, Any]


def build(config: EngineConfig, model_path: Path, overlap_depth: int | None) -> Parts:
    """Cheap checks first: what cannot work fails before any weight is read.

    Raises:
        ConfigError: settings that cannot work, a broken folder, too little memory.
    """
    algorithm = get_algorithm(config.speculative_algorithm)()
    settings = resolve(config, model_path, algorithm, overlap_depth)
    device, caps, limits = settings.device, settings.caps, settings.limits
    memory = MemoryLog(device)
    with memory.stage("weights", "use a device with more, or stop what else uses it"):
        model = load_target(
            model_path, settings.dtype, device, config.load_format, settings.positions
        )
        algorithm.load(_draft_context(settings, model))
    with memory.stage("slot tables", "lower max_running_requests or context_length"):
        pages = limits.pages(settings.positions)
        tables = SlotTables(limits.slots, settings.positions, pages, caps.num_drafts, device)
        tables.states += slot_rows(algorithm, limits.slots + 1, device)
        late = DeferredObserve.of(settings, device)
        simulate = _simulated(settings)
        # A compiled step would keep the time at which it was compiled.
        clock = StepTimer(device) if config.enable_trace and not config.cpu_graph else None

    def over(pages: int, snapshots: int = 0) -> DeviceStep:
        shape = PoolShape(pages, limits.page_size, limits.slots + 1, limits.width, snapshots)
        target, *draft = (each.build(shape, device) for each in settings.attention)
        own = draft[0] if draft else None
        return DeviceStep(model, algorithm, caps, tables, target, own, simulate, clock, late)

    seen = ProfilingRun()
    if device.type == "cuda":
        fix = "lower chunked_prefill_size, max_running_requests or cuda_graph_max_bs"
        with memory.stage("largest steps", fix):
            step = over(pages=1)
            seen = profile_run(step, limits, settings.widths, _graphs(settings, step))
            del step
    budget = kv_budget(config, _demand(settings), device, seen)
    with memory.stage("K/V pools", "lower mem_fraction_static or max_total_tokens"):
        step = over(budget.num_pages, budget.num_snapshots)
    graphs = _graphs(settings, step)
    if graphs is not None:
        fix = "lower mem_fraction_static or cuda_graph_max_bs, or set disable_cuda_graph"
        with memory.stage("graphs", fix):
            capture_with_bar(graphs, quiet=not sys.stderr.isatty())
    allocator = PageAllocator(budget.num_pages)
    prefix: PrefixStore = (
        NoPrefixCache()
        if config.disable_radix_cache
        else PrefixCache(allocator, limits.page_size, caps.prefix_lookahead)
    )
    explain = _explain(settings, budget, memory, seen)
    log.info("engine: %s", explain)
    runner = Runner(step, graphs)
    policy = _policy(settings, runner)
    if config.cpu_graph:  # compiled when first met: too slow to measure at start
        from forerun.executor.compiled_cpu import CompiledSteps

        runner = Runner(step, CompiledSteps(step, settings.positions))
    return Parts(runner, limits, allocator, prefix, policy, explain)


def _demand(settings: Settings) -> KVDemand:
    config, limits = settings.config, settings.limits
    snapshots = config.max_state_snapshots
    if config.disable_radix_cache:
        snapshots = 0
    return KVDemand(
        layouts=[each.layout for each in settings.attention],
        page_size=limits.page_size,
        tokens_wanted=limits.slots * (limits.context_length + limits.overshoot),
        tokens_least=1 + limits.overshoot,
        num_slots=limits.slots + 1,
        num_verify_tokens=limits.width,
        snapshots_wanted=2 * limits.slots if snapshots is None else snapshots,
    )


def _draft_context(settings: Settings, model: CausalLM) -> DraftContext:
    return DraftContext(
        config=settings.config,
        caps=settings.caps,
        target=TargetHandle(settings.target, model.embed, model.lm_head, model.lm_head_argmax),
        device=settings.device,
        dtype=settings.dtype,
        max_positions=settings.positions,
        slots=settings.limits.slots,
    )


def _simulated(settings: Settings) -> SimulatedAcceptance | None:
    mean = settings.config.speculative_simulate_accept_length
    if mean is None:
        return None
    if settings.caps.makes_trees:
        raise ConfigError("speculative_simulate_accept_length works with chains, not trees.")
    return SimulatedAcceptance.of(
        mean, settings.caps.width, settings.limits.slots + 1, settings.device
    )


def _graphs(settings: Settings, step: DeviceStep) -> StepGraphs | None:
    """Of `step`, not captured yet."""
    if not settings.graphs:
        return None
    largest = min(settings.limits.slots, settings.config.cuda_graph_max_bs or MAX_GRAPH_BATCH)
    return StepGraphs(step, settings.positions, largest, settings.widths)


def _policy(settings: Settings, runner: Runner) -> WidthPolicy:
    if not settings.config.speculative_adaptive or len(settings.widths) == 1:
        return FixedWidth(settings.widths)
    costs = runner.measure(settings.widths, settings.limits.slots)
    return AdaptiveWidth(settings.widths, costs, settings.caps.tree_depth)


def _explain(
    settings: Settings, budget: KVBudget, memory: MemoryLog, seen: ProfilingRun
) -> dict[str, Any]:
    limits, (target, *draft) = settings.limits, settings.attention
    rows = budget.num_pages * limits.page_size
    kv = {"kv_target": target.layout.token_bytes * rows}
    if draft:
        kv["kv_draft"] = draft[0].layout.token_bytes * rows
    return {
        "architecture": settings.target.architecture,
        "device": str(settings.device),
        "dtype": dtype_name(settings.dtype),
        "kv_cache_dtype": dtype_name(settings.kv_dtype),
        "algorithm": settings.config.speculative_algorithm or "NONE",
        "rows_per_step": limits.width,
        "attention": target.explain(),
        "draft_attention": draft[0].explain() if draft else None,
        "slots": limits.slots,
        "page_size": limits.page_size,
        "context_length": limits.context_length,
        "overlap_depth": limits.depth,
        "kv_pages": budget.num_pages - 1,
        "kv": budget.describe(limits.page_size),
        "kv_bytes_per_token": budget.token_bytes,
        "memory_bytes": kv | memory.report(seen),
    }
