"""Chooses the attention backends of target and draft, before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from forerun.attention.capabilities import AttentionNeed, HostLengths, LayerMask, Mask, Phase
from forerun.attention.model_attention import ModelAttention
from forerun.attention.select import BackendChoice, select
from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.kvcache.layouts import DenseKV, LatentKV, ModelLayout, RecurrentState
from forerun.kvcache.pools import ModelPools, PoolShape
from forerun.models.base import CausalLM
from forerun.speculative.base import SpecCaps

DRAFT_FLAG = "speculative_draft_attention_backend"


@dataclass(frozen=True)
class Placement:
    """Device and dtypes of a model."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    graphs: bool  # decode steps are captured as CUDA graphs


@dataclass(frozen=True)
class AttentionSetup:
    """KV layout and attention backends of the target or the draft."""

    layout: ModelLayout
    prefill: BackendChoice
    decode: BackendChoice

    @property
    def needs_exact_lengths(self) -> bool:
        """Whether the next step can only be launched with the result of the last one."""
        return self.decode.backend.capabilities.host_lengths is HostLengths.EXACT

    def build(self, shape: PoolShape, device: torch.device) -> ModelAttention:
        """Allocates the KV pools and creates the backends."""
        pools = ModelPools(self.layout, shape, device)
        decode = self.decode.backend(self.decode.need, pools)
        if self.prefill.backend is self.decode.backend:
            return ModelAttention(pools, decode, decode)
        return ModelAttention(pools, self.prefill.backend(self.prefill.need, pools), decode)

    def explain(self) -> dict[str, str]:
        return {"prefill": self.prefill.explain(), "decode": self.decode.explain()}


def choose_attention(
    config: EngineConfig, model: CausalLM, caps: SpecCaps, where: Placement
) -> list[AttentionSetup]:
    """Of the target and, if it has attention, of the draft.

    Args:
        model: the target; its weights may be on the meta device.

    Raises:
        ConfigError: the selected backend, or every backend, cannot serve the model; or the
            algorithm drafts trees for a model with recurrent state.
    """
    layout = model.kv_layout(where.kv_dtype)
    if caps.makes_trees and layout.has_recurrent_state:
        raise ConfigError(
            f"speculative_algorithm {config.speculative_algorithm} drafts trees, and"
            f" {model.config.architecture} has recurrent layers: their state follows one path."
            " Choose an algorithm that drafts chains."
        )
    masks = tuple(
        mask
        for mask, layer in zip(model.layer_masks, layout.layers, strict=True)
        if not isinstance(layer, RecurrentState)
    )
    need = replace(
        _need(layout, model.config.num_heads, masks, where),
        sinks=model.has_attention_sinks,
        logit_softcap=model.has_logit_softcap,
    )
    trees = frozenset(LayerMask(Mask.CUSTOM, m.window) for m in masks if caps.makes_trees)
    flags = _flags(config)
    target = AttentionSetup(
        layout,
        prefill=_choice(config, replace(need, phase=Phase.PREFILL, graph=False), flags),
        decode=_choice(config, replace(need, masks=need.masks | trees), flags),
    )
    if caps.draft_kv is None:
        return [target]
    draft = _need(caps.draft_kv, caps.draft_heads, caps.draft_attention, where)
    names = dict.fromkeys(Phase, DRAFT_FLAG)
    return [
        target,
        AttentionSetup(
            caps.draft_kv,
            prefill=_choice(config, replace(draft, phase=Phase.PREFILL, graph=False), names),
            decode=_choice(config, draft, names),
        ),
    ]


def _flags(config: EngineConfig) -> dict[Phase, str]:
    """The setting that selects the target's backend, by phase."""
    return {
        Phase.PREFILL: "attention_backend"
        if config.prefill_attention_backend is None
        else "prefill_attention_backend",
        Phase.DECODE: "attention_backend"
        if config.decode_attention_backend is None
        else "decode_attention_backend",
    }


def _choice(config: EngineConfig, need: AttentionNeed, flags: Mapping[Phase, str]) -> BackendChoice:
    flag = flags[need.phase]
    return select(need, getattr(config, flag), flag)


def _need(
    layout: ModelLayout, heads: int, masks: Sequence[LayerMask], where: Placement
) -> AttentionNeed:
    """The need of decode steps, with the dimensions of the first dense layer if there is one."""
    kinds = list(dict.fromkeys(layout.paged))
    dense = [kind for kind in kinds if isinstance(kind, DenseKV)]
    latent = [kind for kind in kinds if isinstance(kind, LatentKV)]
    return AttentionNeed(
        device=where.device.type,
        dtype=where.dtype,
        head_dim=dense[0].head_dim if dense else layout.latent_dim,
        num_heads=heads,
        num_kv_heads=dense[0].num_kv_heads if dense else 1,
        masks=frozenset(masks),
        graph=where.graphs,
        kv_dtype=where.kv_dtype,
        dense=bool(dense),
        mla=bool(latent),
        latent_dim=latent[0].latent_dim if latent else 0,
        expanded_dims=latent[0].expanded_dims if latent else None,
        uniform=len(kinds) <= 1,
    )
