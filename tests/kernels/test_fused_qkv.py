"""QK-norm, RoPE and paged K/V write against the reference in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from forerun.config.rope_config import RopeConfig
from forerun.kernels.elementwise import qk_norm_rope as qkv
from forerun.kernels.elementwise.qk_norm_rope import HeadNorms, RopePositions
from forerun.layers.rope import Rope

EPS, PAGE, POSITIONS = 1e-6, 4, 64
FP8 = torch.float8_e4m3fn
# A result is rounded once; the interpreter cuts bits off instead.
EXACT = torch.cuda.is_available()
TOLERANCE = {
    torch.float32: 1e-5,
    torch.float16: 2**-11 if EXACT else 2**-10,
    torch.bfloat16: 2**-8 if EXACT else 2**-7,
    FP8: 2**-4,
}


@dataclass
class Tokens:
    """T tokens of random requests, each with a KV slot of its own."""

    positions: Tensor  # [T] int32
    kv_slots: Tensor  # [T] int64
    pages: int


def scattered(tokens: int, device: torch.device) -> Tokens:
    generator = torch.Generator().manual_seed(3)
    pages = -(-tokens // PAGE) + 2
    positions = torch.randint(0, POSITIONS, (tokens,), generator=generator, dtype=torch.int32)
    kv_slots = torch.randperm(pages * PAGE, generator=generator)[:tokens]
    return Tokens(positions.to(device), kv_slots.to(device), pages)


def table(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return Rope(RopeConfig(theta=10000.0), dim, POSITIONS, dtype, device).table


def normal(*shape: int, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def close(got: Tensor, want: Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    atol = 2**-10 if got.dtype == FP8 else tolerance
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=atol)


def double(norms: HeadNorms | None) -> HeadNorms | None:
    return norms and HeadNorms(norms.q.double(), norms.k.double(), norms.eps)


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pool_dtype", [None, FP8, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "norm", "split_k"),
    [
        (8, 4, 64, True, 0),
        (3, 1, 128, False, 0),
        (6, 2, 80, True, 3),
        (16, 8, 16, True, 1),
        pytest.param(8, 1, 512, True, 0, marks=pytest.mark.exhaustive),
    ],
)
def test_one_layer(
    heads: int,
    kv_heads: int,
    dim: int,
    norm: bool,
    split_k: int,
    pool_dtype: torch.dtype | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    check_layer(7, heads, kv_heads, dim, norm, split_k, pool_dtype or dtype, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 512])
@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("split_k", [0, 4])
def test_one_layer_real(
    tokens: int, pool_dtype: torch.dtype, split_k: int, device: torch.device
) -> None:
    check_layer(tokens, 32, 8, 128, True, split_k, pool_dtype, torch.bfloat16, device)


def check_layer(
    tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    norm: bool,
    split_k: int,
    pool_dtype: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    size = (heads + 2 * kv_heads) * dim
    if split_k:
        x = normal(split_k, tokens, size, dtype=torch.float32, device=device, seed=0)
        whole = x.double().sum(0)
    else:
        x = normal(tokens, size, dtype=dtype, device=device, seed=0)
        whole = x.double()
    norms = None
    if norm:
        weights = normal(2, dim, dtype=dtype, device=device, seed=1)
        norms = HeadNorms(weights[0], weights[1], EPS)
    cos_sin, at = table(dim, dtype, device), scattered(tokens, device)
    k_pool = torch.zeros(at.pages, PAGE, kv_heads, dim, device=device, dtype=pool_dtype)
    v_pool = torch.zeros_like(k_pool)
    k_want = torch.zeros(k_pool.shape, device=device, dtype=torch.float64)
    v_want = torch.zeros_like(k_want)

    rope = RopePositions(cos_sin, at.positions)
    q = qkv.qk_norm_rope_write(x, heads, norms, rope, at.kv_slots, k_pool, v_pool)
    exact = RopePositions(cos_sin.double(), at.positions)
    q_want = qkv.qk_norm_rope_write_ref(
        whole, heads, double(norms), exact, at.kv_slots, k_want, v_want
    )

    assert q.dtype == dtype
    close(q, q_want)
    close(k_pool, k_want)
    close(v_pool, v_want)


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("pool_dtype", [torch.float32, FP8])
@pytest.mark.parametrize("split_k", [0, 2])
@pytest.mark.parametrize("committed", [False, True])
def test_layers_at_once(
    committed: bool, split_k: int, pool_dtype: torch.dtype, device: torch.device
) -> None:
    check_layers(3, 4, 3, 2, 32, committed, split_k, pool_dtype, torch.float32, device)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("committed", [False, True])
def test_layers_at_once_real(batch: int, committed: bool, device: torch.device) -> None:
    check_layers(batch, 16, 5, 8, 128, committed, 0, torch.bfloat16, torch.bfloat16, device)


def check_layers(
    batch: int,
    q_len: int,
    layers: int,
    kv_heads: int,
    dim: int,
    committed: bool,
    split_k: int,
    pool_dtype: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    tokens, size = batch * q_len, 2 * layers * kv_heads * dim
    if split_k:
        x = normal(split_k, tokens, size, dtype=torch.float32, device=device, seed=0)
        whole = x.double().sum(0)
    else:
        x = normal(tokens, size, dtype=dtype, device=device, seed=0)
        whole = x.double()
    weights = normal(layers, dim, dtype=dtype, device=device, seed=1)
    norms = HeadNorms(weights[0], weights, EPS)
    cos_sin, at = table(dim, dtype, device), scattered(tokens, device)
    shape = (2, layers, at.pages, PAGE, kv_heads, dim)
    pool = torch.zeros(shape, device=device, dtype=pool_dtype)
    want = torch.zeros(shape, device=device, dtype=torch.float64)
    num_valid = torch.arange(batch, device=device, dtype=torch.int32) % q_len + 1

    rope = RopePositions(cos_sin, at.positions)
    valid = num_valid if committed else None
    qkv.kv_norm_rope_write(x, norms, rope, at.kv_slots, pool, valid)
    exact = RopePositions(cos_sin.double(), at.positions)
    qkv.kv_norm_rope_write_ref(whole, double(norms), exact, at.kv_slots, want)
    if committed:  # K/V of rejected tokens stays as it was
        rejected = torch.arange(q_len, device=device) >= num_valid[:, None]
        want.flatten(2, 3)[:, :, at.kv_slots[rejected.flatten()]] = 0

    close(pool, want)
