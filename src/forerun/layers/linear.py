"""Linear layers for inference: plain tensors, no autograd, weights packed where that is faster.

Several projections of the same input live in one fused matrix; a loader fills it slice by slice
through views of `weight`, then `pack` puts it into the form that the device likes best.

On a CPU in float32, the library behind `F.linear` is slow for the few rows of a decode step; oneDNN
with weights reordered once is faster at every row count. Measured on 2 AVX2 cores, all matrices of
an 8M-parameter model, 1 / 16 / 80 rows: `F.linear` 2.9 / 9.1 / 15.0 ms, packed 2.5 / 4.9 / 12.0 ms.

On a GPU in bfloat16, GEMM dispatch (`kernels/gemm/dispatch.py`) sends few tokens to the kernels of
`kernels.gemm`, with a fused epilogue, and SiLU · up of many tokens too; the rest goes to cuBLAS.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.elementwise.silu_mul import silu_mul
from forerun.kernels.gemm.config import GemmConfig, uses_split_k
from forerun.kernels.gemm.dispatch import choose_gemm, choose_gemm_silu_mul
from forerun.kernels.gemm.gemm import (
    DeferredNorm,
    GemmWeight,
    gemm,
    gemm_add,
    gemm_add_deferred_norm,
    gemm_argmax,
    gemm_partials,
    gemm_silu_mul,
)
from forerun.kernels.runtime.gpu import gpu_of
from forerun.kernels.sampling.argmax import argmax

# Rows for which oneDNN is asked to lay a weight out. Hints of 32 and more serve 1 to 256 rows
# alike; hints of 1 to 16 make some other row count up to three times slower.
PACK_ROWS = 32

# A weight that must also stay plain (a tied embedding) is packed up to this size only: beyond it
# the second copy costs more memory than the faster product is worth.
MAX_PACKED_COPY = 256 << 20  # bytes


# Matrices up to this size are also kept transposed: one row times that is 1.3 times faster than
# oneDNN (3.2 against 4.2 ms for all matrices of an 8M-parameter model), and plain decoding is that.
MAX_COLUMNS = 8 << 20  # bytes


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can hold this weight: float32 on a CPU, in a build that has it."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
    )


def can_stream(weight: Tensor) -> bool:
    """Whether the kernels for few rows take this weight: bfloat16 on a GPU."""
    return weight.is_cuda and weight.dtype == torch.bfloat16 and weight.shape[1] % 8 == 0


class _Packed:
    """A weight in oneDNN's own layout and, if it is small, transposed for single rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        ops: Any = torch.ops.mkldnn
        self.weight: Tensor = ops._reorder_linear_weight(weight, PACK_ROWS)
        self.bias = bias
        small = bias is None and weight.numel() * weight.element_size() <= MAX_COLUMNS
        self.columns = weight.t().contiguous() if small else None  # [in, out]
        self._product = ops._linear_pointwise.default
        self._product_add = ops._linear_pointwise.binary

    def product(self, x: Tensor) -> Tensor:
        if self.columns is not None and x.shape[0] == 1:
            return torch.mm(x, self.columns)
        y: Tensor = self._product(x, self.weight, self.bias, "none", [], "")
        return y

    def product_add(self, x: Tensor, residual: Tensor) -> Tensor:
        if self.columns is not None and x.shape[0] == 1:
            return torch.addmm(residual, x, self.columns)
        y: Tensor = self._product_add(x, residual, self.weight, self.bias, "add")
        return y


class Linear:
    """y = x Wᵀ + b with `weight` [out, in] and `bias` [out] or None.

    `weight` is uninitialised until a loader fills it, and empty once it is packed away.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        device: torch.device,
        bias: bool = False,
    ) -> None:
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self._packed: _Packed | None = None
        self._gemm_weight: GemmWeight | None = None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Over an existing matrix [out, in], which it shares until packed."""
        linear = cls.__new__(cls)
        linear.weight, linear.bias, linear._packed, linear._gemm_weight = weight, bias, None, None
        return linear

    def slots(self, parts: Mapping[str, int]) -> dict[str, Tensor]:
        """Checkpoint name -> view, for named parts (name -> rows) that follow one another."""
        out: dict[str, Tensor] = {}
        for suffix, tensor in (("weight", self.weight), ("bias", self.bias)):
            if tensor is not None:
                views = tensor.split_with_sizes(list(parts.values()))
                out |= {f"{name}.{suffix}": view for name, view in zip(parts, views, strict=True)}
        return out

    def pack(self, shared: bool = False) -> None:
        """Packs the weight where that is faster and drops the plain one.

        `shared`: somebody else keeps the plain matrix, so packing makes a second copy; large ones
        (`MAX_PACKED_COPY`) stay as they are.
        """
        weight = self.weight
        too_large = shared and weight.numel() * weight.element_size() > MAX_PACKED_COPY
        if self._packed is None and can_pack(weight) and not too_large:
            self._packed = _Packed(weight, self.bias)
            self.weight = weight.new_empty(0, weight.shape[1])
        if self._gemm_weight is None and can_stream(weight):
            self._gemm_weight = GemmWeight.from_tensor(weight, self.bias)

    def _kernel(
        self, x: Tensor | DeferredNorm, silu: bool = False
    ) -> tuple[GemmWeight, GemmConfig] | None:
        """Our kernel's operand and configuration, if it serves so many rows."""
        matrix = self._gemm_weight
        if matrix is None:
            return None
        n, k = matrix.weight.shape
        config = (choose_gemm_silu_mul if silu else choose_gemm)(
            n, k, _rows(x), gpu_of(matrix.weight.device)
        )
        return None if config is None else (matrix, config)

    def accepts_deferred_norm(self, x: Tensor) -> bool:
        """Whether a product with as many rows as `x` has can finish an RMSNorm (`DeferredNorm`)."""
        return self._kernel(x) is not None

    def can_defer_norm(self, x: Tensor) -> bool:
        """Whether `add_deferred_norm` is the fastest way to add and norm."""
        ours = self._kernel(x)
        return ours is not None and not uses_split_k(ours[1])

    @property
    def fuses_add(self) -> bool:
        """Whether `add` costs no more than the product alone."""
        return self._packed is not None

    def __call__(self, x: Tensor | DeferredNorm) -> Tensor:
        """x [T, in] -> [T, out]."""
        ours, packed = self._kernel(x), self._packed
        if ours is not None:
            return gemm(x, *ours)
        x = _whole(x)
        if packed is not None:
            return packed.product(x)
        return F.linear(x, self.weight, self.bias)

    def split_k_partials(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out], or float32 partial sums of it [S, T, out] where that is faster."""
        ours = self._kernel(x)
        if ours is not None and uses_split_k(ours[1]) and self.bias is None:
            return gemm_partials(x, *ours)
        return self(x)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """x [T, in], residual [T, out] -> residual + x Wᵀ + b, a new tensor."""
        ours, packed = self._kernel(x), self._packed
        if ours is not None:
            return gemm_add(x, ours[0], residual, ours[1])
        if packed is None:
            return residual + F.linear(x, self.weight, self.bias)
        return packed.product_add(x, residual)

    def add_deferred_norm(
        self, x: Tensor, residual: Tensor, norm: Tensor, eps: float
    ) -> tuple[DeferredNorm, Tensor]:
        """`add`, and its RMSNorm but for the last step. Only where `accepts_deferred_norm`."""
        ours = self._kernel(x)
        assert ours is not None
        return gemm_add_deferred_norm(x, ours[0], residual, norm, eps, ours[1])

    def silu_mul(self, x: Tensor | DeferredNorm) -> Tensor:
        """[gate | up] = x Wᵀ + b -> silu(gate) · up, [T, out / 2]."""
        ours = self._kernel(x, silu=True)
        if ours is not None:
            return gemm_silu_mul(x, *ours)
        gate_up = self(x)
        return silu_mul(gate_up, gate_up.dtype)

    def argmax(self, x: Tensor) -> Tensor:
        """[T] int64: the id of each row's largest output, the lowest of equals."""
        ours = self._kernel(x)
        return argmax(self(x)) if ours is None else gemm_argmax(x, *ours)


def _rows(x: Tensor | DeferredNorm) -> int:
    return (x.x if isinstance(x, DeferredNorm) else x).shape[0]


def _whole(x: Tensor | DeferredNorm) -> Tensor:
    assert isinstance(x, Tensor), "only where `accepts_deferred_norm`"
    return x
