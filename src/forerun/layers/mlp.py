"""The gated MLP of Llama-shaped models: down(act(gate(x)) · up(x))."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from forerun.kernels.gemm.gemm import DeferredNorm
from forerun.layers.communication import WeightPlacement
from forerun.layers.linear import MergedLinear, PendingGemm, RowLinear, silu_and_mul
from forerun.layers.module import Module


class GatedMLP(Module):
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        place: WeightPlacement,
        act_and_mul: Callable[[PendingGemm], Tensor] = silu_and_mul,
    ) -> None:
        """`act_and_mul`: [gate | up] -> act(gate) · up."""
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedLinear(hidden_size, parts, bias, place)
        self.down_proj = RowLinear(intermediate_size, hidden_size, bias, place)
        self._act_and_mul = act_and_mul

    def __call__(self, x: Tensor | DeferredNorm) -> PendingGemm:
        """x [T, H] -> [T, H]."""
        return self.down_proj(self._act_and_mul(self.gate_up_proj(x)))
