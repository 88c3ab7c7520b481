"""How checkpoints store weights of 4-bit integers: AWQ, GPTQ, compressed-tensors.

A matrix [N, K] has integers q from 0 to 15; groups of columns of a row share a scale and a zero
point: W = (q - zero) * scale. The formats differ in how eight integers are packed into an int32,
and along which dimension. They are read into one (`Int4Weight`).

    AWQ (AutoAWQ, version "gemm")    qweight [K, N / 8], in the order 0 2 4 6 1 3 5 7; qzeros
                                     [K / g, N / 8] likewise; scales [K / g, N]
    GPTQ (AutoGPTQ, GPTQModel)       qweight [K / 8, N]; qzeros [K / g, N / 8], less one unless
                                     checkpoint_format is "gptq_v2"; scales [K / g, N]; g_idx [K]:
                                     every column's group (with desc_act in any order)
    compressed-tensors, "pack-quantized"
                                     weight_packed [N, K / 8]; weight_scale [N, K / g];
                                     weight_zero_point [N / 8, K / g] unless symmetric; weight_g_idx
                                     with actorder "group"; weight_shape, not read
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from forerun.core.errors import ConfigError
from forerun.kernels.cpu import gemm as cpu
from forerun.kernels.cpu import library
from forerun.kernels.gemm.grouped import GROUP_COLUMNS
from forerun.kernels.gemm.int4 import GROUP, Int4Weight
from forerun.kernels.gemm.quantized import QuantizedWeight
from forerun.layers.gemm import INT8, CpuGemm, Gemm
from forerun.layers.gemm_quantized import Int4Gemm
from forerun.layers.sharding import Shard
from forerun.models.formats.base import (
    WHOLE,
    Headers,
    Part,
    Spec,
    Stored,
    View,
    WeightFormat,
    compressed_weights,
    fill,
    matrix_shapes,
)

ROWS, COLUMNS = 0, 1  # dimensions of a matrix
ROWS_AT_ONCE = 256  # that are decoded, so that little memory is needed
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # bits 4 i have the integer of this column of eight


@dataclass(frozen=True)
class Axis:
    """A dimension of a stored tensor, which is one of the matrix."""

    dim: int
    size: int | None = 1  # rows or columns that have one entry; None: all of them
    shared: bool = False  # any row or column may read any entry

    def entries(self, count: int) -> int:
        """The number of entries that `count` rows or columns have."""
        return 1 if self.size is None else count // self.size

    def divided_by(self, shard: Shard) -> bool:
        return self.dim == shard.dim and self.size is not None and not self.shared


Axes = dict[str, tuple[Axis, ...]]


@dataclass(frozen=True)
class Int4Format(WeightFormat):
    """Names are appended to a linear's path, in the place of `weight`."""

    group: int | None  # columns that share a scale; None: all of a row
    symmetric: bool = False
    reorders: bool = False  # groups are any columns, of which a tensor says which

    method: ClassVar[str]  # `quant_method`
    key: ClassVar[str]  # the name of the integers

    takes_int8_tokens = True

    def check_quantization(self, quantization: str) -> None:
        if quantization == INT8:
            return
        raise ConfigError(
            f"The checkpoint is quantized already ({self.method}, 4 bits), which quantization"
            f" {quantization} does not apply to; drop it."
        )

    def reads(self, name: str, headers: Headers) -> bool:
        return _stem(name) + self.key in headers

    def stored(
        self, name: str, view: View, shard: Shard | None, headers: Headers
    ) -> dict[str, Stored]:
        parts = {} if shard is None else self.shards(shard)  # refuses what cannot be divided
        shapes = [self.shapes(n, k) for n, k in matrix_shapes(view, shard)]
        return {
            end: Stored(_stem(name) + end, [s[end] for s in shapes], "scale" in end, parts.get(end))
            for end in self.axes
        }

    def decode(self, tensors: Mapping[str, Tensor], shard: Shard | None) -> View:
        q, scales, zeros = self.unpack(tensors)
        if not self.reorders:
            return Int4Weight.of(q, scales, zeros)
        group = self.group_of_columns(tensors)
        return (q.float() - zeros.float()[:, group]) * scales.float()[:, group]

    def load(self, view: View, tensors: Mapping[str, Tensor], part: Part = WHOLE) -> None:
        """Some rows at a time, so that little memory is needed."""
        if not isinstance(view, QuantizedWeight) or len(view.shape) != 2:
            return super().load(view, tensors, part)
        for first in range(0, view.shape[0], ROWS_AT_ONCE):
            rows = slice(first, min(first + ROWS_AT_ONCE, view.shape[0]))
            some = {name: self._rows(name, tensor, rows) for name, tensor in tensors.items()}
            fill(view.map(itemgetter(rows)), self.decode(some, part.shard), part)

    def _rows(self, name: str, tensor: Tensor, rows: slice) -> Tensor:
        """What a stored tensor has of these rows of the matrix."""
        for dim, axis in enumerate(self.axes[name]):
            if axis.dim == ROWS:
                size = axis.size or 1
                first, last = rows.start // size, -(-rows.stop // size)
                tensor = tensor.narrow(dim, first, last - first)
        return tensor

    def empty_linear(self, n: int, k: int, device: torch.device) -> Int4Weight | None:
        if self.reorders:
            return None
        if device.type == "cpu":
            group = self.group or k
            fits = k % group == 0 and group % GROUP_COLUMNS == 0
            kept = fits and library.serves(torch.float32, device)
        else:
            group, kept = GROUP, (self.group or GROUP) % GROUP == 0 and Int4Weight.fits(n, k)
        return Int4Weight.empty(n, k, device, group) if kept else None

    def gemm(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Gemm | None:
        assert isinstance(weight, Int4Weight)
        if weight.device.type == "cuda":
            return Int4Gemm(weight, bias)
        grouped = weight.grouped() if library.serves(torch.float32, weight.device) else None
        return None if grouped is None else CpuGemm(cpu.pack_grouped(grouped, bias, dtype))

    @property
    @abstractmethod
    def axes(self) -> Axes:
        """Axes of the stored tensors of a matrix, by name."""

    @property
    def groups(self) -> Axis:
        return Axis(COLUMNS, self.group, shared=self.reorders)

    def shapes(self, n: int, k: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the stored tensors of a matrix [N, K], by name."""
        return {
            name: tuple(axis.entries((n, k)[axis.dim]) for axis in axes)
            for name, axes in self.axes.items()
        }

    def shards(self, shard: Shard) -> dict[str, Shard]:
        """Shards of the stored tensors, if this is the part of a matrix; absent: all of it.

        Raises:
            ConfigError: rows or columns with one entry are on two ranks.
        """
        what = ("a matrix's rows", "a matrix's columns")[shard.dim]
        return {
            name: shard.along(i).in_groups(axis.size or 1, what)
            for name, axes in self.axes.items()
            for i, axis in enumerate(axes)
            if axis.divided_by(shard)
        }

    @abstractmethod
    def unpack(self, stored: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Integers [N, K], scales and zero points [N, G]."""

    @abstractmethod
    def group_of_columns(self, stored: Mapping[str, Tensor]) -> Tensor:
        """[K] int64, if `reorders`."""


@dataclass(frozen=True)
class Awq(Int4Format):
    method = "awq"
    key = "qweight"

    @classmethod
    def from_config(cls, spec: Spec) -> Self | None:
        if spec.get("quant_method") != cls.method:
            return None
        _check_bits(spec, spec.get("bits", spec.get("w_bit")))
        version = str(spec.get("version", "gemm")).lower()
        if version != "gemm":
            raise ConfigError(f"AWQ version {version} is not supported; use one of version gemm.")
        return cls(_group(spec.get("group_size", spec.get("q_group_size", GROUP))))

    @property
    def axes(self) -> Axes:
        rows, columns, words = Axis(ROWS), Axis(COLUMNS), Axis(ROWS, 8)
        return {
            "qweight": (columns, words),
            "qzeros": (self.groups, words),
            "scales": (self.groups, rows),
        }

    def unpack(self, stored: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        q, zeros = (_unpack(stored[name], 1, AWQ_ORDER) for name in ("qweight", "qzeros"))
        return q.t(), stored["scales"].t(), zeros.t()

    def group_of_columns(self, stored: Mapping[str, Tensor]) -> Tensor:
        raise AssertionError("AWQ does not reorder columns")


@dataclass(frozen=True)
class Gptq(Int4Format):
    zero_offset: int = 1  # added to stored zero points

    method = "gptq"
    key = "qweight"
    unused = (".bias",)  # AutoGPTQ stores zeros where a model has none

    @classmethod
    def from_config(cls, spec: Spec) -> Self | None:
        if spec.get("quant_method") != cls.method:
            return None
        _check_bits(spec, spec.get("bits"))
        return cls(
            _group(spec.get("group_size", GROUP)),
            symmetric=bool(spec.get("sym", True)),
            reorders=bool(spec.get("desc_act", False)),
            zero_offset=0 if spec.get("checkpoint_format") == "gptq_v2" else 1,
        )

    @property
    def axes(self) -> Axes:
        rows, columns = Axis(ROWS), Axis(COLUMNS)
        return {
            "qweight": (Axis(COLUMNS, 8), rows),
            "qzeros": (self.groups, Axis(ROWS, 8)),
            "scales": (self.groups, rows),
            "g_idx": (columns,),
        }

    def unpack(self, stored: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        q, zeros = _unpack(stored["qweight"], 0), _unpack(stored["qzeros"], 1)
        return q.t(), stored["scales"].t(), zeros.t() + self.zero_offset

    def group_of_columns(self, stored: Mapping[str, Tensor]) -> Tensor:
        return stored["g_idx"].long()


@dataclass(frozen=True)
class PackQuantized(Int4Format):
    """Signed integers, stored with 8 added, as are zero points."""

    method = "compressed-tensors"
    key = "weight_packed"
    unused = (".weight_shape",)

    @classmethod
    def from_config(cls, spec: Spec) -> Self | None:
        weights = compressed_weights(spec)
        if weights.get("type") != "int" or weights.get("num_bits") != 4:
            return None
        return cls(
            _group(weights.get("group_size") or -1),
            symmetric=bool(weights.get("symmetric", True)),
            reorders=weights.get("actorder") in ("group", "dynamic"),
        )

    @property
    def axes(self) -> Axes:
        rows = Axis(ROWS)
        axes: Axes = {
            "weight_packed": (rows, Axis(COLUMNS, 8)),
            "weight_scale": (rows, self.groups),
        }
        if not self.symmetric:
            axes["weight_zero_point"] = (Axis(ROWS, 8), self.groups)
        if self.reorders:
            axes["weight_g_idx"] = (Axis(COLUMNS),)
        return axes

    def unpack(self, stored: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        q, scales = _unpack(stored["weight_packed"], 1), stored["weight_scale"]
        if self.symmetric:
            return q, scales, torch.full(scales.shape, 8, dtype=torch.int32, device=q.device)
        return q, scales, _unpack(stored["weight_zero_point"], 0)

    def group_of_columns(self, stored: Mapping[str, Tensor]) -> Tensor:
        return stored["weight_g_idx"].long()


def _stem(name: str) -> str:
    """The path of a linear, whose weight it is."""
    return name.removesuffix("weight")


def _unpack(packed: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 with eight integers each, along `dim`, which becomes eight times as long."""
    shifts = torch.tensor([4 * order.index(i) for i in range(8)], device=packed.device)
    integers = (packed.unsqueeze(dim + 1) >> _along(shifts.int(), dim + 1, packed.dim() + 1)) & 15
    return integers.flatten(dim, dim + 1)


def _along(values: Tensor, dim: int, dims: int) -> Tensor:
    return values.view([-1 if i == dim else 1 for i in range(dims)])


def _check_bits(spec: Mapping[str, Any], bits: Any) -> None:
    if bits != 4:
        method = spec["quant_method"]
        raise ConfigError(
            f"{method} with {bits} bits is not supported; use a checkpoint of 4 bits."
        )


def _group(size: int) -> int | None:
    if size == 0:
        raise ConfigError("group_size 0 of quantization_config is no size; correct it.")
    return None if size == -1 else size
