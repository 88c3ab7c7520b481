# mypy: allow-untyped-defs, allow-incomplete-defs
"""Latent rows (MLA) stored in their pages."""

from __future__ import annotations

from torch import Tensor

from forerun.kernels.runtime.fp8 import FP8, as_bits, encode_e4m3, encode_e4m3_ref
from forerun.kernels.runtime.jit import jit, tl, triton, use_triton


def write_latent(latent: Tensor, kv_slots: Tensor, pool: Tensor) -> None:
    """Stores the rows of T tokens.

    Args:
        latent: [T, Dl + Dr]; tokens at any stride.
        kv_slots: [T] int64, distinct but for the null page.
        pool: [pages, P, Dl + Dr], any float dtype; float8 is clamped.
    """
    if not use_triton(latent):
        write_latent_ref(latent, kv_slots, pool)
        return
    num_tokens, dim = latent.shape
    _write_latent[(num_tokens,)](
        latent, kv_slots, as_bits(pool), latent.stride(0),
        DIM=dim, FP8=pool.dtype == FP8, BLOCK=triton.next_power_of_2(dim), num_warps=2,
    )  # fmt: skip


def write_latent_ref(latent: Tensor, kv_slots: Tensor, pool: Tensor) -> None:
    """Reference implementation of `write_latent`."""
    cast = encode_e4m3_ref(latent) if pool.dtype == FP8 else latent.to(pool.dtype)
    as_bits(pool).flatten(0, 1).index_copy_(0, kv_slots, as_bits(cast))


@jit
def _write_latent(
    latent_ptr, kv_slots, pool, row_stride,
    DIM: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One CTA per token."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    x = tl.load(latent_ptr + token * row_stride + i, mask=i < DIM)
    if FP8:
        x = encode_e4m3(x.to(tl.float32))
    at = tl.load(kv_slots + token) * DIM
    tl.store(pool + at + i, x.to(pool.dtype.element_ty), mask=i < DIM)
