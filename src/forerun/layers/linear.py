"""Linear layers for inference: plain tensors, no autograd, weights packed where that is faster.

Several projections of the same input live in one fused matrix; a loader fills it slice by slice
through views of `weight`, then `pack` puts it into the form that the device likes best.

On a CPU in float32, the library behind `F.linear` is slow for the few rows of a decode step; oneDNN
with weights reordered once is faster at every row count. Measured on 2 AVX2 cores, all matrices of
an 8M-parameter model, 1 / 16 / 80 rows: `F.linear` 2.9 / 9.1 / 15.0 ms, packed 2.5 / 4.9 / 12.0 ms.
There a packed product also gives a row the same bits whatever rows stand beside it (`F.linear` does
not), so a verify pass of many rows computes what single decode steps would.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows for which oneDNN is asked to lay a weight out. Hints of 32 and more serve 1 to 256 rows
# alike; hints of 1 to 16 make some other row count up to three times slower.
PACK_ROWS = 32

# A weight that must also stay plain (a tied embedding) is packed up to this size only: beyond it
# the second copy costs more memory than the faster product is worth.
MAX_PACKED_COPY = 256 << 20  # bytes


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can hold this weight: float32 on a CPU, in a build that has it."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
    )


class _Packed:
    """A weight in oneDNN's own layout, and the two products with it."""

    def __init__(self, weight: Tensor) -> None:
        ops: Any = torch.ops.mkldnn
        self.weight: Tensor = ops._reorder_linear_weight(weight, PACK_ROWS)
        self.product = ops._linear_pointwise.default
        self.product_add = ops._linear_pointwise.binary


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

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Over an existing matrix [out, in], which it shares until packed."""
        linear = cls.__new__(cls)
        linear.weight, linear.bias, linear._packed = weight, bias, None
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
            self._packed = _Packed(weight)
            self.weight = weight.new_empty(0, weight.shape[1])

    @property
    def fuses_add(self) -> bool:
        """Whether `add` costs no more than the product alone."""
        return self._packed is not None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        packed = self._packed
        if packed is None:
            return F.linear(x, self.weight, self.bias)
        y: Tensor = packed.product(x, packed.weight, self.bias, "none", [], "")
        return y

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """x [T, in], residual [T, out] -> residual + x Wᵀ + b, a new tensor."""
        packed = self._packed
        if packed is None:
            return residual + F.linear(x, self.weight, self.bias)
        y: Tensor = packed.product_add(x, residual, packed.weight, self.bias, "add")
        return y
