"""Norm, RoPE and write of latent rows with RoPE of q, against the reference in float64."""

from __future__ import annotations

import pytest
import torch

from forerun.kernels.elementwise.latent_norm_rope import (
    LatentNorm,
    latent_norm_rope_write,
    latent_norm_rope_write_ref,
)
from forerun.kernels.elementwise.qk_norm_rope import RopePositions
from tests.kernels.test_fused_qkv import EPS, FP8, PAGE, close, normal, scattered, table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "latent", "rope", "pool_dtype"),
    [(3, 24, 8, None), (16, 64, 16, FP8), (20, 48, 12, torch.float16)],
)
def test_small(
    heads: int,
    latent: int,
    rope: int,
    pool_dtype: torch.dtype | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    check(5, heads, (latent, rope), pool_dtype or dtype, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 512])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, FP8])
def test_real(tokens: int, heads: int, pool_dtype: torch.dtype, device: torch.device) -> None:
    check(tokens, heads, (512, 64), pool_dtype, torch.bfloat16, device)


def check(
    tokens: int,
    heads: int,
    dims: tuple[int, int],
    pool_dtype: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """kv_a and q are slices of wider tensors; q goes elsewhere, then in place."""
    latent, rope = dims
    at = scattered(tokens, device)
    kv_a = normal(tokens, 7 + sum(dims), dtype=dtype, device=device, seed=0)[:, 7:]
    q = normal(tokens, heads, 6 + rope, dtype=dtype, device=device, seed=1)
    norm = LatentNorm(normal(latent, dtype=dtype, device=device, seed=2), EPS)
    where = RopePositions(table(rope, dtype, device), at.positions)
    pool = torch.zeros(at.pages, PAGE, sum(dims), device=device, dtype=pool_dtype)
    want_pool = torch.zeros(pool.shape, device=device, dtype=torch.float64)
    want_q = torch.empty(tokens, heads, rope, device=device, dtype=torch.float64)
    latent_norm_rope_write_ref(
        kv_a.double(),
        q[..., 6:].double(),
        LatentNorm(norm.weight.double(), EPS),
        RopePositions(where.table.double(), at.positions),
        at.kv_slots,
        want_pool,
        want_q,
    )
    wide = torch.zeros(tokens, heads, sum(dims), device=device, dtype=dtype)
    nope = q[..., :6].clone()
    for out in (wide[..., latent:], q[..., 6:]):
        pool.zero_()
        latent_norm_rope_write(kv_a, q[..., 6:], norm, where, at.kv_slots, pool, out)
        close(out, want_q)
        if pool_dtype == FP8:
            want_pool = want_pool.clamp(-448, 448)
        close(pool, want_pool)
    assert torch.equal(q[..., :6], nope) and not wide[..., :latent].any()
