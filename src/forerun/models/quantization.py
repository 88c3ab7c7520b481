"""How checkpoints store quantized weights: FP8, and MXFP4 experts (gpt-oss).

FP8: a matrix [N, K] is `weight`, e4m3, and scales; their product is the weight. The scales are one
per block (`weight_scale_inv`, despite the name; DeepSeek-V3's inference/fp8_cast_bf16.py), per row,
or one of the whole matrix (`weight_scale`; compressed-tensors, ModelOpt). Norms, router, embedding
and LM head are stored plain, and often the MTP layer: each tensor's own dtype says which. Linears
keep the e4m3 values (`Fp8Weight`); everything else is dequantized while it is loaded.

MXFP4: runs of 32 values of a row share a scale, a power of two, and have four bits each (OCP
Microscaling Formats, version 1.0). A tensor `x` [E, K, N] of a model is `x_blocks`
[E, N, K / 32, 16] and `x_scales` [E, N, K / 32], both uint8. It is dequantized while it is loaded.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from forerun.config.model_config import ModelConfig
from forerun.core.errors import ConfigError
from forerun.kernels.gemm.quantized import Fp8Weight
from forerun.layers.sharding import Shard
from forerun.models import int4_formats
from forerun.models.int4_formats import Int4Format

SCALE_NAMES = ("_scale_inv", "_scale")  # appended to the name of the tensor that is scaled
E4M3 = "F8_E4M3"  # as safetensors names it
# Beside any weights: scales of K/V, which `kv_scales.py` reads, and of what attention computes.
KV_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale", ".prob_output_scale")
# Beside FP8 weights: scales of activations, which are not quantized or get scales of their own.
UNUSED_SCALES = (".input_scale", ".activation_scale", ".output_scale")
COLUMNS = "a matrix's columns"  # in errors


class Fp8Format(ABC):
    """e4m3 tensors [..., N, K] and their scales."""

    group: int | None  # columns that share a scale; None: all

    @abstractmethod
    def scale_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Those that the scales of a tensor of this shape may have, the usual one first."""

    @abstractmethod
    def row_scales(self, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Stored scales -> [..., N, G] float32, of every row."""

    def read(self, weight: Tensor, scale: Tensor, shard: Shard | None = None) -> Fp8Weight:
        """[..., N, K] e4m3 and its scales, as stored. `shard`: the part that `weight` is; `scale`
        is that of the whole.
        """
        shape = tuple(weight.shape)
        scales = self.row_scales(scale, shape if shard is None else shard.shape_of_whole(shape))
        part = None if shard is None else self.shard_of_scales(shard, len(shape))
        group = weight.shape[-1] if self.group is None else self.group
        return Fp8Weight(weight, scales if part is None else part.take(scales), group)

    def shard_of_scales(self, shard: Shard, dims: int) -> Shard | None:
        """Returns the shard of `row_scales` of a tensor of `dims` dimensions; None: all of them.

        Raises:
            ConfigError: columns that share a scale are on two ranks.
        """
        if shard.dim < dims - 1:
            return shard
        return None if self.group is None else shard.in_groups(self.group, COLUMNS)

    def dequantize(self, weight: Tensor, scale: Tensor) -> Tensor:
        """[..., N, K] e4m3 and its scales -> [..., N, K] float32."""
        return self.read(weight, scale).dequantize()


class Fp8Blocks(Fp8Format):
    """A scale per block of `rows` × `columns`; the last ones of a matrix may be smaller."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.group = rows, columns
        self.columns = columns

    def scale_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        *outer, n, k = shape
        return [(*outer, -(-n // self.rows), -(-k // self.columns))]

    def row_scales(self, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
        return scale.float().repeat_interleave(self.rows, -2)[..., : shape[-2], :]


class Fp8Rows(Fp8Format):
    """A scale per row, or one of the matrix."""

    group = None

    def scale_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        *outer, n, _ = shape
        whole: list[tuple[int, ...]] = [] if outer else [(1,), (), (1, 1)]
        return [(*outer, n, 1), (*outer, n), *whole]

    def row_scales(self, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
        return scale.float().reshape(*shape[:-2], -1, 1).expand(*shape[:-1], 1)


MXFP4_RUN = 32  # values with one scale
BLOCKS, SCALES = "_blocks", "_scales"  # appended to the name of the tensor
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Mxfp4:
    """Tensors [E, K, N], of which the runs are along K."""

    def shapes(self, view: Tensor, shard: Shard | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of blocks and scales of what fills `view` [E, K, ...], whole or this part."""
        shape: tuple[int, ...] = (*view.shape[:2], math.prod(view.shape[2:]))
        experts, k, n = shape if shard is None else shard.shape_of_whole(shape)
        return (experts, n, k // MXFP4_RUN, MXFP4_RUN // 2), (experts, n, k // MXFP4_RUN)

    def shard_of_rows(self, shard: Shard) -> Shard | None:
        """The same part of one expert's blocks [N, K / 32, 16] and scales; None: all of them.

        Raises:
            ConfigError: columns that share a scale are on two ranks.
        """
        if shard.dim == 0:
            return None
        if shard.dim == 2:
            return shard.along(0)
        return shard.along(1).in_groups(MXFP4_RUN, COLUMNS)

    def dequantize(self, blocks: Tensor, scales: Tensor) -> Tensor:
        """blocks [..., N, R, 16] and scales [..., N, R], uint8 -> [..., N, 32 R] float32.

        A byte has two values, the first in its low bits: a sign and the index into `_E2M1`.
        """
        codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()
        table = torch.tensor((*_E2M1, *(-value for value in _E2M1)), device=blocks.device)
        exponents = scales.int().unsqueeze(-1) - 127
        return torch.ldexp(table[codes], exponents).flatten(-2)


WeightFormat = Fp8Blocks | Fp8Rows | Mxfp4 | Int4Format


def weight_format(config: ModelConfig) -> WeightFormat | None:
    """How the checkpoint's matrices are quantized; None: not at all.

    Raises:
        ConfigError: in another way.
    """
    raw = config.raw.get("quantization_config")
    if not raw:
        return None
    spec: dict[str, Any] = _given(raw)
    method = spec.get("quant_method", "unknown")
    if method == "mxfp4":
        return Mxfp4()
    if method == "fp8" and spec.get("fmt", "e4m3") == "e4m3":
        return _fp8(spec.get("weight_block_size"))
    if method == "fbgemm_fp8" or (method == "modelopt" and spec.get("quant_algo") == "FP8"):
        return Fp8Rows()
    weights = _compressed_weights(spec) if method == "compressed-tensors" else {}
    if method == "compressed-tensors" and not spec.get("config_groups"):
        return None  # K/V alone (`kv_cache_scheme`)
    if weights.get("type") == "float" and weights.get("num_bits") == 8:
        return _fp8(weights.get("block_structure"))
    if method == "awq":
        return int4_formats.awq(spec)
    if method == "gptq":
        return int4_formats.gptq(spec)
    if weights.get("type") == "int" and weights.get("num_bits") == 4:
        return int4_formats.pack_quantized(weights)
    details = [f"{k} {spec[k]}" for k in ("fmt", "format", "quant_algo", "bits") if k in spec]
    raise ConfigError(
        f"The checkpoint is quantized ({', '.join([str(method), *details])}); use the bfloat16 or"
        " float32 checkpoint, one in FP8 (quant_method fp8, compressed-tensors float-quantized) or"
        " in 4 bits (awq, gptq, compressed-tensors pack-quantized)."
    )


def check_quantization(config: ModelConfig, quantization: str | None) -> None:
    """Refuses `quantization` of weights that are quantized otherwise.

    Raises:
        ConfigError: the checkpoint has 4-bit integers.
    """
    stored = weight_format(config)
    if quantization is not None and isinstance(stored, Int4Format):
        raise ConfigError(
            f"The checkpoint is quantized already ({stored.method}, 4 bits), which quantization"
            f" {quantization} does not apply to; drop it."
        )


def _fp8(block: Any) -> Fp8Blocks | Fp8Rows:
    if block is None:
        return Fp8Rows()
    pair = isinstance(block, list) and len(block) == 2
    if not pair or not all(isinstance(size, int) and size > 0 for size in block):
        raise ConfigError(f"weight_block_size {block} is not two positive integers; correct it.")
    return Fp8Blocks(*block)


def _given(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves out nulls, which stand for defaults."""
    return {key: value for key, value in raw.items() if value is not None}


def _compressed_weights(spec: dict[str, Any]) -> dict[str, Any]:
    """How compressed-tensors quantized the weights; {}: not all in one way."""
    groups = spec.get("config_groups") or {}
    found = [_given(group.get("weights") or {}) for group in groups.values()]
    return found[0] if found and all(each == found[0] for each in found) else {}
