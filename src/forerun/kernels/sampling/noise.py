# mypy: allow-untyped-defs, allow-incomplete-defs
"""The noise of `forerun.sampling.noise` inside kernels: the same hash, in true uint32."""

from __future__ import annotations

from forerun.kernels.runtime.jit import jit, tl


@jit
def _mix(x, key):
    """A permutation of 32-bit words; `key` is mixed in half-way."""
    x ^= x >> 16
    x = (x * 0x21F0AAAD) ^ key
    x ^= x >> 15
    x *= 0x735A2D97
    return x ^ (x >> 15)


@jit
def keyed_noise(key, position, ids):
    """log(1 - u) < 0 for every id: minus an Exp(1) variable, keyed by (seed, position, id)."""
    at = position.to(tl.uint32)
    zero = at ^ at
    first = _mix(key.to(tl.uint32) ^ at, zero)
    second = _mix((key >> 32).to(tl.uint32) ^ at, zero)
    word = _mix(_mix(ids.to(tl.uint32), zero) ^ first, second)
    y = (word.to(tl.float32) + 0.5) * -2.3283064365386963e-10  # 2^-32
    y = tl.maximum(y, -0.999999940395355224609375)  # 1 - 2^-24
    # log1p(y): the rounding error of 1 + y, divided by 1 + y (to first order), is added back.
    rounded = 1.0 + y
    return tl.log(rounded) + (y - (rounded - 1.0)) * (2.0 - rounded)
