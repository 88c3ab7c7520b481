"""Weights of experts in e4m3, as the kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.elementwise.quantize_fp8 import GROUP, deinterleave, interleave
from forerun.kernels.gemm.quantized import Fp8Weight


@dataclass(frozen=True, eq=False)
class Fp8Matrices:
    """A matrix [N, K] per expert: w = value · scale."""

    values: Tensor  # [E, N, K] float8_e4m3fn
    scales: Tensor  # [E, G, N] float32: of rows (G = 1), or of rows and `GROUP` columns
    interleaved: bool  # columns are reordered by `interleave`, for `experts_sm90.cu`
    blocks: bool  # scales are those of blocks of `GROUP` rows and columns

    @staticmethod
    def fits(weight: Fp8Weight) -> bool:
        """Whether the kernels read it."""
        *_, n, k = weight.shape
        return n % GROUP == 0 and k % GROUP == 0 and weight.group in (GROUP, k)

    @classmethod
    def pack(cls, weight: Fp8Weight, interleaved: bool = False) -> Fp8Matrices:
        """Packs [E, N, K]; overwrites the weight's values if `interleaved`."""
        if interleaved:
            for matrix in weight.values:
                matrix.copy_(interleave(matrix))
        scales = weight.scales.transpose(1, 2).contiguous()
        of_blocks = scales.unflatten(2, (-1, GROUP))
        blocks = scales.shape[1] > 1 and bool((of_blocks == of_blocks[..., :1]).all())
        return cls(weight.values, scales, interleaved, blocks)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)."""
        experts, n, k = self.values.shape
        return experts, n, k

    @property
    def bits(self) -> float:
        """Bits per value, with scales."""
        return 8 + 32 * self.scales.shape[1] / self.values.shape[2]

    @property
    def grouped(self) -> bool:
        return self.scales.shape[1] > 1

    @property
    def scale_kind(self) -> int:
        """0: of rows, 1: of rows and `GROUP` columns, 2: of blocks."""
        return self.grouped + self.blocks

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[E, N, K]."""
        values = self.values
        if self.interleaved:
            values = deinterleave(values.flatten(0, 1)).view(values.shape)
        columns = values.shape[2] // self.scales.shape[1]
        return Fp8Weight(values, self.scales.transpose(1, 2), columns).dequantize().to(dtype)
