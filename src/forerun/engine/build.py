"""Resolves the settings once and puts the engine's parts together."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forerun.attention.base import AttentionBackend, AttentionNeed, LayerMask
from forerun.attention.select import Choice, select
from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import ModelConfig, load_model_config
from forerun.core.errors import ConfigError
from forerun.engine.graphs import StepGraphs, capture_with_bar
from forerun.engine.memory import KVBudget, kv_budget
from forerun.engine.runner import Runner
from forerun.engine.step import DeviceStep
from forerun.engine.tables import SlotTables
from forerun.kvcache.pages import PageAllocator
from forerun.kvcache.pools import KVPool
from forerun.kvcache.prefix import NoPrefixCache, PrefixCache, PrefixStore
from forerun.models.base import CausalLM
from forerun.models.loader import load_target
from forerun.platform.device import resolve_device, resolve_dtype
from forerun.scheduler.scheduler import Limits
from forerun.speculative.base import DraftContext, SpecCaps, TargetHandle
from forerun.speculative.registry import get_algorithm
from forerun.speculative.simulate import SimulatedAccept

log = logging.getLogger("forerun")
MAX_GRAPH_BATCH = 256


@dataclass
class Parts:
    runner: Runner
    limits: Limits
    allocator: PageAllocator
    prefix: PrefixStore
    explain: dict[str, Any]


def build(config: EngineConfig, model_path: Path, overlap_depth: int | None) -> Parts:
    """Cheap checks first: what cannot work fails before any weight is read."""
    device = resolve_device(config.device)
    target = load_model_config(model_path)
    dtype = resolve_dtype(config.dtype, target.dtype, device)
    algorithm = get_algorithm(config.speculative_algorithm)()
    caps = algorithm.resolve(config, target, dtype)
    _check_draft_settings(config, caps)
    limits = _limits(config, target, caps, device, overlap_depth)
    positions = limits.context_length + limits.overshoot + 1

    model = load_target(model_path, dtype, device, config.load_format, positions)
    layouts = [model.kv_layout(dtype)] + ([caps.draft_kv] if caps.draft_kv else [])
    budget = kv_budget(
        config,
        layouts,
        device,
        tokens_wanted=limits.slots * (limits.context_length + limits.overshoot),
        tokens_least=1 + limits.overshoot,
    )
    tables = SlotTables(limits.slots, positions, limits.pages(positions), device)
    choice, attention = _attention(
        config,
        model,
        device,
        dtype,
        KVPool(layouts[0], budget.num_pages, config.page_size, device),
    )
    draft_choice, draft_attention = _draft_attention(config, caps, budget, device, dtype)
    algorithm.load(
        DraftContext(
            config=config,
            caps=caps,
            target=TargetHandle(target, model.embed, model.lm_head),
            device=device,
            dtype=dtype,
            max_positions=positions,
            slots=limits.slots,
            pool=draft_attention.pool if draft_attention else None,
        )
    )
    tables.states += algorithm.create_future_map(limits.slots + 1, device).rows.values()
    simulate = None
    if config.speculative_simulate_accept_length is not None:
        mean = config.speculative_simulate_accept_length
        simulate = SimulatedAccept(mean, caps.width, limits.slots + 1, device)
    step = DeviceStep(model, algorithm, caps, tables, attention, draft_attention, simulate)
    graphs = None
    if _wants_graphs(config, device):
        largest = min(limits.slots, config.cuda_graph_max_bs or MAX_GRAPH_BATCH)
        graphs = StepGraphs(step, positions, largest)
        capture_with_bar(graphs, quiet=not sys.stderr.isatty())
    runner = Runner(step, graphs)
    allocator = PageAllocator(budget.num_pages)
    prefix: PrefixStore = (
        NoPrefixCache()
        if config.disable_radix_cache
        else PrefixCache(allocator, config.page_size, caps.prefix_lookahead)
    )
    explain = _explain(config, target, device, dtype, limits, budget, choice, draft_choice)
    log.info("engine: %s", explain)
    return Parts(runner, limits, allocator, prefix, explain)


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
    depth = 0 if config.disable_overlap_schedule or on_cpu else 1
    return Limits(
        slots=config.max_running_requests or (32 if on_cpu else 256),
        page_size=config.page_size,
        width=caps.width,
        kv_reserve=max(caps.kv_reserve, caps.width),
        draft_tokens=caps.draft_tokens,
        prefill_tokens=config.chunked_prefill_size,
        context_length=context,
        depth=depth if overlap_depth is None else overlap_depth,
    )


def _wants_graphs(config: EngineConfig, device: torch.device) -> bool:
    return device.type == "cuda" and not config.disable_cuda_graph


def _attention(
    config: EngineConfig,
    model: CausalLM,
    device: torch.device,
    dtype: torch.dtype,
    pool: KVPool,
) -> tuple[Choice, AttentionBackend]:
    need = AttentionNeed(
        device=device.type,
        dtype=dtype,
        head_dim=model.config.head_dim,
        num_heads=model.config.num_heads,
        num_kv_heads=model.config.num_kv_heads,
        page_size=config.page_size,
        masks=frozenset(model.layer_masks),
        graph=_wants_graphs(config, device),
    )
    choice = select(need, config.attention_backend, "attention_backend")
    return choice, choice.backend(need, pool)


def _draft_attention(
    config: EngineConfig,
    caps: SpecCaps,
    budget: KVBudget,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Choice | None, AttentionBackend | None]:
    if caps.draft_kv is None:
        return None, None
    masks: frozenset[LayerMask] = frozenset(caps.draft_attention)
    need = AttentionNeed(
        device=device.type,
        dtype=dtype,
        head_dim=caps.draft_kv.head_dim,
        num_heads=caps.draft_heads,
        num_kv_heads=caps.draft_kv.num_kv_heads,
        page_size=config.page_size,
        masks=masks,
        graph=_wants_graphs(config, device),
    )
    wanted = config.speculative_draft_attention_backend
    choice = select(need, wanted, "speculative_draft_attention_backend")
    pool = KVPool(caps.draft_kv, budget.num_pages, config.page_size, device)
    return choice, choice.backend(need, pool)


def _explain(
    config: EngineConfig,
    target: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    limits: Limits,
    budget: KVBudget,
    choice: Choice,
    draft_choice: Choice | None,
) -> dict[str, Any]:
    return {
        "architecture": target.architecture,
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "algorithm": config.speculative_algorithm or "NONE",
        "rows_per_step": limits.width,
        "attention": choice.explain(),
        "draft_attention": draft_choice.explain() if draft_choice else None,
        "slots": limits.slots,
        "page_size": limits.page_size,
        "context_length": limits.context_length,
        "overlap_depth": limits.depth,
        "kv_pages": budget.num_pages - 1,
        "kv": budget.describe(limits.page_size),
        "kv_bytes_per_token": budget.cell_bytes,
    }
