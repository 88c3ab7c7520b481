"""Chooses the attention backends of target and draft, before any weight is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from forerun.attention.base import AttentionBackend
from forerun.attention.capabilities import (
    PER_STEP,
    AttentionNeed,
    HostLengths,
    LayerMask,
    Mask,
    Phase,
)
from forerun.attention.model_attention import ModelAttention
from forerun.attention.select import BackendChoice, Force, Wanted, log_fallbacks, select
from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.kvcache.layouts import DenseKV, LatentKV, ModelLayout, RecurrentState
from forerun.kvcache.pools import ModelPools, PoolShape
from forerun.models.base import CausalLM
from forerun.platform.device import DTYPES
from forerun.speculative.base import SpecCaps

TARGET, DRAFT = "the target", "the draft"


@dataclass(frozen=True)
class Placement:
    """Device and dtypes of a model."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    graphs: bool  # decode steps are captured as CUDA graphs
    arch: str | None = None  # of the GPU: `gpu_arch`
    ranks: int = 1  # that share the target's heads
    draft_kv_dtype: torch.dtype | None = None  # None: as `kv_dtype`
    fixed_order: bool = False  # of the target's sums


@dataclass(frozen=True)
class AttentionSetup:
    """KV layout and attention backends of the target or the draft."""

    layout: ModelLayout
    choices: Mapping[Phase, BackendChoice]  # of the phases that this model has
    # Runs padded short prompts in a captured step; None: they are not captured.
    short_prefill: type[AttentionBackend] | None = None
    # Its pools are windowed: K/V positions that its layers read behind a token, at most.
    window: int | None = None

    @property
    def needs_exact_lengths(self) -> bool:
        """Whether the next step can only be launched with the result of the last one."""
        per_step = [self.choices[phase] for phase in PER_STEP if phase in self.choices]
        return any(c.backend.capabilities.host_lengths is HostLengths.EXACT for c in per_step)

    def build(
        self, shape: PoolShape, device: torch.device, pools: ModelPools | None = None
    ) -> ModelAttention:
        """Allocates the KV pools, without `pools`, and creates one instance of every backend."""
        pools = ModelPools(self.layout, shape, device) if pools is None else pools
        made: dict[type[AttentionBackend], AttentionBackend] = {}
        for kind in dict.fromkeys(choice.backend for choice in self.choices.values()):
            needs = [c.need for c in self.choices.values() if c.backend is kind]
            masks = frozenset[LayerMask]().union(*(need.masks for need in needs))
            made[kind] = kind(replace(needs[-1], masks=masks), pools)  # captured, if any is
        backends = {phase: made[choice.backend] for phase, choice in self.choices.items()}
        short = None if self.short_prefill is None else made[self.short_prefill]
        return ModelAttention(pools, backends, short)

    def explain(self) -> dict[str, str]:
        return {phase.value: choice.explain() for phase, choice in self.choices.items()}


def choose_attention(
    config: EngineConfig, model: CausalLM, caps: SpecCaps, where: Placement
) -> list[AttentionSetup]:
    """Chooses attention of the target and, if it has any, of the draft.

    Args:
        model: the target; its weights may be on the meta device.

    Raises:
        ConfigError: the selected backend, or every backend, cannot serve the model; or the
            algorithm drafts trees for a model whose recurrent layers follow one path.
    """
    return choose_backends(config, model_needs(config, model, caps, where))


def model_needs(
    config: EngineConfig, model: CausalLM, caps: SpecCaps, where: Placement
) -> list[ModelNeed]:
    """What target and draft need of attention; see `choose_attention`."""
    layout = _with_ssm_dtype(model.kv_layout(where.kv_dtype), config, model)
    if caps.makes_trees and not all(layer.trees for layer in layout.recurrent):
        raise ConfigError(
            f"speculative_algorithm {config.speculative_algorithm} drafts trees, and"
            f" {model.config.architecture} has recurrent layers whose state follows one path."
            " Choose an algorithm that drafts chains."
        )
    if caps.makes_trees and where.fixed_order and layout.recurrent and where.device.type == "cuda":
        raise ConfigError(
            f"speculative_algorithm {config.speculative_algorithm} drafts trees, whose sums have no"
            " fixed order in recurrent layers on a GPU. Choose an algorithm that drafts chains, or"
            " drop enable_deterministic_inference."
        )
    masks = tuple(
        mask
        for mask, layer in zip(model.layer_masks, layout.layers, strict=True)
        if not isinstance(layer, RecurrentState)
    )
    need = replace(
        _need(layout, model.config.num_heads // where.ranks, masks, where),
        sinks=model.has_attention_sinks,
        logit_softcap=model.has_logit_softcap,
        fixed_order=where.fixed_order,
    )
    trees = _tree_masks(masks) if caps.makes_trees else frozenset()
    phases = (Phase.PREFILL, Phase.DECODE, *([Phase.VERIFY] if caps.num_drafts else []))
    ragged = bool(config.speculative_ragged_verify)
    verify = Phase.VERIFY if ragged else None
    models = [ModelNeed(TARGET, layout, need, phases, trees, verify)]
    if caps.draft_kv is not None:
        draft = _need(caps.draft_kv, caps.draft_heads, caps.draft_attention, where)
        kept = where.draft_kv_dtype or where.kv_dtype
        draft = replace(draft, sinks=caps.draft_sinks, kv_dtype=kept)
        trees = _tree_masks(caps.draft_attention) if caps.draft_trees else frozenset()
        extend = Phase.EXTEND if ragged and caps.observes_packed else None
        models.append(ModelNeed(DRAFT, caps.draft_kv, draft, tuple(Phase), trees, extend))
    if caps.reads_target_kv:  # it keeps nothing
        draft = _need(layout, caps.draft_heads, caps.draft_attention, where)
        models.append(ModelNeed(DRAFT, ModelLayout(()), draft, (Phase.PREFILL, Phase.DECODE)))
    return models


def _tree_masks(masks: Iterable[LayerMask]) -> frozenset[LayerMask]:
    """The masks of trees in layers with these."""
    return frozenset(LayerMask(Mask.CUSTOM, mask.window) for mask in masks)


def _with_ssm_dtype(layout: ModelLayout, config: EngineConfig, model: CausalLM) -> ModelLayout:
    if config.mamba_ssm_dtype == "float32":
        return layout
    if not layout.has_ssm_state:
        raise ConfigError(
            f"mamba_ssm_dtype {config.mamba_ssm_dtype}: {model.config.architecture} has no linear"
            " attention; drop it."
        )
    return layout.with_ssm_dtype(DTYPES[config.mamba_ssm_dtype])


@dataclass(frozen=True)
class ModelNeed:
    """Target or draft, before its backends are chosen."""

    name: str
    layout: ModelLayout
    need: AttentionNeed  # of decode steps
    phases: tuple[Phase, ...]
    trees: frozenset[LayerMask] = frozenset()  # masks of verification besides
    ragged: Phase | None = None  # the phase whose passes may be ragged

    def need_of(self, phase: Phase) -> AttentionNeed:
        masks = self.need.masks | self.trees if phase is Phase.VERIFY else self.need.masks
        graph, ragged = self.need.graph and phase is not Phase.PREFILL, phase is self.ragged
        return replace(self.need, phase=phase, masks=masks, graph=graph, ragged_steps=ragged)


def choose_backends(config: EngineConfig, models: Sequence[ModelNeed]) -> list[AttentionSetup]:
    """A backend for every phase of every model, such that they have a page size in common.

    What the user named is chosen first; a default whose pages do not fit it is passed over.
    """
    pages = None if config.page_size is None else frozenset({config.page_size})
    chosen: dict[tuple[str, Phase], BackendChoice] = {}
    named: set[tuple[str, Phase]] = set()
    for binding, model in product((True, False), models):
        for phase in model.phases:  # PREFILL is the first
            prefill = chosen.get((model.name, Phase.PREFILL))
            wanted = _wanted(config, model.name, phase, prefill)
            if wanted.binding is not binding:
                continue
            need = model.need_of(phase)
            choice = select(need if binding else replace(need, page_sizes=pages), wanted)
            chosen[model.name, phase] = choice
            if choice.backend.name == wanted.name and binding:
                named.add((model.name, phase))
            if choice.page_sizes is not None:
                both = frozenset(choice.page_sizes).intersection(pages or choice.page_sizes)
                pages = both or pages  # nothing in common: `choose_page_size` says so
    log_fallbacks(chosen.values())
    return [
        AttentionSetup(
            model.layout,
            choices := {phase: chosen[model.name, phase] for phase in model.phases},
            _short_prefill(model, choices, (model.name, Phase.PREFILL) in named),
            _window(model.need.masks) if model.layout.layers else None,
        )
        for model in models
    ]


def _window(masks: Iterable[LayerMask]) -> int | None:
    """The largest window; None if a layer has none."""
    windows = [mask.window for mask in masks]
    sizes = [window for window in windows if window is not None]
    return max(sizes, default=None) if len(sizes) == len(windows) else None


def _wanted(
    config: EngineConfig, model: str, phase: Phase, prefill: BackendChoice | None
) -> Wanted:
    """What the settings say about a phase; `prefill`: what serves this model's prefill, if known.

    A draft without a setting of its own takes over the target's, as a default.
    """
    own = config.speculative_draft_attention_backend if model == DRAFT else None
    if config.speculative_attention_mode == "prefill" and phase in (Phase.VERIFY, Phase.EXTEND):
        strict = model == TARGET and config.prefill_attention_backend is not None
        name = None if prefill is None else prefill.backend.name
        force = Force.PHASE if strict else Force.DEFAULT
        return Wanted(name, "speculative_attention_mode prefill:", force, model)
    if own is not None:
        return Wanted(own, "speculative_draft_attention_backend", Force.MODEL, model)
    if phase is Phase.PREFILL:
        flag, name = "prefill_attention_backend", config.prefill_attention_backend
    else:
        flag, name = "decode_attention_backend", config.decode_attention_backend
    force = Force.PHASE
    if name is None:
        flag, name, force = "attention_backend", config.attention_backend, Force.MODEL
    return Wanted(name, flag, Force.DEFAULT if model == DRAFT else force, model)


def _short_prefill(
    model: ModelNeed, choices: Mapping[Phase, BackendChoice], prefill_is_named: bool
) -> type[AttentionBackend] | None:
    """The backend of padded short prompts: a prefill in the shape of a verify pass.

    That of verify passes if it serves prefill too; else, or if the user named one for prefill,
    that of prefill if it serves such passes.
    """
    several = Phase.EXTEND if Phase.EXTEND in model.phases else Phase.VERIFY
    step = choices[several if several in choices else Phase.DECODE].backend
    prefill = choices[Phase.PREFILL].backend
    needs = model.need_of(Phase.PREFILL), replace(model.need_of(Phase.DECODE), phase=several)
    for backend in (prefill,) if prefill_is_named else (step, prefill):
        if not backend.capabilities.plans_on_host and not any(map(backend.why_not, needs)):
            return backend
    return None


def _need(
    layout: ModelLayout, heads: int, masks: Sequence[LayerMask], where: Placement
) -> AttentionNeed:
    """The need of decode steps, with the dimensions of dense layers if there are some."""
    kinds = list(dict.fromkeys(layout.paged))
    dense = [kind for kind in kinds if isinstance(kind, DenseKV)]
    latent = [kind for kind in kinds if isinstance(kind, LatentKV)]
    return AttentionNeed(
        device=where.device.type,
        dtype=where.dtype,
        head_dim=max((kind.head_dim for kind in dense), default=layout.latent_dim),
        num_heads=heads,
        num_kv_heads=min((kind.num_kv_heads for kind in dense), default=1),
        masks=frozenset(masks),
        graph=where.graphs,
        kv_dtype=where.kv_dtype,
        dense=bool(dense),
        mla=bool(latent),
        latent_dim=latent[0].latent_dim if latent else 0,
        uniform=len(kinds) <= 1,
        head_dims=frozenset(kind.head_dim for kind in dense if len(kinds) > 1),
        arch=where.arch,
    )
