"""The weights and K/V that one decode step reads, and its operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from forerun.attention.base import LayerMask
from forerun.kvcache.layouts import ModelLayout, RecurrentState


@dataclass(frozen=True)
class Gemm:
    """x [tokens, k] times a weight [n, k], or times the experts' weights of that shape."""

    n: int
    k: int
    dtype: torch.dtype
    tokens: int  # of all experts together: k per token
    matrices: float = 1.0  # weights that are read: the expected number of touched experts
    scale_bytes: int = 0  # of a quantized weight
    bits: float | None = None  # per value of a packed weight, with its scales; None: those of dtype

    @property
    def weight_bytes(self) -> int:
        bits = 8 * self.dtype.itemsize if self.bits is None else self.bits
        return round(self.matrices * self.n * self.k * bits / 8) + self.scale_bytes

    def per_matrix(self) -> list[Gemm]:
        """One GEMM per touched expert, equally many tokens in each."""
        count = round(self.matrices)
        return [replace(self, tokens=-(-self.tokens // count), matrices=1.0)] * count

    @property
    def flops(self) -> int:
        return 2 * self.n * self.k * self.tokens


def touched_experts(tokens: int, top_k: int, num_experts: int) -> float:
    """The expected number of different experts if every set of `top_k` is equally likely."""
    return float(num_experts * (1 - (1 - top_k / num_experts) ** tokens))


@dataclass(frozen=True)
class Work:
    """What one decode step of a batch reads and computes."""

    gemms: tuple[Gemm, ...]
    kv_bytes: int

    @property
    def weight_bytes(self) -> int:
        return sum(gemm.weight_bytes for gemm in self.gemms)

    @property
    def flops(self) -> int:
        return sum(gemm.flops for gemm in self.gemms)


def kv_bytes(layout: ModelLayout, masks: Sequence[LayerMask], context: int) -> int:
    """K/V that one request reads, all layers; a window hides what lies before it. A recurrent
    state is read and written.
    """
    total = 0
    for i, (layer, mask) in enumerate(zip(layout.layers, masks, strict=True)):
        if isinstance(layer, RecurrentState):
            total += 2 * layer.state_bytes
        else:
            tokens = context if mask.window is None else min(context, mask.window)
            total += tokens * layout.paged_layer(i).token_bytes
    return total
