"""MXFP4 experts (gpt-oss): 4-bit codes, of which 32 neighbours share a power of two.

A tensor `x` [E, K, N] of a model is `x_blocks` [E, N, K / 32, 16] and `x_scales` [E, N, K / 32],
both uint8 (OCP Microscaling Formats, version 1.0). On a GPU the kernels read that, elsewhere it is
dequantized while it is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from forerun.kernels.gemm.quantized import QuantizedWeight
from forerun.kernels.moe.experts import ClampedSwiglu, ExpertActivation
from forerun.kernels.moe.experts_mxfp4 import (
    BLOCK_K,
    RUN,
    Mxfp4Matrices,
    Mxfp4Weight,
    describe_mxfp4,
    expert_partials_mxfp4,
)
from forerun.kernels.runtime.gpu import have_triton
from forerun.layers.moe import Experts
from forerun.layers.quantize_method import PackedExperts
from forerun.layers.sharding import Shard
from forerun.models.formats.base import (
    COLUMNS,
    WHOLE,
    Headers,
    Part,
    Spec,
    Stored,
    View,
    WeightFormat,
)

BLOCKS, SCALES = "_blocks", "_scales"  # appended to the name of the tensor


class Mxfp4(WeightFormat):
    """Tensors [E, K, N], of which the runs are along K."""

    @classmethod
    def from_config(cls, spec: Spec) -> Mxfp4 | None:
        return cls() if spec.get("quant_method") == "mxfp4" else None

    def reads(self, name: str, headers: Headers) -> bool:
        return name + BLOCKS in headers

    def stored(
        self, name: str, view: View, shard: Shard | None, headers: Headers
    ) -> dict[str, Stored]:
        experts, *dims = view.shape
        if isinstance(view, QuantizedWeight):  # [E, ..., K]
            dims = [dims[-1], *dims[:-1]]
        shape: tuple[int, ...] = experts, dims[0], math.prod(dims[1:])
        experts, k, n = shape if shard is None else shard.shape_of_whole(shape)
        rows, part = (experts, n, k // RUN), None if shard is None else shard_of_rows(shard)
        shapes = {BLOCKS: (*rows, RUN // 2), SCALES: rows}
        return {end: Stored(name + end, [shapes[end]], False, part) for end in shapes}

    def decode(self, tensors: Mapping[str, Tensor], shard: Shard | None) -> Mxfp4Weight:
        return Mxfp4Weight.of(tensors[BLOCKS], tensors[SCALES])

    def load(self, view: View, tensors: Mapping[str, Tensor], part: Part = WHOLE) -> None:
        """A plain view [E, K, ...] is filled expert by expert, which takes less memory."""
        if isinstance(view, QuantizedWeight):
            return super().load(view, tensors, part)
        stacked = self.decode(tensors, part.shard)
        for i, expert in enumerate(view):
            rows = stacked.map(itemgetter(i)).dequantize()  # [N, K]
            expert.copy_(rows.T.reshape(expert.shape))

    def empty_experts(self, experts: Experts) -> tuple[Mxfp4Weight, Mxfp4Weight] | None:
        (_, hidden, width), device = experts.w2.shape, experts.device
        fits = hidden % BLOCK_K == 0 and width % BLOCK_K == 0
        runs = device.type == "meta" or have_triton(device.type)
        if not fits or not runs or not isinstance(experts.activation, ClampedSwiglu):
            return None
        w13, w2 = (
            Mxfp4Weight.empty(tuple(weight.shape), device) for weight in (experts.w13, experts.w2)
        )
        return w13, w2

    def pack_experts(
        self, w13: QuantizedWeight, w2: QuantizedWeight, num_experts: int, dtype: torch.dtype
    ) -> PackedExperts:
        assert isinstance(w13, Mxfp4Weight) and isinstance(w2, Mxfp4Weight)
        packed = Mxfp4Matrices.pack(w13), Mxfp4Matrices.pack(w2)

        def partials(x: Tensor, routed: Any, shared: Any, activation: ExpertActivation) -> Tensor:
            assert isinstance(activation, ClampedSwiglu) and shared is None
            return expert_partials_mxfp4(x, *packed, routed, activation)

        return PackedExperts(describe_mxfp4(packed[1], dtype), partials)


def shard_of_rows(shard: Shard) -> Shard:
    """The part of [E, N, K / 32, ...] that is this one of [E, K, N].

    Raises:
        ConfigError: columns that share a scale are on two ranks.
    """
    if shard.dim == 0:
        return shard
    return shard.along(1) if shard.dim == 2 else shard.along(2).in_groups(RUN, COLUMNS)
