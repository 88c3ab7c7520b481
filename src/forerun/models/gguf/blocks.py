"""Blocks of GGUF's quantized kinds as codes, scales and leasts (`GroupedWeight`).

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. A block has 32 columns, or
256 in the kinds that end with K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.kernels.gemm.grouped import GroupedKind, GroupedWeight


class Codes(NamedTuple):
    """Codes of blocks [R, B, block], scales and leasts of their groups [R, B, groups].

    Those of the kinds that end with K are multiples of two values [R, B, 1] of the block.
    """

    codes: Tensor
    scales: Tensor
    leasts: Tensor | None = None
    super_scales: Tensor | None = None
    super_leasts: Tensor | None = None


@dataclass(frozen=True)
class Blocks:
    """How a kind is stored and kept."""

    kept: GroupedKind
    bytes: int  # of a block
    read: Callable[[Tensor], Codes]  # of blocks [R, B, bytes] uint8


def read_blocks(rows: Tensor, kind: str) -> GroupedWeight:
    """Rows [N, bytes] uint8 of one of `BLOCKS`."""
    blocks = BLOCKS[kind]
    read = blocks.read(rows.unflatten(1, (-1, blocks.bytes)))
    codes, scales, *others = (each.flatten(1) if each is not None else None for each in read)
    assert codes is not None and scales is not None
    leasts, *supers = others
    return GroupedWeight.of(codes, (scales, leasts), blocks.kept, (supers[0], supers[1]))


def _halves(blocks: Tensor, at: int, count: int = 1) -> Tensor:
    """float16 values from byte `at` on."""
    return blocks[..., at : at + 2 * count].contiguous().view(torch.float16)


def _nibbles(packed: Tensor) -> Tensor:
    """The lower ones, then the upper ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _fields(packed: Tensor, bits: int) -> Tensor:
    """Fields of the bytes [..., S], the lowest of all first: [..., S * 8 / bits]."""
    shifts = range(0, 8, bits)
    return torch.cat([packed >> shift & ((1 << bits) - 1) for shift in shifts], -1)


def _high_bits(packed: Tensor) -> Tensor:
    """32 bits, lowest first, as 16: [..., 4] -> [..., 32]."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (packed.unsqueeze(-1) >> shifts & 1).flatten(-2) << 4


def _q4_0(b: Tensor) -> Codes:
    return Codes(_nibbles(b[..., 2:]), _halves(b, 0))


def _q4_1(b: Tensor) -> Codes:
    return Codes(_nibbles(b[..., 4:]), _halves(b, 0), _halves(b, 2))


def _q5_0(b: Tensor) -> Codes:
    return Codes(_nibbles(b[..., 6:]) | _high_bits(b[..., 2:6]), _halves(b, 0))


def _q5_1(b: Tensor) -> Codes:
    return Codes(_nibbles(b[..., 8:]) | _high_bits(b[..., 4:8]), _halves(b, 0), _halves(b, 2))


def _q8_0(b: Tensor) -> Codes:
    return Codes(b[..., 2:] ^ 128, _halves(b, 0))  # signed bytes


def _q2_k(b: Tensor) -> Codes:
    codes = _fields(b[..., 16:80].unflatten(-1, (2, 32)), 2).flatten(-2)
    scales, leasts = b[..., :16] & 15, b[..., :16] >> 4
    return Codes(codes, scales, leasts, _halves(b, 80), -_halves(b, 82))


def _q3_k(b: Tensor) -> Codes:
    high = _fields(b[..., :32], 1) << 2
    low = _fields(b[..., 32:96].unflatten(-1, (2, 32)), 2).flatten(-2)
    six = _fields(b[..., 96:104], 4) | _fields(b[..., 104:108], 2) << 4
    return Codes(low | high, six.to(torch.int8) - 32, None, _halves(b, 108))


def _with_scales(codes: Tensor, b: Tensor) -> Codes:
    """Scales and leasts of Q4_K and Q5_K: d, dmin, and eight of 6 bits each in 12 bytes."""
    first, second, mixed = b[..., 4:16].split(4, -1)
    scales = torch.cat((first & 63, mixed & 15 | first >> 6 << 4), -1)
    leasts = torch.cat((second & 63, mixed >> 4 | second >> 6 << 4), -1)
    return Codes(codes, scales, leasts, _halves(b, 0), -_halves(b, 2))


def _q4_k(b: Tensor) -> Codes:
    return _with_scales(_nibbles(b[..., 16:].unflatten(-1, (4, 32))).flatten(-2), b)


def _q5_k(b: Tensor) -> Codes:
    low = _nibbles(b[..., 48:].unflatten(-1, (4, 32))).flatten(-2)
    return _with_scales(low | _fields(b[..., 16:48], 1) << 4, b)


def _q6_k(b: Tensor) -> Codes:
    low = _nibbles(b[..., :128].unflatten(-1, (2, 64))).flatten(-2)
    high = _fields(b[..., 128:192].unflatten(-1, (2, 32)), 2).flatten(-2)
    scales = b[..., 192:208].contiguous().view(torch.int8)
    return Codes(low | high << 4, scales, None, _halves(b, 208))


_HALF, _BYTE = torch.float16, torch.int8
BLOCKS = {
    "Q4_0": Blocks(GroupedKind(4, 32, 8, _HALF), 18, _q4_0),
    "Q4_1": Blocks(GroupedKind(4, 32, 0, _HALF), 20, _q4_1),
    "Q5_0": Blocks(GroupedKind(8, 32, 16, _HALF), 22, _q5_0),
    "Q5_1": Blocks(GroupedKind(8, 32, 0, _HALF), 24, _q5_1),
    "Q8_0": Blocks(GroupedKind(8, 32, 128, _HALF), 34, _q8_0),
    "Q2_K": Blocks(GroupedKind(4, 16, 0, _BYTE, supers=16), 84, _q2_k),
    "Q3_K": Blocks(GroupedKind(4, 16, 4, _BYTE, supers=16), 110, _q3_k),
    "Q4_K": Blocks(GroupedKind(4, 32, 0, _BYTE, supers=8), 144, _q4_k),
    "Q5_K": Blocks(GroupedKind(8, 32, 0, _BYTE, supers=8), 176, _q5_k),
    "Q6_K": Blocks(GroupedKind(8, 16, 32, _BYTE, supers=16), 210, _q6_k),
}
