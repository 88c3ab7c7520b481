"""Weights of unsigned integers of 4 or 8 bits, in groups of columns: w = code * scale + least.

GGUF's quantized kinds are all of this form, and so are AWQ and GPTQ. Where one code stands for 0 in
all groups, `least` is minus that times the scale and is not stored; where each group has a code of
its own for 0, that is stored in its place. Codes and scales have so few bits that code * scale is
exact in float32: the weight is rounded once. Scales and leasts may be 8-bit multiples of float16
values that several groups share.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.gemm.quantized import QuantizedWeight

GROUP_COLUMNS = 16  # columns that share a scale are a multiple


@dataclass(frozen=True)
class GroupedKind:
    """How a weight of groups is stored."""

    bits: int  # of a code: 4 or 8
    group: int  # columns that share a scale
    zero: int  # the code that stands for 0; 0: leasts are stored
    scales: torch.dtype  # of scales and leasts: float16, bfloat16, float32, or int8 multiples
    points: bool = False  # the code of each group that stands for 0 is stored in place of leasts
    supers: int = 0  # of int8 multiples: groups that share what they are multiples of

    @classmethod
    def of_all(cls, kinds: list[GroupedKind]) -> GroupedKind:
        """The smallest that keeps the values of each of these exactly; none has `points`."""
        bits, group = max(kind.bits for kind in kinds), min(kind.group for kind in kinds)
        half = all(kind.scales is torch.float16 for kind in kinds)
        zeros = {kind.zero for kind in kinds}
        if len(zeros) == 1 or (half and 0 not in zeros):
            return cls(bits, group, max(zeros), torch.float16 if half else torch.float32)
        return cls(bits, group, 0, torch.float32)  # which has every zero * scale

    def fits(self, k: int) -> bool:
        block = self.group * max(self.supers, 1)
        return k % block == 0 and self.group % GROUP_COLUMNS == 0


@dataclass(frozen=True, eq=False)
class GroupedWeight(QuantizedWeight):
    """Row by row, as it is loaded; it takes as much memory as packed for a kernel."""

    rounds = False

    codes: Tensor  # [..., N, K * bits / 8] uint8; of 4 bits: an even column's in the lower ones
    scales: Tensor  # [..., N, K / group]
    leasts: Tensor | None  # the same; with `points` zeros
    kind: GroupedKind
    super_scales: Tensor | None = None  # [..., N, K / (group * supers)] float16, of int8 multiples
    super_leasts: Tensor | None = None  # the same, where there are leasts

    @classmethod
    def empty(cls, n: int, k: int, kind: GroupedKind, device: torch.device) -> GroupedWeight:
        """Uninitialised."""

        def pair(columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
            first = torch.empty(n, columns, dtype=dtype, device=device)
            return first, None if kind.zero else torch.empty_like(first)

        codes = torch.empty(n, k * kind.bits // 8, dtype=torch.uint8, device=device)
        groups = k // kind.group
        supers = pair(groups // kind.supers, torch.float16) if kind.supers else (None, None)
        return cls(codes, *pair(groups, kind.scales), kind, *supers)

    @classmethod
    def of(
        cls,
        codes: Tensor,
        scales: tuple[Tensor, Tensor | None],
        kind: GroupedKind,
        supers: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> GroupedWeight:
        """Makes it from a byte per code [..., N, K]; scales and leasts [..., N, K / group]."""
        if kind.bits == 4:
            codes = codes[..., 0::2] | codes[..., 1::2] << 4
        first, second = (t.to(kind.scales) if t is not None else None for t in scales)
        assert first is not None
        return cls(codes.contiguous(), first, second, kind, *supers)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.codes.shape[:-1], self.codes.shape[-1] * 8 // self.kind.bits))

    def integers(self) -> Tensor:
        """A byte per code, [..., N, K] uint8."""
        if self.kind.bits == 8:
            return self.codes
        return torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(-2)

    def factors(self) -> tuple[Tensor, Tensor | None]:
        """Scales and leasts in float32."""
        pairs = (self.scales, self.super_scales), (self.leasts, self.super_leasts)
        scales, leasts = (_factors(each, shared, self.kind.supers) for each, shared in pairs)
        assert scales is not None
        return scales, leasts

    def dequantize(self) -> Tensor:
        groups = self.integers().unflatten(-1, (-1, self.kind.group)).float()
        scales, leasts = (t.unsqueeze(-1) if t is not None else None for t in self.factors())
        assert scales is not None
        values: Tensor
        if leasts is None:
            values = (groups - self.kind.zero) * scales
        elif self.kind.points:
            values = (groups - leasts) * scales
        else:
            values = groups * scales + leasts
        return values.flatten(-2)

    def scale_(self, factor: float) -> None:
        raise NotImplementedError("scales of float16 cannot be multiplied exactly")

    def stored_as(self, kind: GroupedKind) -> GroupedWeight:
        """The same values in another kind, `GroupedKind.of_all` of this one and others."""
        if kind == self.kind:
            return self
        codes, (scales, leasts) = self.integers(), self.factors()
        if leasts is None and kind.zero == 0:
            leasts = scales * -self.kind.zero
        elif leasts is None:
            codes = codes + (kind.zero - self.kind.zero)
        repeats = self.kind.group // kind.group
        scales = scales.repeat_interleave(repeats, -1)
        leasts = leasts.repeat_interleave(repeats, -1) if leasts is not None else None
        return GroupedWeight.of(codes, (scales, leasts), kind)

    def copy_(self, other: GroupedWeight) -> None:
        super().copy_(other.stored_as(self.kind))


def _factors(each: Tensor | None, shared: Tensor | None, supers: int) -> Tensor | None:
    """[..., G] of every group, in float32; `shared` [..., G / supers]: what they multiply."""
    if each is None or shared is None:
        return each.float() if each is not None else None
    of_blocks: Tensor = each.float().unflatten(-1, (-1, supers)) * shared.float().unsqueeze(-1)
    return of_blocks.flatten(-2)
