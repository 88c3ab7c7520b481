"""GEMMs of the CPU kernels: equal to their references."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from forerun.core.tokens import INVALID_TOKEN
from forerun.kernels.cpu import gemm as cpu
from forerun.kernels.cpu import library
from forerun.kernels.cpu.gemm import Format, PackedWeight
from tests.kernels.cpu_levels import at_levels

pytestmark = [
    pytest.mark.skipif(library.compiled().library is None, reason="no C++ compiler"),
    pytest.mark.usefixtures("level"),
    at_levels("native"),
]

DTYPES = (torch.float32, torch.bfloat16)
# N and K: whole panels, parts of one, groups of 32 with a rest, odd.
SHAPES = ((64, 64), (100, 96), (33, 40), (7, 130), (1, 2), (513, 256))
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def operands(
    n: int, k: int, dtype: torch.dtype, tokens: int = 40
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(n * k + tokens)
    shapes = ((tokens, k), (n, k), (n,))
    x, weight, bias = (torch.randn(shape, generator=draw).to(dtype) for shape in shapes)
    return x, weight, bias


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_gemm_equals_f_linear(n: int, k: int, dtype: torch.dtype) -> None:
    x, weight, bias = operands(n, k, dtype)
    want = F.linear(x.double(), weight.double(), bias.double())
    got = cpu.gemm(x, cpu.pack(weight, bias)).double()
    assert (got - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_int8_equals_its_reference(n: int, k: int, dtype: torch.dtype) -> None:
    x, weight, _ = operands(n, k, dtype)
    got = cpu.gemm(x, cpu.pack(weight, None, Format.INT8)).float()
    want = cpu.int8_gemm_ref(x, weight)
    # bfloat16: of the result. Elsewhere single values may be rounded to the other side.
    tolerance = 1e-2 if dtype is torch.bfloat16 else 1e-3
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * k**0.5)


def test_int8_error_is_that_of_rounding() -> None:
    """Beside the plain GEMM: two roundings to 1/254 of the largest value of 32."""
    x, weight, _ = operands(512, 512, torch.float32, tokens=64)
    plain = x @ weight.T
    packed = cpu.gemm(x, cpu.pack(weight, None, Format.INT8))
    assert (packed - plain).norm() <= 0.009 * plain.norm()


@pytest.mark.parametrize(("n", "k"), ((64, 64), (33, 40), (7, 130)))
def test_float32_tokens_of_a_bfloat16_weight_are_rounded(n: int, k: int) -> None:
    x, weight, bias = operands(n, k, torch.float32)
    want = cpu.gemm(x.bfloat16().float(), cpu.pack(weight.bfloat16().float(), bias))
    w = cpu.pack(weight, bias, Format.BFLOAT16)
    assert not cpu.is_plain(w)
    torch.testing.assert_close(cpu.gemm(x, w), want, rtol=1e-5, atol=1e-5 * k**0.5)


@pytest.mark.parametrize(("n", "k"), [shape for shape in SHAPES if shape[1] % 2 == 0])
def test_weights_stored_in_bfloat16_give_the_bits_of_float32(n: int, k: int) -> None:
    x, weight, bias = operands(n, k, torch.float32)
    weight = weight.bfloat16().float()
    packed, plain = cpu.pack(weight, bias), cpu.pack(weight, bias, Format.FLOAT32)
    assert packed.format is Format.WIDENED and 2 * packed.nbytes == plain.nbytes
    assert cpu.is_plain(packed) and cpu.is_plain(plain)
    for tokens in (1, 2, 3, 6, 12, 16, 40):
        assert torch.equal(cpu.gemm(x[:tokens], packed), cpu.gemm(x[:tokens], plain))


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_weights_stored_in_float16_give_the_bits_of_float32(n: int, k: int) -> None:
    x, weight, bias = operands(n, k, torch.float32)
    weight = weight.half().float()
    packed, plain = cpu.pack(weight, bias), cpu.pack(weight, bias, Format.FLOAT32)
    assert packed.format is Format.HALVES and 2 * packed.nbytes == plain.nbytes
    assert cpu.is_plain(packed) and cpu.has_rows(packed)
    for tokens in (1, 2, 3, 6, 12, 16, 40):
        assert torch.equal(cpu.gemm(x[:tokens], packed), cpu.gemm(x[:tokens], plain))
    ids = torch.arange(n).flip(0)
    assert torch.equal(cpu.take_packed_rows(packed, ids), weight[ids])


def test_weights_that_16_bits_cannot_hold_stay_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "ROWS_COMPARED", 16)
    _, weight, _ = operands(64, 64, torch.float32)
    weight = weight.bfloat16().float()
    assert cpu.smallest_format(weight) is Format.WIDENED
    halves = weight.half().float()
    halves[50, 33] = 1 + 2**-8
    assert cpu.smallest_format(halves) is Format.HALVES
    for value in (1 + 2**-16, torch.nan, torch.tensor(3e38), 2**-140):
        other = weight.clone()
        other[50, 33] = value
        assert cpu.smallest_format(other) is Format.FLOAT32
    assert cpu.smallest_format(weight[:, :-1]) is Format.HALVES
    assert cpu.smallest_format(weight.bfloat16()) is Format.BFLOAT16


def epilogues(
    x: torch.Tensor, w: PackedWeight, residual: torch.Tensor, rows: slice = slice(None)
) -> list[torch.Tensor]:
    """RMSNorm and total, SiLU * up, and argmax of these rows."""
    norm = torch.linspace(0.1, 2, w.n).to(x.dtype)
    both = cpu.gemm_add_rms_norm(x[rows], w, residual[rows], norm, 1e-6)
    return [*both, cpu.gemm_silu_mul(x[rows], w), cpu.gemm_argmax(x[rows], w)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [64, 50, 520])
@pytest.mark.parametrize("tokens", [1, 5, 130])
def test_epilogues_equal_separate_operations(n: int, tokens: int, dtype: torch.dtype) -> None:
    """In float32 as exactly as one operation rounds: sums are those of `gemm`."""
    x, weight, bias = operands(n, 64, dtype, tokens)
    w = cpu.pack(weight, bias)
    torch.set_num_threads(2)
    residual = torch.randn(tokens, n, generator=torch.Generator().manual_seed(1)).to(dtype)
    normed, total, silu, ids = epilogues(x, w, residual)
    product = cpu.gemm(x, w).double()
    tolerance, sums = 1e-6, product
    if dtype is torch.bfloat16:  # `gemm` rounds its result, an epilogue does not
        tolerance, sums = 2e-2, F.linear(x.double(), weight.double(), bias.double())
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(total.double(), residual.double() + sums, **close)
    norm = torch.linspace(0.1, 2, n).to(dtype).double()
    torch.testing.assert_close(
        normed.double(), F.rms_norm(total.double(), (n,), norm, 1e-6), **close
    )
    gate, up = sums.chunk(2, 1)
    torch.testing.assert_close(silu.double(), F.silu(gate) * up, **close)
    assert torch.equal(ids, product.argmax(1))


def test_argmax_takes_the_lowest_of_equals_and_refuses_invalid_rows() -> None:
    weight = torch.zeros(300, 4)
    weight[[7, 40, 299], 0] = 1.0
    x = torch.zeros(5, 4)
    x[0, 0] = x[1, 0] = 1.0
    x[2, 1], x[3, 0] = torch.nan, torch.inf
    ids = cpu.gemm_argmax(x, cpu.pack(weight))
    assert ids.tolist() == [7, 7, INVALID_TOKEN, INVALID_TOKEN, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounded", [False, True])
def test_rows_of_a_packed_weight_are_those_of_the_plain_one(
    dtype: torch.dtype, rounded: bool
) -> None:
    _, weight, _ = operands(100, 24, dtype)
    weight = weight.bfloat16().to(dtype) if rounded else weight
    ids = torch.tensor([99, 0, 31, 32, 33, 0])
    assert torch.equal(cpu.take_packed_rows(cpu.pack(weight), ids), weight[ids])


def test_a_nan_survives_int8() -> None:
    x, weight, _ = operands(64, 64, torch.float32, 3)
    x[1, 5], x[2, 9] = torch.nan, torch.inf
    out = cpu.gemm(x, cpu.pack(weight, None, Format.INT8))
    assert out[0].isfinite().all() and out[1:].isnan().all()
