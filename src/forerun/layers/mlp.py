"""The gated feed-forward layer: down(silu(gate(x)) · up(x))."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.config.model_config import ModelConfig
from forerun.kernels.gemm.gemm import DeferredNorm
from forerun.layers.linear import Linear


class MLP:
    """Gate and up in one matrix [2I, H]; `down` is left to the caller, who fuses the residual."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.hidden, self.inner = hidden, inner
        self.gate_up = Linear(hidden, 2 * inner, dtype, device, bias)
        self.down = Linear(inner, hidden, dtype, device, bias)

    def weights(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint name -> the view it is copied into."""
        gate_up = {f"{prefix}gate_proj": self.inner, f"{prefix}up_proj": self.inner}
        down = {f"{prefix}down_proj": self.hidden}
        return self.gate_up.slots(gate_up) | self.down.slots(down)

    def prepare(self) -> None:
        self.gate_up.pack()
        self.down.pack()

    def __call__(self, x: Tensor | DeferredNorm) -> Tensor:
        """x [T, H] -> the activation [T, I], before `down`."""
        return self.gate_up.silu_mul(x)
