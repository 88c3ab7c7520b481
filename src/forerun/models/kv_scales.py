"""Scales of K and V that checkpoints have for a cache in FP8, one per layer and tensor.

What a cache stores is k / k_scale and v / v_scale, rounded to e4m3. Checkpoints are calibrated so
that no value saturates. The scales go into the weights (`ProjectedAttention.fold_kv_scales`), so
that every backend stores and reads K/V as it does without. They are left alone where K/V is not
stored in float8, and MTP layers and drafts store theirs with a scale of 1.
"""

from __future__ import annotations

import logging
import math

import torch

from forerun.core.errors import ConfigError
from forerun.kernels.runtime.fp8 import FP8
from forerun.layers.attention import Attention, KVScales, ProjectedAttention
from forerun.layers.mla import LatentAttention
from forerun.layers.module import Module
from forerun.models.checkpoint import Checkpoint
from forerun.platform.device import dtype_name

log = logging.getLogger(__name__)

# Within an attention, as vLLM and SGLang know them: compressed-tensors and Quark; ModelOpt, with
# and without fused projections; compressed-tensors before `kv_cache_scheme`, and Quark, which have
# the outputs of projections quantized; AutoFP8's one scale of both.
NAMES = (
    "{x}_scale",
    "attn.{x}_scale",
    "{x}_proj.{x}_scale",
    "qkv_proj.{x}_scale",
    "{x}_proj.output_scale",
    "kv_scale",
)


def fold_kv_scales(model: Module, checkpoint: Checkpoint, kv_dtype: torch.dtype | None) -> None:
    """Folds them between loading and `prepare`. `kv_dtype`: of the cache; None: all scales are 1.

    Raises:
        ConfigError: a scale of more than one value, or of none that makes sense; latent (MLA) K/V,
            or values that are normed.
    """
    layers = (*model.named_modules(Attention), *model.named_modules(LatentAttention))
    if kv_dtype is None:
        return
    paths = [path.removesuffix("attn.") for path, _ in layers]
    if kv_dtype != FP8:
        if any(_find(checkpoint, path, which) for path in paths for which in "kv"):
            log.info(
                "%s has K/V scales. They are not used, because K/V is stored in %s and not in FP8"
                " (kv_cache_dtype fp8_e4m3).",
                checkpoint.folder,
                dtype_name(kv_dtype),
            )
        return
    projected = dict(model.named_modules(ProjectedAttention))
    for path in paths:
        scales = _scales(checkpoint, path)
        if scales == KVScales():
            continue
        if path not in projected:
            raise ConfigError(
                f"{checkpoint.folder} has K/V scales other than 1 for latent (MLA) K/V or for"
                f" normed values ({path}), which is not supported; use kv_cache_dtype auto."
            )
        projected[path].fold_kv_scales(scales)


def _scales(checkpoint: Checkpoint, path: str) -> KVScales:
    """Reads those of one layer as vLLM does: if only one of both is there, it is that of both."""
    k, v = (_scale(checkpoint, path, which) for which in "kv")
    return KVScales.of(k or v or 1.0, v or k or 1.0)


def _scale(checkpoint: Checkpoint, path: str, which: str) -> float | None:
    """None, if the checkpoint has none or, as -1, none that was calibrated."""
    name = _find(checkpoint, path, which)
    if name is None:
        return None
    stored = checkpoint.read(name)
    if stored.numel() != 1:
        raise ConfigError(
            f"{checkpoint.folder}: {name} has {stored.numel()} values. K/V scales per head or"
            " channel are not supported, one per tensor is; use kv_cache_dtype auto."
        )
    scale = float(stored)
    if scale == -1:
        return None
    if not math.isfinite(scale) or scale <= 0:
        raise ConfigError(
            f"{checkpoint.folder}: {name} is {scale:g}, not a positive number; use kv_cache_dtype"
            " auto."
        )
    return scale


def _find(checkpoint: Checkpoint, path: str, which: str) -> str | None:
    names = (path + name.format(x=which) for name in NAMES)
    return next((name for name in names if name in checkpoint), None)
