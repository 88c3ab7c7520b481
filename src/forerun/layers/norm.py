"""RMSNorm: x / sqrt(mean(x²) + eps) · w, with statistics in float32 (arXiv 1910.07467)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.communication import all_reduce_sm90
from forerun.kernels.communication.all_reduce_sm90 import all_reduce_add_rms_norm
from forerun.kernels.cpu import library as cpu_library
from forerun.kernels.cpu import norm as cpu
from forerun.kernels.elementwise.rms_norm import add_rms_norm, rms_norm, sum_split_k_ref
from forerun.layers.communication import Communicator, WeightPlacement
from forerun.layers.module import Module


class RMSNorm(Module):
    """Norms the last dimension, of size `size`. `weight` [size] is uninitialised until loaded."""

    def __init__(self, size: int, eps: float, place: WeightPlacement) -> None:
        self.weight = place.empty(size)
        self.eps = eps
        self._fixed_order = place.fixed_order
        self._cpu_kernels = False
        self._scaled_weight: Tensor | None = None
        self._floor = torch.empty(0)

    @classmethod
    def of(cls, weight: Tensor, eps: float) -> RMSNorm:
        """Makes one of a weight [..., size], prepared; leading dimensions broadcast (heads)."""
        norm = cls(0, eps, WeightPlacement(weight.dtype, weight.device))
        norm.weight = weight
        norm.prepare()
        return norm

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        return {f"{prefix}weight": self.weight}

    def scale(self, factor: float) -> None:
        """Multiplies its output by a power of two; before `prepare`."""
        self.weight.mul_(factor)

    def prepare(self) -> None:
        """Chooses our kernels on a CPU; without them, in float32, the form of fewest operations.

        With n = |x|: x / sqrt(n²/D + eps) = sqrt(D) · x / hypot(n, sqrt(D · eps)), and sqrt(D)
        goes into the weight. Four operations instead of seven; half the time for one token.
        """
        self._cpu_kernels = self.weight.dim() == 1 and cpu_library.serves(
            self.weight.dtype, self.weight.device
        )
        if self._cpu_kernels:
            return
        if self.weight.device.type == "cpu" and self.weight.dtype == torch.float32:
            size = self.weight.shape[-1]
            self._scaled_weight = self.weight * math.sqrt(size)
            self._floor = torch.tensor(math.sqrt(size * self.eps))

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape and dtype."""
        if self._cpu_kernels:
            return cpu.rms_norm(x, self.weight, self.eps)
        scaled_weight = self._scaled_weight
        if scaled_weight is not None:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return (x / torch.hypot(length, self._floor)).mul_(scaled_weight)
        weight = self.weight
        if weight.dim() == 1:
            return rms_norm(x, weight, self.eps, as_partials=self._fixed_order)
        normed = F.rms_norm(x.to(weight.dtype), weight.shape[-1:], None, self.eps)
        return (normed * weight).to(x.dtype)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual).

        Args:
            x: [T, size], or partials of it [S, T, size].
            residual: [T, size]; left as it is.
        """
        if self._cpu_kernels:
            x = sum_split_k_ref(x, residual.dtype)
            return cpu.add_rms_norm(x, residual, self.weight, self.eps)
        if self._scaled_weight is None:
            return add_rms_norm(x, residual, self.weight, self.eps)
        residual = residual + sum_split_k_ref(x, residual.dtype)
        return self(residual), residual

    def add_across(self, x: Tensor, residual: Tensor, comm: Communicator) -> tuple[Tensor, Tensor]:
        """`add` of the sum over all ranks of x."""
        peers = comm.peers
        if peers is not None and self.fuses_sum(x, residual):
            return all_reduce_add_rms_norm(x, residual, self.weight, self.eps, peers)
        return self.add(comm.all_reduce(sum_split_k_ref(x, residual.dtype)), residual)

    def fuses_sum(self, x: Tensor, residual: Tensor) -> bool:
        """Whether one kernel does what `add_across` does, where ranks have `peers`.

        It adds up squares in an order of its own, so not in a fixed order.
        """
        if self._fixed_order:
            return False
        plain = type(self) is RMSNorm and self.weight.dtype == residual.dtype == torch.bfloat16
        return plain and residual.is_contiguous() and all_reduce_sm90.fits(x)


class UnitOffsetRMSNorm(RMSNorm):
    """Gemma's: checkpoints have w - 1. The factor is float32, as in transformers."""

    _factor = 1.0

    def scale(self, factor: float) -> None:
        self._factor = factor  # exact, where w - 1 of the product is not

    def prepare(self) -> None:
        full_precision = self.weight.dtype == torch.float32
        self.weight = (1 + self.weight.float()) * self._factor
        if full_precision:
            super().prepare()
