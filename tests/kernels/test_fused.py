"""RMSNorm and SiLU kernels against PyTorch in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from forerun.kernels.elementwise.gated_act import gelu_tanh_mul, silu_mul
from forerun.kernels.elementwise.rms_norm import add_rms_norm, rms_norm
from forerun.kernels.elementwise.value_norm import norm_values
from forerun.kernels.moe.experts import combine

EPS = 1e-6
# bfloat16: a result is rounded once, to 8 bits. The interpreter cuts them off instead.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8 if torch.cuda.is_available() else 2**-7}


def _random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def _close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "size"), [(1, 64), (5, 96), (3, 1000)])
def test_rms_norm(tokens: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    wide = _random(tokens, size + 8, dtype=dtype, device=device)
    x, weight = wide[:, :size], _random(size, dtype=dtype, device=device, seed=1)
    _close(rms_norm(x, weight, EPS), _normed(x, weight))


def test_rms_norm_of_more_dimensions(device: torch.device) -> None:
    x = _random(6, 96, dtype=torch.float32, device=device)
    weight = _random(96, dtype=torch.float32, device=device, seed=1)
    cube = x.view(2, 3, 96)
    assert torch.equal(rms_norm(cube, weight, EPS), rms_norm(x, weight, EPS).view_as(cube))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("split_k", [0, 1, 3])
def test_add_rms_norm(split_k: int, dtype: torch.dtype, device: torch.device) -> None:
    tokens, size = 5, 96
    if split_k:
        x = _random(split_k, tokens, size, dtype=torch.float32, device=device)
        added = x.double().sum(0)
    else:
        x = _random(tokens, size, dtype=dtype, device=device)
        added = x.double()
    residual = _random(tokens, 2 * size, dtype=dtype, device=device, seed=1)[:, size:]
    kept = residual.clone()
    weight = _random(size, dtype=dtype, device=device, seed=2)

    normed, total = add_rms_norm(x, residual, weight, EPS)

    _close(total, residual.double() + added)
    _close(normed, _normed(total, weight))
    assert torch.equal(residual, kept)


def test_a_weight_may_have_more_precision_than_the_model(device: torch.device) -> None:
    """Gemma's factors 1 + w, which bfloat16 would round."""
    x = _random(5, 96, dtype=torch.bfloat16, device=device)
    residual = _random(5, 96, dtype=torch.bfloat16, device=device, seed=1)
    weight = 1 + 1e-3 * _random(96, dtype=torch.float32, device=device, seed=2)
    _close(rms_norm(x, weight, EPS), _normed(x, weight))
    normed, total = add_rms_norm(x, residual, weight, EPS)
    _close(normed, _normed(total, weight))
    assert normed.dtype == torch.bfloat16


def test_partials_of_the_models_dtype(device: torch.device) -> None:
    """Bit for bit as if their sum had been a tensor."""
    dtype = torch.float16  # the interpreter rounds to bfloat16 in its own way
    partials = _random(4, 5, 96, dtype=dtype, device=device)
    residual = _random(5, 96, dtype=dtype, device=device, seed=1)
    weight = _random(96, dtype=dtype, device=device, seed=2)
    got = add_rms_norm(partials, residual, weight, EPS)
    want = add_rms_norm(combine(partials, dtype), residual, weight, EPS)
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("split_k", [0, 2])
@pytest.mark.parametrize(("tokens", "inner"), [(1, 24), (17, 1100)])
def test_silu_mul(
    tokens: int, inner: int, split_k: int, dtype: torch.dtype, device: torch.device
) -> None:
    shape = (split_k, tokens, 2 * inner) if split_k else (tokens, 2 * inner)
    x = _random(*shape, dtype=torch.float32 if split_k else dtype, device=device)
    gate, up = (x.double().sum(0) if split_k else x.double()).chunk(2, -1)
    _close(silu_mul(x, dtype), gate * torch.sigmoid(gate) * up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "inner"), [(1, 24), (17, 1100)])
def test_gelu_tanh_mul(tokens: int, inner: int, dtype: torch.dtype, device: torch.device) -> None:
    x = 3 * _random(tokens, 2 * inner + 8, dtype=dtype, device=device)[:, : 2 * inner]
    gate, up = x.double().chunk(2, -1)
    _close(gelu_tanh_mul(x), F.gelu(gate, approximate="tanh") * up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 24), (17, 3, 512)])
def test_norm_values(
    tokens: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """In place; what lies before the value heads stays."""
    x = 3 * _random(tokens, 40 + heads * dim, dtype=dtype, device=device)
    qk, v = x[:, :40].clone(), x[:, 40:].double().unflatten(1, (heads, dim))
    norm_values(x, heads, dim, 1e-2)
    assert torch.equal(x[:, :40], qk)
    _close(x[:, 40:], (v * (v.pow(2).mean(-1, keepdim=True) + 1e-2).rsqrt()).flatten(1))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 128, 512])
def test_real_shapes(tokens: int, device: torch.device) -> None:
    dtype, size, inner = torch.bfloat16, 4096, 12288
    x = _random(2, tokens, size, dtype=torch.float32, device=device)
    residual = _random(tokens, size, dtype=dtype, device=device, seed=1)
    weight = _random(size, dtype=dtype, device=device, seed=2)
    normed, total = add_rms_norm(x, residual, weight, EPS)
    _close(total, residual.double() + x.double().sum(0))
    _close(normed, _normed(total, weight))
    gate_up = _random(tokens, 2 * inner, dtype=dtype, device=device)
    gate, up = gate_up.double().chunk(2, -1)
    _close(silu_mul(gate_up, dtype), gate * torch.sigmoid(gate) * up)
