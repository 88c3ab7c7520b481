"""Weights of unsigned integers of 4 or 8 bits, in groups of columns: w = code * scale + least.

GGUF's quantized kinds are all of this form, and so are AWQ and GPTQ. Where one code stands for 0 in
all groups, `least` is minus that times the scale and is not stored; where each group has a code of
its own for 0, that is stored in its place. Codes and scales have so few bits that code * scale is
exact in float32: the weight is rounded once.
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
    scales: torch.dtype  # of scales and leasts: float16, bfloat16 or float32
    points: bool = False  # the code of each group that stands for 0 is stored in place of leasts

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
        return k % self.group == 0 and self.group % GROUP_COLUMNS == 0


@dataclass(frozen=True, eq=False)
class GroupedWeight(QuantizedWeight):
    """Row by row, as it is loaded; it takes as much memory as packed for a kernel."""

    rounds = False

    codes: Tensor  # [..., N, K * bits / 8] uint8; of 4 bits: an even column's in the lower ones
    scales: Tensor  # [..., N, K / group]
    leasts: Tensor | None  # the same; with `points` zeros
    kind: GroupedKind

    @classmethod
    def empty(cls, n: int, k: int, kind: GroupedKind, device: torch.device) -> GroupedWeight:
        """Uninitialised."""
        codes = torch.empty(n, k * kind.bits // 8, dtype=torch.uint8, device=device)
        scales = torch.empty(n, k // kind.group, dtype=kind.scales, device=device)
        return cls(codes, scales, None if kind.zero else torch.empty_like(scales), kind)

    @classmethod
    def of(
        cls, codes: Tensor, scales: Tensor, leasts: Tensor | None, kind: GroupedKind
    ) -> GroupedWeight:
        """Makes it from a byte per code [..., N, K]; scales and leasts [..., N, K / group]."""
        if kind.bits == 4:
            codes = codes[..., 0::2] | codes[..., 1::2] << 4
        leasts = leasts.to(kind.scales) if leasts is not None else None
        return cls(codes.contiguous(), scales.to(kind.scales), leasts, kind)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.codes.shape[:-1], self.codes.shape[-1] * 8 // self.kind.bits))

    def integers(self) -> Tensor:
        """A byte per code, [..., N, K] uint8."""
        if self.kind.bits == 8:
            return self.codes
        return torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(-2)

    def dequantize(self) -> Tensor:
        groups = self.integers().unflatten(-1, (-1, self.kind.group)).float()
        scales = self.scales.float().unsqueeze(-1)
        values: Tensor
        if self.leasts is None:
            values = (groups - self.kind.zero) * scales
        elif self.kind.points:
            values = (groups - self.leasts.float().unsqueeze(-1)) * scales
        else:
            values = groups * scales + self.leasts.float().unsqueeze(-1)
        return values.flatten(-2)

    def scale_(self, factor: float) -> None:
        raise NotImplementedError("scales of float16 cannot be multiplied exactly")

    def stored_as(self, kind: GroupedKind) -> GroupedWeight:
        """The same values in another kind, `GroupedKind.of_all` of this one and others."""
        if kind == self.kind:
            return self
        codes, scales, leasts = self.integers(), self.scales.to(kind.scales), self.leasts
        if leasts is None and kind.zero == 0:
            leasts = scales * -self.kind.zero
        elif leasts is None:
            codes = codes + (kind.zero - self.kind.zero)
        repeats = self.kind.group // kind.group
        scales = scales.repeat_interleave(repeats, -1)
        leasts = leasts.repeat_interleave(repeats, -1) if leasts is not None else None
        return GroupedWeight.of(codes, scales, leasts, kind)

    def copy_(self, other: GroupedWeight) -> None:
        super().copy_(other.stored_as(self.kind))
