"""Experts, GEMMs per head and functions of the CPU kernels: against float64, and their bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.cpu import functions, library
from forerun.kernels.cpu.experts import Activation, PackedExperts
from forerun.kernels.cpu.gemm import PackedWeights, head_gemm
from tests.kernels.cpu_levels import at_levels

pytestmark = [
    pytest.mark.skipif(library.compiled().library is None, reason="no C++ compiler"),
    pytest.mark.usefixtures("level", "threads_as_before"),
    at_levels("native"),
]

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
ALPHA, LIMIT = 1.7, 2.0


@pytest.fixture
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    draw = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=draw) * scale).to(dtype)


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * gate * torch.sigmoid(ALPHA * gate)


ACTIVATIONS: dict[Activation, Callable[[Tensor, Tensor], Tensor]] = {
    Activation.SILU: lambda gate, up: F.silu(gate) * up,
    Activation.GELU_TANH: lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    Activation.CLAMPED: clamped,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("hidden", "width"), [(64, 40), (40, 72)])
def test_experts(activation: Activation, hidden: int, width: int, dtype: torch.dtype) -> None:
    """The definition; and a token's bits are the same alone, in any batch, with any threads."""
    experts, tokens, top_k = 6, 1100, 3  # more than are computed at once
    w13 = normal(experts, 2 * width, hidden, dtype=dtype, scale=hidden**-0.5)
    w2 = normal(experts, hidden, width, dtype=dtype, scale=width**-0.5)
    b13, b2 = normal(experts, 2 * width, dtype=dtype), normal(experts, hidden, dtype=dtype)
    x = normal(tokens, hidden, dtype=dtype)
    ids = normal(tokens, experts).argsort(1)[:, :top_k].int()
    ids[5, 1] = experts  # another rank's
    weights = normal(tokens, top_k).abs()
    packed = PackedExperts(
        PackedWeights.pack(w13, b13), PackedWeights.pack(w2, b2), activation, ALPHA, LIMIT
    )
    whole = packed(x, ids, weights)
    for t in (0, 5, 1050):
        want = torch.zeros(hidden, dtype=torch.float64)
        for expert, weight in zip(ids[t].tolist(), weights[t].double(), strict=True):
            if expert < experts:
                both = w13[expert].double() @ x[t].double() + b13[expert].double()
                act = ACTIVATIONS[activation](*both.chunk(2))
                want += weight * (w2[expert].double() @ act + b2[expert].double())
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(whole[t].double(), want, rtol=tolerance, atol=tolerance)
    for threads, (first, count) in product(
        (1, 2), ((0, 1), (5, 1), (3, 4), (7, 33), (1020, 80), (0, 1100))
    ):
        torch.set_num_threads(threads)
        part = slice(first, first + count)
        assert torch.equal(packed(x[part], ids[part], weights[part]), whole[part])


@pytest.mark.parametrize("dtype", DTYPES)
def test_head_gemm(dtype: torch.dtype) -> None:
    weights, x = normal(3, 37, 24, dtype=dtype), normal(50, 3, 30, dtype=dtype)[..., 4:28]
    packed = PackedWeights.pack(weights)
    buffer = torch.zeros(50, 3, 41, dtype=dtype)
    out = buffer[..., 2:39]
    head_gemm(x, packed, out)
    want = torch.einsum("thk,hnk->thn", x.double(), weights.double())
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=10 * tolerance)
    assert not buffer[..., :2].any() and not buffer[..., 39:].any()
    for threads, (first, count) in product((1, 2), ((0, 1), (7, 5), (30, 20))):
        torch.set_num_threads(threads)
        few = torch.zeros(count, 3, 37, dtype=dtype)
        head_gemm(x[first : first + count], packed, few)
        assert torch.equal(few, out[first : first + count])


@pytest.mark.parametrize("dtype", DTYPES)
def test_functions(dtype: torch.dtype) -> None:
    x = torch.cat((torch.linspace(-30, 30, 40_001), torch.linspace(-1, 1, 2001))).to(dtype)
    x = torch.cat((x, torch.tensor([0.0, -0.0, 1e-30, torch.inf, -torch.inf, 200.0]).to(dtype)))
    pairs = (
        (functions.sigmoid, torch.sigmoid),
        (functions.tanh, torch.tanh),
        (functions.gelu_tanh, lambda x: F.gelu(x, approximate="tanh")),
    )
    for ours, theirs in pairs:
        got, finite = ours(x), x[torch.isfinite(x)]
        want = theirs(finite.double())
        rtol = 1e-6 if dtype == torch.float32 else 8e-3
        torch.testing.assert_close(ours(finite).double(), want, rtol=rtol, atol=1e-6)
        assert ours(torch.tensor([torch.nan], dtype=dtype)).isnan().all()
        for threads, first in product((1, 2), (0, 1, 7, 39_999)):
            torch.set_num_threads(threads)
            for count in (1, 5, 2000):
                part = ours(x[first : first + count])
                assert torch.equal(part, got[first : first + count].view_as(part))


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_sum_exp(dtype: torch.dtype) -> None:
    x = normal(5, 2, 50_257, dtype=dtype, scale=4.0)
    got = functions.log_sum_exp(x)
    torch.testing.assert_close(got.double(), x.double().logsumexp(-1), rtol=1e-6, atol=1e-6)
    for threads, row in product((1, 2), range(5)):
        torch.set_num_threads(threads)
        assert torch.equal(functions.log_sum_exp(x[row : row + 1]), got[row : row + 1])
    x[0, 0, 7], x[1, 0] = torch.nan, -torch.inf
    bad = functions.log_sum_exp(x)
    assert bad[0, 0].isnan() and bad[1, 0] == -torch.inf and torch.equal(bad[2:], got[2:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_argmax(dtype: torch.dtype) -> None:
    """The lowest of equals, in rows of any length and distance; never a NaN."""
    for size in (1, 7, 255, 256, 16_387):
        x, y = normal(6, 3, size, dtype=dtype), normal(1, size, dtype=dtype).expand(6, size)
        rows = x[:, 1]
        rows[2, size // 2], rows[3], rows[4] = torch.nan, -torch.inf, torch.nan
        rows[5] = -y[0]  # all sums are equal, but for the first
        rows[5, 0] = -torch.inf
        sums = (rows.float() + y.float()).nan_to_num(-torch.inf, torch.inf, -torch.inf)
        assert functions.add_argmax(rows, y).tolist() == sums.numpy().argmax(-1).tolist()
