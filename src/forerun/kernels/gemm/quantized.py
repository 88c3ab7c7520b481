"""Quantized weights of GEMMs: how they are kept, and what they mean.

A quantized weight [N, K] is some tensors of which the first dimension is N, so that whatever
selects or reorders rows of a weight does the same to each of them (`map`). Matrices of experts are
stacked, [E, N, K]. `dequantize` is the
reference: a GEMM over the weight computes the same as one over the result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from operator import itemgetter
from typing import ClassVar, Self

import torch
from torch import Tensor

from forerun.kernels.runtime.fp8 import E4M3_MAX, FP8

MAX_QUANTIZED = 1 << 28  # values that are quantized at once, in float32

Largest = Callable[[Tensor], Tensor]  # elementwise maximum over the ranks of a row


@dataclass(frozen=True, eq=False)
class QuantizedWeight(ABC):
    """A weight [N, K], packed; or some of its rows, [..., K], which may share its memory."""

    rounds: ClassVar[bool] = True  # whether `quantize_` is there

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """Shape of the weight that it stands for."""

    @abstractmethod
    def dequantize(self) -> Tensor:
        """[..., K] float32."""

    def quantize_(self, weight: Tensor, across: Largest | None = None) -> None:
        """Takes the values of a plain weight [N, K], rounded. As many rows as this has.

        `across`: if these are some columns of a larger weight.
        """
        raise NotImplementedError(f"{type(self).__name__} is read from checkpoints only")

    @abstractmethod
    def scale_(self, factor: float) -> None:
        """Multiplies the weight that it stands for, by a power of two."""

    @property
    def device(self) -> torch.device:
        return next(iter(self._tensors().values())).device

    @property
    def nbytes(self) -> int:
        """What a GEMM reads of it."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def map(self, select: Callable[[Tensor], Tensor]) -> Self:
        """The same of other rows, or of some matrices [N, K]: `select` works on the dimensions
        before the last of each tensor.
        """
        return replace(self, **{name: select(t) for name, t in self._tensors().items()})

    def copy_(self, other: Self) -> None:
        """Overwrites all rows; leading dimensions may be split otherwise."""
        theirs = other._tensors()
        for name, tensor in self._tensors().items():
            tensor.copy_(theirs[name].reshape(tensor.shape))

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


@dataclass(frozen=True, eq=False)
class Fp8Weight(QuantizedWeight):
    """e4m3 values with a scale per row, or per row and group of K: w = value · scale.

    One scale for a whole matrix is repeated for its rows, and that of a block of 128 × 128 for the
    block's rows: then matrices with scales of their own can be the parts of one.
    """

    values: Tensor  # [..., N, K] float8_e4m3fn
    scales: Tensor  # [..., N, G] float32
    group: int  # columns that share a scale; the last group may be smaller

    @classmethod
    def empty(cls, n: int, k: int, device: torch.device, group: int | None) -> Fp8Weight:
        """Uninitialised. `group` None: one scale per row."""
        return cls.stack((n, k), device, group)

    @classmethod
    def stack(cls, shape: tuple[int, ...], device: torch.device, group: int | None) -> Fp8Weight:
        """The same of matrices [..., N, K]."""
        *outer, k = shape
        group = k if group is None else group
        values = torch.empty(shape, dtype=FP8, device=device)
        return cls(values, torch.empty(*outer, -(-k // group), device=device), group)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantize(self) -> Tensor:
        whole = self.scales.repeat_interleave(self.group, -1)
        return self.values.float() * whole[..., : self.values.shape[-1]]

    def scale_(self, factor: float) -> None:
        self.scales.mul_(factor)

    def copy_(self, other: Self) -> None:
        """Also where a row of `other` is several here, which then have its scale."""
        repeats = self.scales.numel() // other.scales.numel()
        super().copy_(replace(other, scales=other.scales.repeat_interleave(repeats, -1)))

    def quantize_(self, weight: Tensor, across: Largest | None = None) -> None:
        """A scale is its group's largest value / 448; that of a group of zeros is 1.

        If a group is a whole row, its maximum is taken over all ranks that have columns of it.
        """
        weight = weight.reshape(self.shape)
        size = max(1, MAX_QUANTIZED * len(weight) // weight.numel())
        for first in range(0, len(weight), size):
            part = slice(first, first + size)
            self.map(itemgetter(part))._quantize(weight[part], across)

    def _quantize(self, weight: Tensor, across: Largest | None) -> None:
        k = self.values.shape[-1]
        padded = torch.nn.functional.pad(weight.float(), (0, -k % self.group))
        groups = padded.unflatten(-1, (-1, self.group))
        largest = groups.abs().amax(-1)
        if across is not None and largest.shape[-1] == 1:
            largest = across(largest)
        scales = largest / E4M3_MAX
        scales = torch.where(scales > 0, scales, 1.0)
        values = (groups / scales.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).to(FP8)
        self.scales.copy_(scales)
        self.values.copy_(values.flatten(-2)[..., :k])
