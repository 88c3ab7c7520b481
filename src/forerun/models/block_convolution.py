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

from forerun.kernels.drafting.convolution import convolve_rows
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
        self._shape = 2, taps, groups
        self._base = place.empty(2, taps, hidden_size)
        self._projection = place.empty(2 * taps * groups, hidden_size)

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        return {
            f"{prefix}base_kernel": self._base,
            f"{prefix}kernel_projection.weight": self._projection,
        }

    def dynamic(self, x: Tensor) -> Tensor:
        """d of the rows' inputs x [B, R, H]: [B, R, 2, K, n]."""
        out: Tensor = F.linear(x, self._projection).unflatten(-1, self._shape)
        return out

    def convolve(self, x: Tensor, dynamic: Tensor, side: int) -> Tensor:
        """x [B, R, H] and `dynamic` of the sublayer's input -> [B, R, H] in x's dtype."""
        return convolve_rows(x, self._base[side], dynamic[:, :, side])
