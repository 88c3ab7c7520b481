"""Builds a target model from a folder and loads its weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from forerun.config.model_config import load_model_config
from forerun.core.errors import ConfigError
from forerun.kernels.gemm.int4 import Int4Weight
from forerun.kernels.gemm.quantized import Fp8Weight, QuantizedWeight
from forerun.layers.communication import WeightPlacement
from forerun.layers.gemm import FP8, INT8
from forerun.layers.linear import LinearBase
from forerun.layers.module import Module
from forerun.layers.moe import (
    Experts,
    SparseMoE,
    choose_expert_layout,
    other_ranks_experts,
)
from forerun.models import further_layers
from forerun.models.base import CausalLM
from forerun.models.checkpoint import (
    DUMMY_FORMATS,
    FIX_FOLDER,
    HARMLESS,
    Checkpoint,
    View,
    fill_dummy,
)
from forerun.models.int4_formats import Int4Format
from forerun.models.kv_scales import fold_kv_scales
from forerun.models.quantization import Mxfp4, check_quantization, weight_format
from forerun.models.registry import model_class
from forerun.models.transformers_model import TransformersForCausalLM, load_transformers_config

INT4 = "int4"  # of linears with random weights, if config.json says 4 bits


def load_target(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    max_positions: int | None = None,
    quantization: str | None = None,
    kv_dtype: torch.dtype | None = None,
) -> CausalLM:
    """`load_target_at` on one rank. `quantization`: of linears: "int8", on a CPU; "fp8": e4m3 with
    a scale per output.
    """
    place = WeightPlacement(dtype, device, quantization=quantization, allocate=False)
    return load_target_at(place, folder, load_format, max_positions, kv_dtype)


def load_target_at(
    place: WeightPlacement,
    folder: Path,
    load_format: str = "auto",
    max_positions: int | None = None,
    kv_dtype: torch.dtype | None = None,
) -> CausalLM:
    """Builds the architecture that `config.json` names and fills it.

    Args:
        place: where the weights go, not allocated; other floats are converted while they are
            copied. Each of several ranks reads its part.
        folder: a Hugging Face model folder with safetensors; for `dummy` a config is enough.
        load_format: "auto", or one of `DUMMY_FORMATS`: random weights from a fixed seed.
        max_positions: length of the rotary tables; None: `max_position_embeddings`.
        kv_dtype: of stored K/V; in float8 the checkpoint's scales of K/V apply. None: no scales.

    Raises:
        ConfigError: anything missing, broken or unsupported, in one line with the fix.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; {FIX_FOLDER}.")
    config = load_model_config(folder)
    build = model_class(config)
    stored = weight_format(config)
    quantization = place.quantization
    check_quantization(config, quantization)
    check_fp8_groups(place)
    positions = max_positions or config.max_position
    if load_format in DUMMY_FORMATS:
        model = build(config, place, positions)
        int4 = isinstance(stored, Int4Format) and stored.keeps_packed
        _fill_dummy(model, place, load_format, INT4 if int4 else quantization)
    else:
        checkpoint = Checkpoint(folder, stored)
        checkpoint.rename(further_layers.prefixes_to_rename(config))
        further = further_layers.prefixes(config)  # drafts read these
        checkpoint.keep(lambda name: not name.startswith(further))
        # Without memory first: what does not fit the files is refused before it is allocated.
        _read(build(config, place.on_meta(), 1), checkpoint, place.on_meta(), only_check=True)
        model = build(config, place, positions)
        _read(model, checkpoint, place)
        fold_kv_scales(model, checkpoint, kv_dtype)
    model.prepare()
    return model


def _fill_dummy(
    model: CausalLM, place: WeightPlacement, load_format: str, quantization: str | None
) -> None:
    """Allocates and fills the weights; linears as `quantization` says, which may be `INT4`."""
    _allocate_mxfp4(model)
    for experts in model.modules(Experts):
        experts.fused = experts.can_be_fused  # thousands of tensors fewer
    order = list(model.weights())
    quantized = {
        **allocate_linears(model, None, quantization),
        **allocate_experts(model, None, place.quantization),
    }
    views: dict[str, View] = {**model.weights(), **quantized}
    ordered = {name: views[name] for name in order}
    fill_dummy(ordered, load_format, shards=model.shards(), comm=place.comm)


def _read(
    model: CausalLM, checkpoint: Checkpoint, place: WeightPlacement, only_check: bool = False
) -> None:
    """Allocates the weights and reads them; `only_check`: compares them with the files' headers."""
    config = model.config
    _allocate_mxfp4(model)
    choose_expert_layout(model, checkpoint.headers)
    others = other_ranks_experts(model)
    checkpoint.keep(lambda name: name.rpartition(".")[0] not in others)
    quantized = {
        **allocate_linears(model, checkpoint, place.quantization),
        **allocate_experts(model, checkpoint, place.quantization),
    }
    views: dict[str, View] = {**model.weights(), **quantized}
    tied = config.tie_word_embeddings  # then a stored head is the embedding again
    harmless = (*HARMLESS, "lm_head.weight") if tied else HARMLESS
    hint = f"Is config.json ({config.architecture}) the one of these weights?"
    if only_check:
        checkpoint.check(views, harmless, hint, model.shards())
    else:
        checkpoint.read_into(views, harmless, hint, model.shards(), place.comm)


def _allocate_mxfp4(model: CausalLM) -> None:
    if isinstance(weight_format(model.config), Mxfp4):
        for experts in model.modules(Experts):
            experts.allocate_mxfp4()


def allocate_linears(
    model: Module, checkpoint: Checkpoint | None, quantization: str | None
) -> dict[str, QuantizedWeight]:
    """Memory for the weights of a model's linears. Those that the checkpoint has in FP8 or in 4
    bits, and with `quantization` "fp8" or `INT4` all, are kept so.

    Returns:
        The views of the quantized ones by name, which `model.weights()` lacks.
    """
    views: dict[str, QuantizedWeight] = {}
    for prefix, linear in model.named_modules(LinearBase):
        names = [name for name in linear.weights(prefix) if name.endswith("weight")]
        if not linear.quantizable or quantization == INT8:
            linear.allocate()
        elif checkpoint is not None and names and all(map(checkpoint.is_fp8, names)):
            assert checkpoint.fp8 is not None
            linear.quantize(partial(Fp8Weight.empty, group=checkpoint.fp8.group))
        elif checkpoint is not None and names and all(map(checkpoint.is_int4, names)):
            assert checkpoint.int4 is not None
            _quantize_int4(linear, checkpoint.int4.keeps_packed)
        elif quantization == INT4:
            _quantize_int4(linear)
        elif quantization == FP8:
            linear.quantize(partial(Fp8Weight.empty, group=None))
        else:
            linear.allocate()
        views |= linear.quantized_weights(prefix)
    return views


def check_fp8_groups(place: WeightPlacement) -> None:
    """
    Raises:
        ConfigError: scales of rows would need a maximum over each group's ranks.
    """
    if place.quantization == FP8 and 1 < place.ep_size < place.comm.size:
        raise ConfigError(
            f"quantization fp8 is not available with ep_size {place.ep_size} of tp_size"
            f" {place.comm.size}; set ep_size to 1 or {place.comm.size}, or take an FP8 checkpoint."
        )


def allocate_experts(
    model: Module, checkpoint: Checkpoint | None, quantization: str | None
) -> dict[str, QuantizedWeight]:
    """The same for the experts; the checkpoint's in FP8 and with "fp8" all are kept so."""
    views: dict[str, QuantizedWeight] = {}
    for prefix, moe in model.named_modules(SparseMoE):
        experts, names = moe.experts, moe.expert_weights(prefix)
        stored = [checkpoint is not None and checkpoint.is_fp8(name) for name in names]
        quantize, group = all(stored) or (quantization == FP8 and not any(stored)), None
        if any(stored):
            assert checkpoint is not None and checkpoint.fp8 is not None
            group = checkpoint.fp8.group
        if quantize and quantization != INT8 and experts.can_quantize(group):
            experts.quantize(group)
        views |= moe.quantized_weights(prefix)
    for experts in model.modules(Experts):
        experts.allocate()
    return views


def _quantize_int4(linear: LinearBase, keep_packed: bool = True) -> None:
    """Where kernels read it; otherwise the weight is dequantized while it is loaded."""
    if keep_packed and Int4Weight.fits(*linear.weight.shape):
        linear.quantize(Int4Weight.empty)
    else:
        linear.allocate()


def load_transformers_target(
    folder: Path, dtype: torch.dtype, device: torch.device, load_format: str = "auto"
) -> CausalLM:
    """The same with the modules of transformers (`model_impl`)."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; {FIX_FOLDER}.")
    if load_format in DUMMY_FORMATS:
        raise ConfigError(
            f"load_format {load_format} is not available with model_impl transformers."
        )
    place = WeightPlacement(dtype, device)
    model = TransformersForCausalLM(load_transformers_config(folder), place, max_positions=1)
    model.load(folder, place)
    return model
