"""Resolves the settings for this model on this machine, once, at start."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from forerun.attention.capabilities import PER_STEP, Phase
from forerun.attention.select import choose_page_size
from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import ModelConfig
from forerun.core.errors import ConfigError
from forerun.core.plan import Limits
from forerun.core.widths import FINE_TOKENS, ragged_widths, verify_widths
from forerun.executor.attention_setup import AttentionSetup, Placement, choose_attention
from forerun.executor.fixed_order import cpu_has_fixed_order, has_fixed_order
from forerun.executor.ragged import RaggedChoice, choose_ragged
from forerun.executor.tensor_parallel import rank_device
from forerun.kernels.cpu import library
from forerun.layers.communication import (
    SINGLE_RANK,
    Communicator,
    UnreducedRank,
    WeightPlacement,
)
from forerun.layers.gemm import INT8
from forerun.layers.moe import check_has_experts
from forerun.models.base import CausalLM
from forerun.models.formats.gguf import keeps_codes
from forerun.models.registry import TRANSFORMERS, target_class, target_config
from forerun.models.stop_ids import StopIds, stop_ids, tokenizer_folder
from forerun.platform.cpu_threads import CpuThreads
from forerun.platform.device import gpu_arch, resolve_dtype, resolve_kv_dtype
from forerun.speculative.base import SpecCaps, SpeculativeAlgorithm
from forerun.speculative.sharding import resolve_draft

log = logging.getLogger("forerun")

MAX_PENDING_OBSERVE = 16  # plain steps of a request whose observe may be deferred


@dataclass(frozen=True)
class Settings:
    """The user's config and all that follows from it for this model and machine."""

    config: EngineConfig
    target: ModelConfig
    stop_ids: StopIds
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    caps: SpecCaps
    limits: Limits
    attention: list[AttentionSetup]  # of the target and, if it has K/V, of the draft
    fixed_order: bool  # of the target's sums: a token's logits depend on those before it alone
    threads: CpuThreads | None  # intra-op threads; None: not a CPU
    ragged: RaggedChoice
    keeps_float32: bool  # `dtype` is float32 because that is asked for, or the target's own

    @property
    def window_in_prefill(self) -> bool:
        """Whether prompt tokens attend to windowed pools: the target's, or such a draft's."""
        target, *draft = self.attention
        if target.window is not None:
            return True
        return any(each.window is not None for each in draft) and self.caps.draft_attends_in_prefill

    @property
    def graphs(self) -> bool:
        """Whether steps are captured as CUDA graphs."""
        return captures_graphs(self.config, self.device)

    @property
    def widths(self) -> tuple[float, ...]:
        """The possible numbers of verified tokens per request and step; if ragged, in the mean."""
        full = self.caps.num_verify_tokens
        if self.limits.ragged:
            return verify_widths(full, True) if self.caps.makes_trees else ragged_widths(full)
        return verify_widths(full, self.caps.flexible and self.config.speculative_adaptive)


def captures_graphs(config: EngineConfig, device: torch.device) -> bool:
    return device.type == "cuda" and not config.disable_cuda_graph


def resolve(
    config: EngineConfig,
    model_path: Path,
    algorithm: SpeculativeAlgorithm,
    overlap_depth: int | None,
    comm: Communicator = SINGLE_RANK,
) -> Settings:
    """`comm`: the tensor-parallel ranks; the settings are those of this one."""
    device = rank_device(config, comm.rank)
    if (asked := config.asks_for_pieces) and not captures_graphs(config, device):
        why = "disable_cuda_graph is set" if config.disable_cuda_graph else f"this is {device}"
        raise ConfigError(f"{asked} captures prefills on a GPU, and {why}; drop it.")
    if config.model_impl == TRANSFORMERS:
        config = _with_transformers(config, model_path)
    _check_quantization(config, device)
    target = target_config(model_path, config.model_impl)
    dtype, keeps_float32 = _dtype(config, model_path, target, device)
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype)
    draft_kv_dtype = resolve_kv_dtype(
        config.speculative_draft_kv_cache_dtype or config.kv_cache_dtype, dtype
    )
    config, caps = resolve_draft(config, algorithm, target, dtype, device)
    if caps.draft_kv is not None:
        caps = replace(caps, draft_kv=caps.draft_kv.with_kv_dtype(draft_kv_dtype))
    _check_draft_settings(config, caps, algorithm)
    # On the meta device: its KV layout and attention follow from the config.
    ranks = UnreducedRank(comm.rank, comm.size) if comm.size > 1 else comm
    meta = WeightPlacement(dtype, torch.device("meta"), ranks, ep_size=config.ep_size)
    model = target_class(target, config.model_impl)(target, meta, max_positions=1)
    if config.ep_size > 1:
        check_has_experts(model, config.ep_size, target.architecture)
    ragged = choose_ragged(config, caps, device, model)
    config = replace(config, speculative_ragged_verify=ragged.ragged)
    graphs, arch = captures_graphs(config, device), gpu_arch(device)
    fixed_order = has_fixed_order(config, model, dtype, device)
    where = Placement(device, dtype, kv_dtype, graphs, arch, comm.size, draft_kv_dtype, fixed_order)
    attention = choose_attention(config, model, caps, where)
    if device.type == "cpu":
        fixed_order = cpu_has_fixed_order(config, type(model), attention[0])
    limits = _limits(config, target, caps, attention, device, overlap_depth)
    attention, limits = _with_windows(attention, limits, max(0, caps.prefix_lookahead - 1))
    threads = _threads(model, device, fixed_order, comm)
    tokenizer = None if config.skip_tokenizer_init else tokenizer_folder(config, model_path)
    stops = stop_ids(model_path, tokenizer, target.vocab_size)
    return Settings(
        config,
        target,
        stops,
        device,
        dtype,
        kv_dtype,
        caps,
        limits,
        attention,
        fixed_order,
        threads,
        ragged,
        keeps_float32,
    )


def _threads(
    model: CausalLM, device: torch.device, fixed_order: bool, comm: Communicator
) -> CpuThreads | None:
    if device.type != "cpu":
        return None
    size = sum(weight.nbytes for weight in model.weights().values())
    return CpuThreads.choose(size, fixed_order and comm.size == 1)


def _with_transformers(config: EngineConfig, model_path: Path) -> EngineConfig:
    """Steps of transformers' modules are not captured: nothing says that they can be."""
    if asked := config.asks_for_pieces:
        raise ConfigError(f"{asked} is not available with model_impl transformers; drop it.")
    log.warning(
        "model_impl transformers: %s runs in transformers' own modules. Attention is Forerun's; all"
        " else is neither fused nor captured in CUDA graphs, so a decode step takes as long as the"
        " host needs to launch its kernels one by one: several times as long as a family of"
        " Forerun's.",
        model_path,
    )
    return replace(config, disable_cuda_graph=True)


def _dtype(
    config: EngineConfig, folder: Path, target: ModelConfig, device: torch.device
) -> tuple[torch.dtype, bool]:
    """The dtype, and whether float32 is asked for, by the setting or the target's own files."""
    codes = keeps_codes(folder, device)
    native = config.model_impl != TRANSFORMERS and config.tp_size == 1
    # `auto` follows what is stored: float32 for codes that are computed with in float32.
    stored = "float32" if native and codes else target.dtype
    asked = target.dtype if config.dtype == "auto" and not codes else config.dtype
    return resolve_dtype(config.dtype, stored, device), asked == "float32"


def _check_quantization(config: EngineConfig, device: torch.device) -> None:
    """Refuses what is not there: FP8 is dequantized where no kernel reads it."""
    if config.quantization is not None and config.model_impl == TRANSFORMERS:
        raise ConfigError(
            f"quantization {config.quantization} is not available with model_impl transformers;"
            " drop it."
        )
    for setting in ("quantization", "speculative_draft_model_quantization"):
        _check_int8(setting, config, device)


def _check_int8(setting: str, config: EngineConfig, device: torch.device) -> None:
    """Refuses int8 where no kernel reads such weights."""
    if getattr(config, setting) != INT8:
        return
    where = f"{setting} int8"
    if device.type != "cpu":
        raise ConfigError(f"{where} runs on a CPU, and this is {device}; drop it.")
    reason = library.why_missing()
    if reason is not None:
        raise ConfigError(f"{where} needs the kernels in C++, and there are none: {reason}.")


def _check_draft_settings(
    config: EngineConfig, caps: SpecCaps, algorithm: SpeculativeAlgorithm
) -> None:
    """Refuses draft settings without a draft, or one that is not divided or quantized."""
    if config.draft_ranks > 1 and not algorithm.shards_draft:
        raise ConfigError(
            f"speculative_draft_tp_size {config.draft_ranks} is not available with"
            f" {config.speculative_algorithm or 'plain decoding'}, whose draft is whole on every"
            " rank; drop it."
        )
    if config.speculative_draft_model_quantization is not None and not algorithm.quantizes_draft:
        raise ConfigError(
            f"speculative_draft_model_quantization is set, but"
            f" {config.speculative_algorithm or 'plain decoding'} has no draft that it applies to;"
            " drop it."
        )
    if caps.draft_kv is None and config.speculative_draft_kv_cache_dtype is not None:
        raise ConfigError(
            "speculative_draft_kv_cache_dtype is set, but"
            f" {config.speculative_algorithm or 'plain decoding'} has no K/V of a draft; drop it."
        )
    if config.speculative_algorithm is None:
        for name, hint in (
            ("speculative_draft_model_path", " (`forerun doctor` with this path names it)"),
            ("speculative_num_draft_tokens", ""),
            ("speculative_attention_mode", ""),
        ):
            if getattr(config, name) is not None:
                message = f"{name} is set without speculative_algorithm; set it too{hint}."
                raise ConfigError(message)
    if caps.draft_kv is None and not caps.reads_target_kv:
        for name in ("speculative_draft_attention_backend", "speculative_draft_window_size"):
            if getattr(config, name) is not None:
                raise ConfigError(
                    f"{name} is set, but {config.speculative_algorithm or 'plain decoding'} has"
                    " no draft attention; drop it."
                )


def _with_windows(
    attention: list[AttentionSetup], limits: Limits, before: int
) -> tuple[list[AttentionSetup], Limits]:
    """Pools are windowed where that keeps fewer pages than the context has.

    `before`: tokens before those of a step that its draft runs again.
    """

    def keeps_fewer(window: int | None) -> bool:
        if window is None:
            return False
        kept = replace(limits, window=window + before).decode_window_pages
        return kept < limits.pages(limits.context_length)

    attention = [
        each if keeps_fewer(each.window) else replace(each, window=None) for each in attention
    ]
    windows = [each.window + before for each in attention if each.window is not None]
    window = max(windows, default=0)
    return attention, replace(limits, window=window)


def _limits(
    config: EngineConfig,
    target: ModelConfig,
    caps: SpecCaps,
    attention: list[AttentionSetup],
    device: torch.device,
    overlap_depth: int | None,
) -> Limits:
    context = config.context_length or target.max_position
    if context > target.longest_context:
        raise ConfigError(
            f"context_length {context} is over the model's {target.longest_context} positions"
            " (max_position_embeddings, or what YaRN extends it to). Lower it, or extend the model:"
            ' rope_scaling in config.json, {"rope_type": "yarn", "factor": ...,'
            ' "original_max_position_embeddings": ...}, if its card says that it can be.'
        )
    slots = config.max_running_requests or (32 if device.type == "cpu" else 256)
    states = config.max_mamba_cache_size
    if states is not None and states < slots:
        raise ConfigError(
            f"max_mamba_cache_size {states} is less than max_running_requests {slots}: every"
            " running request has a state. Raise it, or lower max_running_requests."
        )
    # CPU steps do not overlap with the host: launching early would only waste steps.
    on_cpu = device.type == "cpu"
    exact = any(setup.needs_exact_lengths for setup in attention)
    no_overlap = config.disable_overlap_schedule or caps.needs_host_tokens or exact
    order = (*PER_STEP, Phase.PREFILL)
    choices = [
        each.choices[phase] for each in attention for phase in order if phase in each.choices
    ]
    default_depth = 0 if no_overlap or on_cpu else 1
    page_size = choose_page_size(choices, config.page_size)
    if config.mamba_track_interval % page_size:
        raise ConfigError(
            f"mamba_track_interval {config.mamba_track_interval} is no multiple of page_size"
            f" {page_size}: prefixes are shared in whole pages. Take a multiple."
        )
    return Limits(
        slots=slots,
        page_size=page_size,
        max_verify_tokens=caps.num_verify_tokens,
        kv_reserve=caps.kv_reserve,
        chunked_prefill_size=config.chunked_prefill_size,
        context_length=context,
        overlap_depth=(default_depth if no_overlap or overlap_depth is None else overlap_depth),
        max_pending_observe=(
            min(caps.num_verify_tokens, MAX_PENDING_OBSERVE) if caps.deferred_observe else 0
        ),
        ragged=bool(config.speculative_ragged_verify),
        cuts_drafts=caps.flexible and not caps.makes_trees,
        uniform_tokens=FINE_TOKENS if captures_graphs(config, device) else 0,
    )
