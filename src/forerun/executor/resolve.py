"""What was asked for, and what it means for this model on this machine: resolved once, at start."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from forerun.attention.base import AttentionBackend, AttentionNeed, LayerMask, Mask
from forerun.attention.select import BackendChoice, select
from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import ModelConfig, load_model_config
from forerun.core.errors import ConfigError
from forerun.kernels.attention.tiles import best_page_size
from forerun.kvcache.layouts import DenseKV, ModelLayout
from forerun.kvcache.pools import ModelPools, PoolShape
from forerun.models.base import CausalLM
from forerun.platform.device import resolve_device, resolve_dtype, resolve_kv_dtype
from forerun.scheduler.adaptive_width import verify_widths
from forerun.scheduler.scheduler import Limits
from forerun.speculative.base import SpecCaps, SpeculativeAlgorithm
from forerun.speculative.check import resolve_caps

MAX_PENDING_OBSERVE = 16  # most outputs of plain steps that are kept back for a draft, each request


@dataclass(frozen=True)
class Settings:
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
        return verify_widths(
            self.caps.width, self.caps.flexible and self.config.speculative_adaptive
        )


def resolve(
    config: EngineConfig,
    model_path: Path,
    algorithm: SpeculativeAlgorithm,
    overlap_depth: int | None,
) -> Settings:
    device = resolve_device(config.device)
    if config.cpu_graph:
        from forerun.executor.compiled_cpu import check_usable

        check_usable(device)
    target = load_model_config(model_path)
    dtype = resolve_dtype(config.dtype, target.dtype, device)
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype)
    caps = resolve_caps(algorithm, config, target, dtype)
    if caps.draft_kv is not None:
        caps = replace(caps, draft_kv=caps.draft_kv.with_kv_dtype(kv_dtype))
    _check_draft_settings(config, caps)
    page = _page_size(config, target, device, kv_dtype)
    limits = _limits(config, target, caps, device, page, overlap_depth)
    return Settings(config, target, device, dtype, kv_dtype, caps, limits)


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


def _page_size(
    config: EngineConfig, target: ModelConfig, device: torch.device, kv_dtype: torch.dtype
) -> int:
    if config.page_size is not None:
        return config.page_size
    return best_page_size(device, target.head_dim, kv_dtype)


def _limits(
    config: EngineConfig,
    target: ModelConfig,
    caps: SpecCaps,
    device: torch.device,
    page: int,
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
        page_size=page,
        width=caps.width,
        kv_reserve=caps.kv_reserve,
        prefill_tokens=config.chunked_prefill_size,
        context_length=context,
        depth=depth if waits or overlap_depth is None else overlap_depth,
        max_pending_observe=min(caps.width, MAX_PENDING_OBSERVE) if caps.deferred_observe else 0,
    )


@dataclass(frozen=True)
class AttentionSetup:
    """Of the target or the draft: what it needs, who serves it, and the K/V it keeps."""

    need: AttentionNeed
    choice: BackendChoice
    layout: ModelLayout

    @classmethod
    def of(
        cls,
        settings: Settings,
        layout: ModelLayout,
        heads: int,
        masks: tuple[LayerMask, ...],
        flag: str,
    ) -> AttentionSetup:
        """`flag`: the setting that may name a backend."""
        kind = layout.layers[0]
        assert isinstance(kind, DenseKV)
        need = AttentionNeed(
            device=settings.device.type,
            dtype=settings.dtype,
            head_dim=kind.head_dim,
            num_heads=heads,
            num_kv_heads=kind.num_kv_heads,
            page_size=settings.limits.page_size,
            masks=frozenset(masks),
            graph=settings.graphs,
            kv_dtype=kind.dtype,
        )
        return cls(need, select(need, getattr(settings.config, flag), flag), layout)

    def over(self, pages: int, device: torch.device) -> AttentionBackend:
        pools = ModelPools(self.layout, PoolShape(pages, self.need.page_size), device)
        return self.choice.backend(self.need, pools)


def attention_setups(settings: Settings, model: CausalLM) -> list[AttentionSetup]:
    """The target's and, where there is one, the draft's."""
    layout, heads = model.kv_layout(settings.kv_dtype), model.config.num_heads
    masks, caps = model.layer_masks, settings.caps
    if caps.makes_trees:  # beside those of prompts and plain steps
        masks += tuple(LayerMask(Mask.CUSTOM, mask.window) for mask in masks)
    out = [AttentionSetup.of(settings, layout, heads, masks, "attention_backend")]
    if caps.draft_kv is not None:
        flag = "speculative_draft_attention_backend"
        args = (caps.draft_kv, caps.draft_heads, caps.draft_attention, flag)
        out.append(AttentionSetup.of(settings, *args))
    return out
