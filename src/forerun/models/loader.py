"""Builds a target model from a folder and loads its weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from forerun.config.model_config import ModelConfig, load_model_config
from forerun.core.errors import ConfigError
from forerun.kernels.gemm.quantized import QuantizedWeight
from forerun.layers.communication import WeightPlacement
from forerun.layers.embedding import VocabEmbedding
from forerun.layers.gemm import INT8
from forerun.layers.linear import LinearBase
from forerun.layers.module import Module
from forerun.layers.moe import (
    Experts,
    SparseMoE,
    choose_expert_layout,
    other_ranks_experts,
)
from forerun.layers.quantize_method import QuantizeMethod
from forerun.models import further_layers
from forerun.models.base import CausalLM
from forerun.models.checkpoint import HARMLESS, Checkpoint
from forerun.models.dummy_weights import DUMMY_FORMATS, fill_dummy
from forerun.models.formats.base import View, WeightFormat
from forerun.models.formats.registry import ONLINE, weight_format
from forerun.models.kv_scales import fold_kv_scales
from forerun.models.registry import model_class
from forerun.models.safetensors_files import FIX_FOLDER
from forerun.models.transformers_model import TransformersForCausalLM, load_transformers_config

# Checkpoints of embeddings name the tensors as they are called within `model.`.
HEADLESS_PREFIXES = {each: f"model.{each}" for each in ("embed_tokens.", "layers.", "norm.")}


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
    check_groups(place)
    positions = max_positions or config.max_position
    if load_format in DUMMY_FORMATS:
        model = build(config, place, positions)
        _fill_dummy(model, place, load_format)
    else:
        # Without memory first: what does not fit the files is refused before it is allocated.
        checkpoint, loaded = _checked(folder, config, place.on_meta())
        model = build(loaded, place, positions)
        model.has_lm_head = loaded is config
        _read(model, checkpoint, place)
        fold_kv_scales(model, checkpoint, kv_dtype)
    model.prepare()
    return model


def check_target_files(folder: Path, config: ModelConfig) -> None:
    """Compares a model's weights with its config, and loads nothing.

    Raises:
        ConfigError: a tensor is missing, left over, or of another shape.
    """
    _checked(folder, config, WeightPlacement(torch.bfloat16, torch.device("meta")))


def _checked(
    folder: Path, config: ModelConfig, place: WeightPlacement
) -> tuple[Checkpoint, ModelConfig]:
    """The tensors of a model, which are those of its config. `place`: on the meta device.

    Returns them with the config; where they are those of an embedding model, which has no LM head,
    with one whose embedding stands in for it.
    """
    checkpoint = Checkpoint(folder, weight_format(config, place.quantization))
    checkpoint.rename(further_layers.prefixes_to_rename(config))
    if "embed_tokens.weight" in checkpoint:
        checkpoint.rename(HEADLESS_PREFIXES)
        has_head = config.tie_word_embeddings or "lm_head.weight" in checkpoint
        config = config if has_head else replace(config, tie_word_embeddings=True)
    further = further_layers.prefixes(config)  # drafts read these
    checkpoint.keep(lambda name: not name.startswith(further))
    _read(model_class(config)(config, place, 1), checkpoint, place, only_check=True)
    return checkpoint, config


def _fill_dummy(model: CausalLM, place: WeightPlacement, load_format: str) -> None:
    """Allocates and fills the weights, packed as the checkpoint's format or `quantization` says."""
    stored = weight_format(model.config, place.quantization)
    for experts in model.modules(Experts):
        experts.fused = experts.can_be_fused  # thousands of tensors fewer
    made = stored if stored is not None and stored.keeps_dummy else None
    quantized = allocate(model, None, place.quantization, made)
    views: dict[str, View] = {**model.weights(), **quantized}
    fill_dummy(views, load_format, 0, model.shards(), place.comm, made)


def _read(
    model: CausalLM, checkpoint: Checkpoint, place: WeightPlacement, only_check: bool = False
) -> None:
    """Allocates the weights and reads them; `only_check`: compares them with the files' headers."""
    config = model.config
    choose_expert_layout(model, checkpoint.headers)
    others = other_ranks_experts(model)
    checkpoint.keep(lambda name: name.rpartition(".")[0] not in others)
    quantized = allocate(model, checkpoint, place.quantization)
    views: dict[str, View] = {**model.weights(), **quantized}
    tied = config.tie_word_embeddings  # then a stored head is the embedding again
    harmless = (*HARMLESS, "lm_head.weight") if tied else HARMLESS
    hint = f"Is config.json ({config.architecture}) the one of these weights?"
    if only_check:
        checkpoint.check(views, harmless, hint, model.shards())
    else:
        checkpoint.read_into(views, harmless, hint, model.shards(), place.comm)


def allocate(
    model: Module,
    checkpoint: Checkpoint | None,
    quantization: str | None,
    made: WeightFormat | None = None,
) -> dict[str, QuantizedWeight]:
    """Memory for the weights of a model's linears, embedding and experts. Those that the checkpoint
    has in its format are kept so, and plain ones in the format of the setting `quantization`.

    Args:
        made: without a checkpoint, the format that weights are made in.

    Returns:
        The views of the quantized ones by name, which `model.weights()` lacks.
    """
    views: dict[str, QuantizedWeight] = {}
    online, shards = ONLINE.get(quantization), model.shards()

    def kept(names: list[str]) -> list[QuantizeMethod]:
        """What may keep a matrix of weights of these names, the first one that does."""
        stored = [checkpoint is not None and checkpoint.is_quantized(name) for name in names]
        own: QuantizeMethod | None = made
        if checkpoint is not None:
            own = checkpoint.method_for(names, shards) if names and all(stored) else None
        methods = [own, None if any(stored) else online]
        kinds = [each for each in methods if each is not None]
        return [each for each in kinds if quantization != INT8 or each.takes_int8_tokens]

    for prefix, linear in model.named_modules(LinearBase):
        names = [name for name in linear.weights(prefix) if name.endswith("weight")]
        if not linear.quantizable or not any(map(linear.quantize, kept(names))):
            linear.allocate()
        views |= linear.quantized_weights(prefix)
    for prefix, embedding in model.named_modules(VocabEmbedding):
        any(map(embedding.quantize, kept([f"{prefix}weight"])))
        views |= embedding.quantized_weights(prefix)
    for prefix, moe in model.named_modules(SparseMoE):
        any(map(moe.experts.quantize, kept(moe.matrix_names(prefix))))
        views |= moe.quantized_weights(prefix)
    for experts in model.modules(Experts):
        experts.allocate()
    return views


def check_groups(place: WeightPlacement) -> None:
    """
    Raises:
        ConfigError: scales of rows would need a maximum over each group's ranks.
    """
    if place.quantization in ONLINE and 1 < place.ep_size < place.comm.size:
        raise ConfigError(
            f"quantization {place.quantization} is not available with ep_size {place.ep_size} of"
            f" tp_size {place.comm.size}; set ep_size to 1 or {place.comm.size}, or take an FP8"
            " checkpoint."
        )


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
