"""Weights of 4-bit integers, and the layout in which kernels on a GPU read them.

A weight [N, K] has integers q from 0 to 15 and, for every row and group of columns, a scale and a
zero point: W = (q - zero) * scale. On a CPU it is packed as codes of any groups (`grouped`). On a
GPU groups have 128 columns, and `PackedInt4` holds all of it in the order in which the Hopper
kernel (`gemm_int4_sm90.py`) multiplies: a block of 16 rows and one group is 1,088 contiguous bytes,

    1,024 bytes  two chunks of 64 columns; in a chunk, 32 lanes of 16 bytes; of a lane, one 32-bit
                 word per 16 columns, with the 8 integers of its operand of mma.sync m16n8k16
    64 bytes     a 32-bit word per row: the scale in float32, whose lowest byte is the zero point

Scales of checkpoints are float16 or bfloat16, so their last 8 bits in float32 are zero. In a word,
integer i is in bits 4 i: even columns in the lower half, odd ones in the upper half, so that
(word >> 4 i) & 0x000f000f are the two of one 32-bit register.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.kernels.gemm.grouped import GroupedKind, GroupedWeight
from forerun.kernels.gemm.quantized import Largest, QuantizedWeight

GROUP = 128  # columns with one scale and zero point, on a GPU
BLOCK_ROWS = 16
BLOCK_BYTES = BLOCK_ROWS * GROUP // 2 + 4 * BLOCK_ROWS
_WORDS = BLOCK_ROWS * GROUP // 8  # of integers, per block


@dataclass(frozen=True, eq=False)
class Int4Weight(QuantizedWeight):
    """Integers row by row, as they are loaded: W = (q - zero) * scale."""

    values: Tensor  # [..., N, K / 2] uint8: the integer of an even column in the lower bits
    scales: Tensor  # [..., N, K / group] float32
    zeros: Tensor  # [..., N, K / group] uint8

    @classmethod
    def empty(cls, n: int, k: int, device: torch.device, group: int = GROUP) -> Int4Weight:
        """Uninitialised."""
        groups = k // group
        return cls(
            torch.empty(n, k // 2, dtype=torch.uint8, device=device),
            torch.empty(n, groups, device=device),
            torch.empty(n, groups, dtype=torch.uint8, device=device),
        )

    @classmethod
    def of(cls, q: Tensor, scales: Tensor, zeros: Tensor) -> Int4Weight:
        """Makes it from integers [..., N, K] from 0 to 15."""
        pairs = q.to(torch.uint8).unflatten(-1, (-1, 2))
        return cls(pairs[..., 0] | pairs[..., 1] << 4, scales.float(), zeros.to(torch.uint8))

    @classmethod
    def fits(cls, n: int, k: int) -> bool:
        """Whether kernels on a GPU read a weight of this shape."""
        return n % BLOCK_ROWS == 0 and k % GROUP == 0

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.values.shape[:-1], 2 * self.values.shape[-1]))

    @property
    def group(self) -> int:
        """Columns with one scale and zero point."""
        return self.shape[-1] // self.scales.shape[-1]

    def integers(self) -> Tensor:
        """[..., N, K] uint8."""
        return torch.stack((self.values & 15, self.values >> 4), -1).flatten(-2)

    def dequantize(self) -> Tensor:
        groups = self.integers().unflatten(-1, (-1, self.group)).float()
        signed: Tensor = groups - self.zeros.unsqueeze(-1).float()
        return (signed * self.scales.unsqueeze(-1)).flatten(-2)

    def scale_(self, factor: float) -> None:
        self.scales.mul_(factor)

    def quantize_(self, weight: Tensor, across: Largest | None = None) -> None:
        """Symmetric: a scale is its group's largest value / 7; that of a group of zeros is 1.

        Scales are rounded to 16 significant bits, which `pack_int4` keeps.
        """
        groups = weight.float().unflatten(-1, (-1, self.group))
        scales = groups.abs().amax(-1) / 7
        scales = torch.where(scales > 0, scales, 1.0).bfloat16().float()
        q = (groups / scales.unsqueeze(-1)).round().clamp(-8, 7) + 8
        self.copy_(Int4Weight.of(q.flatten(-2), scales, torch.full_like(scales, 8)))

    def copy_(self, other: Int4Weight) -> None:
        """Also where a group of `other` is several here, which then have its scale and zero."""
        repeats = other.group // self.group
        scales, zeros = (t.repeat_interleave(repeats, -1) for t in (other.scales, other.zeros))
        super().copy_(replace(other, scales=scales, zeros=zeros))

    def grouped(self) -> GroupedWeight | None:
        """The same values in the smallest form that CPU kernels read, which shares the integers.

        None: some scale has so many bits that (q - zero) * scale is rounded.
        """
        if (self.scales.view(torch.int32) & 0xFF).any():
            return None
        dtypes = torch.float16, torch.bfloat16, torch.float32
        dtype = next(d for d in dtypes if torch.equal(self.scales.to(d).float(), self.scales))
        zero = int(self.zeros.flatten()[0])
        shared = zero > 0 and bool((self.zeros == zero).all())
        kind = GroupedKind(4, self.group, zero if shared else 0, dtype, points=not shared)
        zeros = None if shared else self.zeros.to(dtype)
        return GroupedWeight(self.values, self.scales.to(dtype), zeros, kind)

    def pack(self, bias: Tensor | None = None) -> PackedInt4:
        """Packs a whole weight for the kernels."""
        return PackedInt4(pack_int4(self.integers(), self.scales, self.zeros), bias)


@dataclass(frozen=True)
class PackedInt4:
    """A weight [N, K] in blocks of 16 rows and groups of 128 columns."""

    packed: Tensor  # [N / 16, K / 128, BLOCK_BYTES] uint8
    bias: Tensor | None = None  # [N]

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        blocks, groups, _ = self.packed.shape
        return blocks * BLOCK_ROWS, groups * GROUP

    @property
    def bits(self) -> float:
        """Bits per value, with scales and zero points."""
        return 8 * BLOCK_BYTES / (BLOCK_ROWS * GROUP)


def packed_shape(n: int, k: int) -> tuple[int, int, int]:
    """Shape of `PackedInt4.packed`; N must be a multiple of 16 and K of 128."""
    assert n % BLOCK_ROWS == 0 and k % GROUP == 0
    return n // BLOCK_ROWS, k // GROUP, BLOCK_BYTES


def pack_int4(q: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Integers [N, K] from 0 to 15, scales and zero points [N, K / 128] -> `PackedInt4.packed`.

    scale: its value in float32 is kept to 16 significant bits. zero: 0 to 127.
    """
    n, k = q.shape
    blocks, groups, _ = packed_shape(n, k)
    # Row 8 h + g, column 64 c + 16 i + 8 b + 2 t + o: lane 4 g + t of chunk c, word i.
    by_lane = q.to(torch.uint8).view(blocks, 2, 8, groups, 2, 4, 2, 4, 2)  # h g . c i b t o
    nibbles = by_lane.permute(0, 3, 4, 2, 7, 5, 8, 6, 1).reshape(blocks, groups, -1, 2)
    integers = nibbles[..., 0] | nibbles[..., 1] << 4
    words = scale.float().contiguous().view(torch.int32) & ~0xFF | zero.int()
    words = words.view(blocks, BLOCK_ROWS, groups).transpose(1, 2).contiguous()
    return torch.cat((integers, words.view(torch.uint8)), -1)


def unpack_int4(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `pack_int4`: integers [N, K] uint8, scales float32, zero points int32."""
    blocks, groups, _ = packed.shape
    n, k = blocks * BLOCK_ROWS, groups * GROUP
    integers, words = packed.split([4 * _WORDS, 4 * BLOCK_ROWS], -1)
    nibbles = torch.stack((integers & 15, integers >> 4), -1)
    by_lane = nibbles.view(blocks, groups, 2, 8, 4, 4, 2, 2, 2)  # c g t i o b h
    q = by_lane.permute(0, 8, 3, 1, 2, 5, 7, 4, 6).reshape(n, k)
    words = words.contiguous().view(torch.int32).transpose(1, 2).reshape(n, groups)
    return q, (words & ~0xFF).view(torch.float32), words & 0xFF


def dequantize_int4_ref(packed: Tensor) -> Tensor:
    """`PackedInt4.packed` -> W [N, K] float32."""
    q, scale, zero = unpack_int4(packed)
    integers: Tensor = q.unflatten(1, (-1, GROUP)).float() - zero.unsqueeze(2)
    return (integers * scale.unsqueeze(2)).flatten(1)
