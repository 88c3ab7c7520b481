"""Grouped dynamic convolutions over the rows of a block, around a sublayer (DFlash2).

    out[i, c] = Σ_{t < K, t <= i} (base[side, t, c] + d[i, side, t, group of c]) · in[i - t, c]

`i` counts rows of a block, row 0 is the anchor: taps reach neither another block nor the context.
`d` comes from the sublayer's input, before the convolution, for both sides: side 0 convolves the
input, side 1 the output. Sums are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from forerun.layers.communication import WeightPlacement
from forerun.layers.module import Module


@dataclass(frozen=True)
class ConvolutionConfig:
    """`kernel_size` K taps; channels in groups of `group_size` share d."""

    kernel_size: int
    group_size: int


class BlockConvolution(Module):
    """One sublayer's. Weights: `base_kernel` [2, K, H], `kernel_projection.weight` [2 · K · n, H],
    whole on every rank.
    """

    def __init__(self, config: ConvolutionConfig, hidden_size: int, place: WeightPlacement) -> None:
        taps, groups = config.kernel_size, hidden_size // config.group_size
        self._shape, self._group_size = (2, taps, groups), config.group_size
        self._base = place.empty(2, taps, hidden_size)
        self._projection = place.empty(2 * taps * groups, hidden_size)

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        return {
            f"{prefix}base_kernel": self._base,
            f"{prefix}kernel_projection.weight": self._projection,
        }

    def kernels(self, x: Tensor) -> Tensor:
        """What the rows' inputs x [B, R, H] make of the base kernel: [B, R, 2, K, H] float32."""
        dynamic = F.linear(x, self._projection).float().unflatten(-1, self._shape)
        kernels: Tensor = dynamic.repeat_interleave(self._group_size, -1)
        return self._base.float() + kernels

    @staticmethod
    def convolve(x: Tensor, kernels: Tensor) -> Tensor:
        """x [B, R, H], kernels [B, R, K, H] of one side -> [B, R, H] in x's dtype."""
        rows, values = x.shape[1], x.float()
        out = kernels[:, :, 0] * values
        for tap in range(1, min(kernels.shape[2], rows)):
            out[:, tap:] += kernels[:, tap:, tap] * values[:, : rows - tap]
        return out.to(x.dtype)
