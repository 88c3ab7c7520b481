"""Scales of K and V that checkpoints have for a cache in FP8, one per layer and tensor.

What a cache stores is k / k_scale and v / v_scale, rounded to e4m3. Checkpoints are calibrated so
that no value saturates. The scales go into the weights (`ProjectedAttention.fold_kv_scales`), so
that every backend stores and reads K/V as it does without. They are left alone where K/V is not
stored in float8, and MTP layers and drafts store theirs with a scale of 1.
"""

from __future__ import annotations

import math

import torch

from forerun.core.errors import ConfigError
from forerun.kernels.runtime.fp8 import FP8
from forerun.layers.attention import KVLayer, KVScales, ProjectedAttention
from forerun.layers.module import Module
from forerun.models.checkpoint import Checkpoint

# Within an attention: compressed-tensors and Quark; ModelOpt; compressed-tensors before
# `kv_cache_scheme`, which had the outputs of two projections quantised.
NAMES = ("{x}_scale", "attn.{x}_scale", "{x}_proj.{x}_scale", "{x}_proj.output_scale")


def fold_kv_scales(model: Module, checkpoint: Checkpoint, kv_dtype: torch.dtype | None) -> None:
    """Between loading and `prepare`. `kv_dtype`: of the cache; None: not known, no float8.

    Raises:
        ConfigError: a scale of more than one value, or of none that makes sense; latent (MLA) K/V.
    """
    if kv_dtype != FP8:
        return
    projected = dict(model.named_modules(ProjectedAttention))
    for path, _ in model.named_modules(KVLayer):
        prefix = path.removesuffix("attn.")
        k, v = (_scale(checkpoint, prefix, which) for which in "kv")
        if k == v == 1:
            continue
        if prefix not in projected:
            raise ConfigError(
                f"{checkpoint.folder} has K/V scales other than 1 ({prefix}*_scale) for latent (MLA)"
                " K/V, which is not supported; use kv_cache_dtype auto."
            )
        projected[prefix].fold_kv_scales(KVScales.of(k, v))


def _scale(checkpoint: Checkpoint, prefix: str, which: str) -> float:
    """1, if the checkpoint has none or, as -1, none that was calibrated."""
    names = (prefix + name.format(x=which) for name in NAMES)
    name = next((name for name in names if name in checkpoint), None)
    if name is None:
        return 1.0
    values = checkpoint.read(name).flatten().tolist()
    if len(values) != 1:
        raise ConfigError(
            f"{checkpoint.folder}: {name} has {len(values)} values. K/V scales per head or channel"
            " are not supported, one per tensor is; use kv_cache_dtype auto."
        )
    if values[0] == -1:
        return 1.0
    if not math.isfinite(values[0]) or values[0] <= 0:
        raise ConfigError(
            f"{checkpoint.folder}: {name} is {values[0]:g}, not a positive number; use"
            " kv_cache_dtype auto."
        )
    return float(values[0])
