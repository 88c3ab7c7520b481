# mypy: allow-untyped-defs, allow-incomplete-defs
"""float8 e4m3 for K/V pools, by its bits: the same on every target and in the interpreter.

Sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, largest 448. Values are clamped,
never scaled. The kernels see the pool as uint8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.runtime.gpu import gpu_of
from forerun.kernels.runtime.jit import jit, tl

FP8 = torch.float8_e4m3fn
LARGEST = 448.0


@jit
def decode_e4m3(bits):
    """uint8 -> float16, exact: shifted into a half's fields, the exponent is 8 too small."""
    wide = bits.to(tl.uint16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True) * 256.0


@jit
def encode_e4m3(x):
    """float32 -> uint8, rounded to nearest even and clamped."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # 960: (127 - 7) << 3
    # Below 2^-6 steps are 2^-9: next to 2^14 a float32 has just such steps.
    small = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    return (tl.where(size < 0.015625, small, normal) | sign).to(tl.uint8)


def encode_e4m3_ref(x: Tensor) -> Tensor:
    """Twin of the encoder, as a float8 tensor."""
    return x.float().clamp(-LARGEST, LARGEST).to(FP8)


def fp8_mode(pool: Tensor) -> int:
    """How kernels read a pool: 0, as it is; 1, by `decode_e4m3`; 2, by the hardware."""
    if pool.dtype != FP8:
        return 0
    facts = gpu_of(pool.device)
    native = not facts.amd and not facts.interpreted and facts.capability >= 89
    return 2 if native else 1


def as_bits(pool: Tensor) -> Tensor:
    """What kernels are handed: uint8 for a float8 pool, else the pool itself."""
    return pool.view(torch.uint8) if pool.dtype == FP8 else pool
