"""GEMMs per head against float64, whatever the number of tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forerun.kernels.gemm import head_gemm as module
from forerun.kernels.gemm.head_gemm import (
    MAX_HEADS,
    MAX_TOKENS,
    choose_block_n,
    head_gemm,
    head_gemm_ref,
)
from forerun.kernels.runtime.gpu import GpuInfo
from tests.kernels.test_fused_qkv import normal

H200 = GpuInfo(num_sms=132, amd=False)
MI300 = GpuInfo(num_sms=304, amd=True, warp_size=64, smem_bytes=64 << 10)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LATENT, NOPE, V, ROPE = 512, 128, 128, 64
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 6e-4}


class Case:
    """x and out are slices of wider tensors; the weight is one half of each head's rows."""

    def __init__(
        self, tokens: int, heads: int, k: int, n: int, transposed: bool, like: Tensor
    ) -> None:
        """`like`: of the dtype and device wanted. `transposed`: K is contiguous, not N."""
        options = {"dtype": like.dtype, "device": like.device}
        self.x = normal(tokens, heads, k + 8, seed=0, **options)[..., :k]
        rows, columns = (n, k) if transposed else (k, n)
        both = normal(heads, rows + 8, columns, seed=1, **options)
        self.weight = both[:, 8:].transpose(1, 2) if transposed else both[:, :rows]
        self._wide = torch.full((tokens, heads, n + 8), -7.0, **options)
        self.out = self._wide[..., :n]

    def run(self, tokens: slice = slice(None)) -> Tensor:
        """Of some of the tokens; a copy."""
        self._wide.fill_(-7.0)
        head_gemm(self.x[tokens], self.weight, self.out[tokens])
        assert (self._wide[..., self.out.shape[2] :] == -7.0).all()
        return self.out[tokens].clone()

    def check(self, tokens: slice = slice(None)) -> None:
        want = torch.empty(self.out.shape, dtype=torch.float64, device=self.out.device)
        head_gemm_ref(self.x.double(), self.weight.double(), want)
        error = (self.run(tokens).double() - want[tokens]).norm() / want[tokens].norm()
        assert error < TOLERANCE[self.x.dtype]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The grids that are launched."""
    kernel, grids = module._head_gemm, []

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(module, "_head_gemm", Recorded())
    return grids


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "k", "n", "dtype"),
    [
        (1, 3, 24, 40, torch.float32),
        (17, 2, 128, 48, torch.float16),
        (37, 1, 64, 16, torch.float32),
        (5, 2, 100, 256, torch.float32),
    ],
)
def test_small(
    tokens: int, heads: int, k: int, n: int, dtype: torch.dtype, transposed: bool,
    device: torch.device,
) -> None:  # fmt: skip
    Case(tokens, heads, k, n, transposed, torch.empty(0, dtype=dtype, device=device)).check()


def test_a_cta_takes_several_tiles_of_tokens(
    launches: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(module, "CTAS_PER_SM", 0)
    case = Case(MAX_TOKENS, 2, 32, 16, False, torch.empty(0, device=device))
    one = case.run()
    case.check()
    assert {grid[2] for grid in launches} == {1}
    monkeypatch.setattr(module, "CTAS_PER_SM", 100)
    assert torch.equal(case.run(), one)
    assert launches[-1][2] == 2


def test_more_tokens_go_to_the_library(
    launches: list[tuple[int, ...]], device: torch.device
) -> None:
    case = Case(MAX_TOKENS + 1, 1, 16, 16, False, torch.empty(0, device=device))
    case.check()
    assert not launches
    case.check(slice(MAX_TOKENS))
    assert launches


def test_tiles() -> None:
    """About as many CTAs as SMs with 16 heads, larger tiles with 32."""

    def columns(gpu: GpuInfo, heads: int, k: int, n: int, dtype: torch.dtype) -> int:
        return choose_block_n(gpu, torch.empty(heads, k, n, dtype=dtype, device="meta"))

    bf16, f32 = torch.bfloat16, torch.float32
    assert columns(H200, 16, NOPE, LATENT, bf16) == 64
    assert columns(H200, 16, LATENT, V, bf16) == 16
    assert columns(H200, 32, NOPE, LATENT, bf16) == 128
    assert columns(H200, 32, LATENT, V, bf16) == 32
    assert columns(H200, 32, LATENT, V, f32) == 16
    assert columns(MI300, 32, LATENT, V, bf16) == 16
    assert columns(H200, 3, 24, 40, bf16) == 16


SIZES = [(NOPE, LATENT, False), (LATENT, V, True)]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 16, 17, MAX_TOKENS])
@pytest.mark.parametrize("heads", [16, MAX_HEADS])
@pytest.mark.parametrize(("k", "n", "transposed"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_real(
    tokens: int, heads: int, k: int, n: int, transposed: bool, dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    Case(tokens, heads, k, n, transposed, torch.empty(0, dtype=dtype, device=device)).check()


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, MAX_HEADS])
@pytest.mark.parametrize(("k", "n", "transposed"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_does_not_depend_on_the_others(
    heads: int, k: int, n: int, transposed: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Bit for bit, at any place in a tile. (In the interpreter, NumPy's GEMM rounds by row.)"""
    case = Case(MAX_TOKENS, heads, k, n, transposed, torch.empty(0, dtype=dtype, device=device))
    whole = case.run()
    for count in (1, 2, 16, 17, 31):
        for first in (0, 1, MAX_TOKENS - count):
            part = slice(first, first + count)
            assert torch.equal(case.run(part), whole[part])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, MAX_TOKENS])
def test_replayed(tokens: int, device: torch.device) -> None:
    """A chain of absorb and project_v in a graph, as PDL overlaps it, on changing inputs.

    Each GEMM reads what the one before has written.
    """
    heads, like = 16, torch.empty(0, dtype=torch.bfloat16, device=device)
    layers = [
        (Case(tokens, heads, NOPE, LATENT, False, like), Case(tokens, heads, LATENT, V, True, like))
        for _ in range(4)
    ]
    for i, pair in enumerate(layers):
        for case in pair:
            case.weight.copy_(normal(*case.weight.shape, seed=i, dtype=like.dtype, device=device))
            case.weight.mul_(case.weight.shape[1] ** -0.5)
    wide = like.new_empty(tokens, heads, LATENT + ROPE)

    def run(x: Tensor) -> Tensor:
        for absorb, project in layers:
            head_gemm(x, absorb.weight, wide[..., :LATENT])
            out = x.new_empty(tokens, heads, V)
            head_gemm(wide[..., :LATENT], project.weight, out)
            x = out
        return x

    x = layers[0][0].x.clone()
    run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x)
    for seed in range(20):
        x.copy_(normal(*x.shape, seed=seed, dtype=x.dtype, device=device))
        graph.replay()
        got = out.clone()
        torch.cuda.synchronize()
        want = x
        for absorb, project in layers:
            torch.cuda.synchronize()
            head_gemm(want, absorb.weight, wide[..., :LATENT])
            torch.cuda.synchronize()
            want = torch.empty_like(got)
            head_gemm(wide[..., :LATENT], project.weight, want)
        torch.cuda.synchronize()
        assert torch.equal(got, want)
