# mypy: allow-untyped-defs, allow-incomplete-defs
"""float8 e4m3fn conversion for K/V pools, in integer arithmetic.

The result is the same on every target and in Triton's interpreter. e4m3fn has a sign bit, 4
exponent bits (bias 7) and 3 mantissa bits; it has no infinity, and its maximum is 448. Values are
saturated, not scaled. Kernels get the pool as uint8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.runtime.gpu import gpu_of
from forerun.kernels.runtime.jit import jit, tl

FP8 = torch.float8_e4m3fn
E4M3_MAX = 448.0


@jit
def decode_e4m3(bits):
    """uint8 (e4m3 bits) -> float16, exact.

    Shifted into float16's fields, the value is 2^-8 of the true one: the exponent biases are 7
    and 15.
    """
    wide = bits.to(tl.uint16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True) * 256.0


@jit
def encode_e4m3(x):
    """float32 -> uint8 (e4m3 bits), rounded to nearest even and saturated at 448."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # 960: (127 - 7) << 3
    # Subnormals (below 2^-6) have a spacing of 2^-9, as float32 has just above 2^14.
    small = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    return (tl.where(size < 0.015625, small, normal) | sign).to(tl.uint8)


@jit
def to_e4m3(x, NATIVE: tl.constexpr):
    """`encode_e4m3`, by the hardware's conversion if NATIVE (`fp8_mode` is 2)."""
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True) if NATIVE else encode_e4m3(x)


def encode_e4m3_ref(x: Tensor) -> Tensor:
    """Reference implementation of `encode_e4m3`; returns a float8_e4m3fn tensor."""
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(FP8)


def fp8_mode(pool: Tensor) -> int:
    """How kernels read a pool: 0: not float8; 1: `decode_e4m3`; 2: the hardware's conversion."""
    if pool.dtype != FP8:
        return 0
    gpu = gpu_of(pool.device)
    native = not gpu.amd and not gpu.interpreted and gpu.capability >= 89
    return 2 if native else 1


def as_bits(pool: Tensor) -> Tensor:
    """A float8 pool viewed as uint8, any other pool unchanged: what is passed to kernels."""
    return pool.view(torch.uint8) if pool.dtype == FP8 else pool
