"""Resolves the settings once and puts the engine's parts together."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from forerun.attention.base import AttentionBackend, AttentionNeed, LayerMask, Mask
from forerun.attention.select import Choice, select
from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import ModelConfig, load_model_config
from forerun.core.errors import ConfigError
from forerun.engine.graphs import StepGraphs, capture_with_bar
from forerun.engine.memory import KVBudget, MemoryLog, Rehearsal, kv_budget, rehearse
from forerun.engine.runner import Runner
from forerun.engine.step import DeviceStep
from forerun.engine.tables import SlotTables
from forerun.kernels.commit import Pace
from forerun.kvcache.pages import PageAllocator
from forerun.kvcache.pools import KVLayout, KVPool
from forerun.kvcache.prefix import NoPrefixCache, PrefixCache, PrefixStore
from forerun.models.base import CausalLM
from forerun.models.loader import load_target
from forerun.platform.device import dtype_name, resolve_device, resolve_dtype, resolve_kv_dtype
from forerun.scheduler.scheduler import Limits
from forerun.scheduler.width import AdaptiveWidth, FixedWidth, WidthPolicy, ladder
from forerun.speculative.base import DraftContext, SpecCaps, SpeculativeAlgorithm, TargetHandle
from forerun.speculative.check import resolve_caps, slot_rows
from forerun.speculative.registry import get_algorithm
from forerun.speculative.simulate import simulated_pace

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


@dataclass(frozen=True)
class _Settings:
    """What was asked for, and what it means for this model on this machine."""

    config: EngineConfig
    target: ModelConfig
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    caps: SpecCaps
    limits: Limits

    @property
    def positions(self) -> int:
        """Rows a request can touch, and one."""
        return self.limits.context_length + self.limits.overshoot + 1

    @property
    def graphs(self) -> bool:
        """Whether steps are captured."""
        return self.device.type == "cuda" and not self.config.disable_cuda_graph

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths that steps may have."""
        return ladder(self.caps.width, self.caps.flexible and self.config.speculative_adaptive)


@dataclass(frozen=True)
class _Attention:
    """Of the target or the draft: what it needs, who serves it, and the K/V it keeps."""

    need: AttentionNeed
    choice: Choice
    layout: KVLayout

    @classmethod
    def of(
        cls,
        settings: _Settings,
        layout: KVLayout,
        heads: int,
        masks: tuple[LayerMask, ...],
        flag: str,
    ) -> _Attention:
        """`flag`: the setting that may name a backend."""
        need = AttentionNeed(
            device=settings.device.type,
            dtype=settings.dtype,
            head_dim=layout.head_dim,
            num_heads=heads,
            num_kv_heads=layout.num_kv_heads,
            page_size=settings.config.page_size,
            masks=frozenset(masks),
            graph=settings.graphs,
            kv_dtype=layout.dtype,
        )
        return cls(need, select(need, getattr(settings.config, flag), flag), layout)

    def over(self, pages: int, device: torch.device) -> AttentionBackend:
        pool = KVPool(self.layout, pages, self.need.page_size, device)
        return self.choice.backend(self.need, pool)


def build(config: EngineConfig, model_path: Path, overlap_depth: int | None) -> Parts:
    """Cheap checks first: what cannot work fails before any weight is read.

    Raises:
        ConfigError: settings that cannot work, a broken folder, too little memory.
    """
    algorithm = get_algorithm(config.speculative_algorithm)()
    settings = _resolve(config, model_path, algorithm, overlap_depth)
    device, caps, limits = settings.device, settings.caps, settings.limits
    memory = MemoryLog(device)
    with memory.stage("weights", "use a device with more, or stop what else uses it"):
        model = load_target(
            model_path, settings.dtype, device, config.load_format, settings.positions
        )
        algorithm.load(_draft_context(settings, model))
    attention = _attention(settings, model)
    with memory.stage("slot tables", "lower max_running_requests or context_length"):
        pages = limits.pages(settings.positions)
        tables = SlotTables(limits.slots, settings.positions, pages, caps.draft_tokens, device)
        tables.states += slot_rows(algorithm, limits.slots + 1, device)
        simulate = _simulated(settings)

    def over(pages: int) -> DeviceStep:
        target, *draft = (each.over(pages, device) for each in attention)
        own = draft[0] if draft else None
        return DeviceStep(model, algorithm, caps, tables, target, own, simulate)

    seen = Rehearsal()
    if device.type == "cuda":
        mend = "lower chunked_prefill_size, max_running_requests or cuda_graph_max_bs"
        with memory.stage("largest steps", mend):
            step = over(pages=1)
            seen = rehearse(step, limits, _graphs(settings, step))
            del step
    budget = kv_budget(
        config,
        [each.layout for each in attention],
        device,
        tokens_wanted=limits.slots * (limits.context_length + limits.overshoot),
        tokens_least=1 + limits.overshoot,
        seen=seen,
    )
    with memory.stage("K/V pools", "lower mem_fraction_static or max_total_tokens"):
        step = over(budget.num_pages)
    graphs = _graphs(settings, step)
    if graphs is not None:
        mend = "lower mem_fraction_static or cuda_graph_max_bs, or set disable_cuda_graph"
        with memory.stage("graphs", mend):
            capture_with_bar(graphs, quiet=not sys.stderr.isatty())
    allocator = PageAllocator(budget.num_pages)
    prefix: PrefixStore = (
        NoPrefixCache()
        if config.disable_radix_cache
        else PrefixCache(allocator, config.page_size, caps.prefix_lookahead)
    )
    explain = _explain(settings, attention, budget, memory, seen)
    log.info("engine: %s", explain)
    runner = Runner(step, graphs)
    policy = _policy(settings, runner)
    if config.cpu_graph:  # compiled when first met: too slow to measure at start
        from forerun.engine.cpu_graph import CompiledSteps

        runner = Runner(step, CompiledSteps(step, settings.positions))
    return Parts(runner, limits, allocator, prefix, policy, explain)


def _resolve(
    config: EngineConfig,
    model_path: Path,
    algorithm: SpeculativeAlgorithm,
    overlap_depth: int | None,
) -> _Settings:
    device = resolve_device(config.device)
    if config.cpu_graph:
        from forerun.engine.cpu_graph import check_usable

        check_usable(device)
    target = load_model_config(model_path)
    dtype = resolve_dtype(config.dtype, target.dtype, device)
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype)
    caps = resolve_caps(algorithm, config, target, dtype)
    if caps.draft_kv is not None:
        caps = replace(caps, draft_kv=replace(caps.draft_kv, dtype=kv_dtype))
    _check_draft_settings(config, caps)
    limits = _limits(config, target, caps, device, overlap_depth)
    return _Settings(config, target, device, dtype, kv_dtype, caps, limits)


def _check_draft_settings(config: EngineConfig, caps: SpecCaps) -> None:
    """Draft settings without a draft are a mistake, not a wish."""
    if config.speculative_algorithm is None:
        for name in ("speculative_draft_model_path", "speculative_num_draft_tokens"):
            if getattr(config, name) is not None:
                raise ConfigError(f"{name} is set without speculative_algorithm; name one.")
    if caps.draft_kv is None:
        for name in ("speculative_draft_attention_backend", "speculative_draft_window_size"):
            if getattr(config, name) is not None:
                raise ConfigError(
                    f"{name} is set, but {config.speculative_algorithm or 'plain decoding'} has"
                    " no draft attention; drop it."
                )


def _limits(
    config: EngineConfig,
    target: ModelConfig,
    caps: SpecCaps,
    device: torch.device,
    overlap_depth: int | None,
) -> Limits:
    context = config.context_length or target.max_position
    if context > target.max_position:
        raise ConfigError(
            f"context_length {context} is over the model's max_position_embeddings"
            f" {target.max_position}; lower it."
        )
    # Eager CPU steps cannot overlap with the host: launching early would only waste steps.
    on_cpu = device.type == "cpu"
    waits = config.disable_overlap_schedule or caps.needs_host_tokens
    depth = 0 if waits or on_cpu else 1
    return Limits(
        slots=config.max_running_requests or (32 if on_cpu else 256),
        page_size=config.page_size,
        width=caps.width,
        kv_reserve=max(caps.kv_reserve, caps.width),
        prefill_tokens=config.chunked_prefill_size,
        context_length=context,
        depth=depth if waits or overlap_depth is None else overlap_depth,
    )


def _draft_context(settings: _Settings, model: CausalLM) -> DraftContext:
    return DraftContext(
        config=settings.config,
        caps=settings.caps,
        target=TargetHandle(settings.target, model.embed, model.lm_head, model.lm_head_argmax),
        device=settings.device,
        dtype=settings.dtype,
        max_positions=settings.positions,
        slots=settings.limits.slots,
    )


def _attention(settings: _Settings, model: CausalLM) -> list[_Attention]:
    """The target's and, where there is one, the draft's."""
    layout, heads = model.kv_layout(settings.kv_dtype), model.config.num_heads
    masks, caps = model.layer_masks, settings.caps
    if caps.makes_trees:  # beside those of prompts and plain steps
        masks += tuple(LayerMask(Mask.CUSTOM, mask.window) for mask in masks)
    out = [_Attention.of(settings, layout, heads, masks, "attention_backend")]
    if caps.draft_kv is not None:
        flag = "speculative_draft_attention_backend"
        args = (caps.draft_kv, caps.draft_heads, caps.draft_attention, flag)
        out.append(_Attention.of(settings, *args))
    return out


def _simulated(settings: _Settings) -> Pace | None:
    mean = settings.config.speculative_simulate_accept_length
    if mean is None:
        return None
    if settings.caps.makes_trees:
        raise ConfigError("speculative_simulate_accept_length works with chains, not trees.")
    return simulated_pace(mean, settings.caps.width, settings.limits.slots + 1, settings.device)


def _graphs(settings: _Settings, step: DeviceStep) -> StepGraphs | None:
    """Of `step`, not captured yet."""
    if not settings.graphs:
        return None
    largest = min(settings.limits.slots, settings.config.cuda_graph_max_bs or MAX_GRAPH_BATCH)
    return StepGraphs(step, settings.positions, largest, settings.widths)


def _policy(settings: _Settings, runner: Runner) -> WidthPolicy:
    if not settings.config.speculative_adaptive or len(settings.widths) == 1:
        return FixedWidth(settings.widths)
    return AdaptiveWidth(settings.widths, runner.measure(settings.widths, settings.limits.slots))


def _explain(
    settings: _Settings,
    attention: list[_Attention],
    budget: KVBudget,
    memory: MemoryLog,
    seen: Rehearsal,
) -> dict[str, Any]:
    limits, (target, *draft) = settings.limits, attention
    rows = budget.num_pages * limits.page_size
    kv = {"kv_target": target.layout.cell_bytes * rows}
    if draft:
        kv["kv_draft"] = draft[0].layout.cell_bytes * rows
    return {
        "architecture": settings.target.architecture,
        "device": str(settings.device),
        "dtype": dtype_name(settings.dtype),
        "kv_cache_dtype": dtype_name(settings.kv_dtype),
        "algorithm": settings.config.speculative_algorithm or "NONE",
        "rows_per_step": limits.width,
        "attention": target.choice.explain(),
        "draft_attention": draft[0].choice.explain() if draft else None,
        "slots": limits.slots,
        "page_size": limits.page_size,
        "context_length": limits.context_length,
        "overlap_depth": limits.depth,
        "kv_pages": budget.num_pages - 1,
        "kv": budget.describe(limits.page_size),
        "kv_bytes_per_token": budget.cell_bytes,
        "memory_bytes": kv | memory.report(seen),
    }
