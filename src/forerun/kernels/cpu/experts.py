"""The experts of a mixture on a CPU: y = Σ_j weight_j · down(act(gate(x), up(x))).

Rows of the tokens that chose an expert are multiplied together, as `gemm.py` does; a token's
outputs are weighted and added in the order of its choices, in float32. So a token's result depends
neither on the other tokens nor on the number of threads.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from enum import Enum

import torch
from torch import Tensor

from forerun.kernels.cpu.gemm import PackedWeights
from forerun.kernels.cpu.library import call


class Activation(Enum):
    """What is computed of gate and up; the values are those of `Activation` in gemm.cpp."""

    SILU = 0  # silu(gate) · up
    GELU_TANH = 1  # gelu(gate) · up, in GELU's tanh form
    CLAMPED = 2  # (up + 1) · gate · sigmoid(alpha · gate), gate <= limit, |up| <= limit


class _Experts(ctypes.Structure):
    """`Experts` in gemm.cpp."""

    _fields_ = (
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("x", c_void_p),
        ("experts", c_void_p),
        ("weights", c_void_p),
        ("out", c_void_p),
        ("tokens", c_int64),
        ("choices", c_int64),
        ("num_experts", c_int64),
        ("activation", c_int32),
        ("alpha", c_float),
        ("limit", c_float),
        ("bfloat16_tokens", c_int32),
    )


class PackedExperts:
    """E experts: packed matrices [2I, H] and [H, I] of each, and their activation."""

    def __init__(
        self,
        gate_up: PackedWeights,
        down: PackedWeights,
        activation: Activation = Activation.SILU,
        alpha: float = 0.0,
        limit: float = 0.0,
    ) -> None:
        """`alpha`, `limit`: of `Activation.CLAMPED`."""
        self.gate_up, self.down = gate_up, down
        self.activation, self.alpha, self.limit = activation, alpha, limit

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """The sum of every token's choices.

        Args:
            x: [T, H], of the dtype that was packed.
            experts: [T, k] int32; ids from E on add nothing.
            weights: [T, k] float32.

        Returns:
            [T, H] float32.
        """
        x, experts, weights = x.contiguous(), experts.contiguous(), weights.contiguous()
        out = torch.empty(x.shape, dtype=torch.float32)
        arguments = _Experts(
            self.gate_up.address, self.down.address,
            x.data_ptr(), experts.data_ptr(), weights.data_ptr(), out.data_ptr(),
            *experts.shape, len(self.down), self.activation.value, self.alpha, self.limit,
            x.dtype == torch.bfloat16,
        )  # fmt: skip
        keep = arguments, x, experts, weights
        call("forerun_experts", ctypes.addressof(arguments), keep=keep)
        return out
