"""The gated MLP of Llama-shaped models: down(silu(gate(x)) · up(x))."""

from __future__ import annotations

from torch import Tensor

from forerun.kernels.gemm.gemm import DeferredNorm
from forerun.layers.communication import WeightPlacement
from forerun.layers.linear import MergedLinear, PendingGemm, RowLinear, silu_and_mul
from forerun.layers.module import Module


class GatedMLP(Module):
    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool, place: WeightPlacement
    ) -> None:
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedLinear(hidden_size, parts, bias, place)
        self.down_proj = RowLinear(intermediate_size, hidden_size, bias, place)

    def __call__(self, x: Tensor | DeferredNorm) -> PendingGemm:
        """x [T, H] -> [T, H]."""
        return self.down_proj(silu_and_mul(self.gate_up_proj(x)))
