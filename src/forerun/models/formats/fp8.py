"""FP8: a matrix [N, K] is `weight`, e4m3, and scales; their product is the weight.

The scales are one per block (`weight_scale_inv`, despite the name; DeepSeek-V3's
inference/fp8_cast_bf16.py), per row, or one of the whole matrix (`weight_scale`;
compressed-tensors, ModelOpt). Norms, router, embedding and LM head are stored plain, and often the
MTP layer: each tensor's own dtype says which. Linears and experts keep the e4m3 values
(`Fp8Weight`); everything else is dequantized while it is loaded.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from forerun.core.errors import ConfigError
from forerun.kernels.gemm.quantized import Fp8Weight, QuantizedWeight
from forerun.layers.experts_fp8 import fp8_experts_serve, pack_fp8_experts
from forerun.layers.gemm import Gemm
from forerun.layers.gemm_quantized import Fp8Gemm
from forerun.layers.moe import Experts
from forerun.layers.quantize_method import PackedExperts
from forerun.layers.sharding import Shard
from forerun.models.formats.base import (
    COLUMNS,
    Headers,
    Spec,
    Stored,
    View,
    WeightFormat,
    compressed_weights,
    shapes_in_files,
)

SCALE_NAMES = ("_scale_inv", "_scale")  # appended to the name of the tensor that is scaled
E4M3 = "F8_E4M3"  # as safetensors names it


class Fp8Format(WeightFormat):
    """e4m3 tensors [..., N, K] and their scales."""

    group: int | None  # columns that share a scale; None: all
    # Scales of activations, which are not quantized or get scales of their own.
    unused = (".input_scale", ".activation_scale", ".output_scale")
    keeps_dummy = False  # `quantization` fp8 asks for it

    @classmethod
    def from_config(cls, spec: Spec) -> WeightFormat | None:
        method, weights = spec.get("quant_method"), compressed_weights(spec)
        if method == "fp8" and spec.get("fmt", "e4m3") == "e4m3":
            return _of_blocks(spec.get("weight_block_size"))
        if method == "fbgemm_fp8" or (method == "modelopt" and spec.get("quant_algo") == "FP8"):
            return Fp8Rows()
        if weights.get("type") == "float" and weights.get("num_bits") == 8:
            return _of_blocks(weights.get("block_structure"))
        return None

    @abstractmethod
    def scale_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Those that the scales of a tensor of this shape may have, the usual one first."""

    @abstractmethod
    def row_scales(self, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Stored scales -> [..., N, G] float32, of every row."""

    def reads(self, name: str, headers: Headers) -> bool:
        return name in headers and headers[name].dtype == E4M3

    def stored(
        self, name: str, view: View, shard: Shard | None, headers: Headers
    ) -> dict[str, Stored]:
        """Scales are read whole: a part of a row may share one with another."""
        shape, names = headers[name].shape, [name + ending for ending in SCALE_NAMES]
        if shard is not None:
            self.shard_of_scales(shard, len(shape))  # refuses what cannot be divided
        scale = next((each for each in names if each in headers), names[0])
        shapes = self.scale_shapes(shape)
        known = scale in headers and headers[scale].shape in shapes
        shapes = [headers[scale].shape] if known else shapes[:1]
        whole = shapes_in_files(tuple(view.shape), shard)
        values = Stored(name, whole, None, shard)
        return {"values": values, "scales": Stored(scale, shapes, floats=True)}

    def decode(self, tensors: Mapping[str, Tensor], shard: Shard | None) -> Fp8Weight:
        weight, shape = tensors["values"], tuple(tensors["values"].shape)
        whole = shape if shard is None else shard.shape_of_whole(shape)
        scales = self.row_scales(tensors["scales"], whole)
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

    def empty_linear(self, n: int, k: int, device: torch.device) -> Fp8Weight:
        return Fp8Weight.empty(n, k, device, self.group)

    def gemm(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Gemm | None:
        assert isinstance(weight, Fp8Weight)
        serves = weight.device.type == "cuda" and dtype == torch.bfloat16
        return Fp8Gemm(weight, bias) if serves else None

    def empty_experts(self, experts: Experts) -> tuple[Fp8Weight, Fp8Weight] | None:
        """The kernels have SiLU and no biases; a shared expert needs groups of its own."""
        whole = self.group is None or experts.width % self.group == 0
        if experts.activation is not None or not (experts.num_shared <= 1 or whole):
            return None
        w13, w2 = (
            Fp8Weight.stack(tuple(weight.shape), experts.device, self.group)
            for weight in (experts.w13, experts.w2)
        )
        return w13, w2

    def pack_experts(
        self, w13: QuantizedWeight, w2: QuantizedWeight, num_experts: int, dtype: torch.dtype
    ) -> PackedExperts | None:
        assert isinstance(w13, Fp8Weight) and isinstance(w2, Fp8Weight)
        if not fp8_experts_serve(w13, w2, dtype):
            return None
        return pack_fp8_experts(w13, w2, num_experts)


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


def _of_blocks(block: Any) -> Fp8Blocks | Fp8Rows:
    if block is None:
        return Fp8Rows()
    pair = isinstance(block, list) and len(block) == 2
    if not pair or not all(isinstance(size, int) and size > 0 for size in block):
        raise ConfigError(f"weight_block_size {block} is not two positive integers; correct it.")
    return Fp8Blocks(*block)
