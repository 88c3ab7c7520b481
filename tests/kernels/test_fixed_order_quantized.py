"""GEMMs of quantized weights in a fixed order: a token has the same bits among any number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from forerun.kernels.gemm.int4 import Int4Weight
from forerun.kernels.gemm.quantized import Fp8Weight
from forerun.layers.gemm import BlockwiseGemm, Gemm, plain_gemm_for
from forerun.layers.gemm_quantized import Fp8Gemm, Int4Gemm
from forerun.layers.norm import RMSNorm
from tests.kernels.test_int4 import random_int4

pytest.importorskip("triton")

COUNTS = (1, 2, 7, 16, 17, 33, 64, 65, 128, 129, 200, 256, 500, 1000)
SHAPES = [(6144, 4096), (4096, 4096), (1536, 2048), (4096, 12288), (256, 512)]


def forms_of(gemm: Gemm, n: int, device: torch.device) -> dict[str, Callable[[Tensor], Tensor]]:
    """Everything that a GEMM computes, of rows [T, K + N] of x and residual."""
    weight = torch.rand(n, generator=torch.Generator().manual_seed(3)).to(device)
    norm = RMSNorm.of(weight.bfloat16() if device.type == "cuda" else weight, 1e-6)

    def add(rows: Tensor) -> Tensor:
        normed, total = gemm.add_rms_norm(
            rows[:, :-n].contiguous(), rows[:, -n:].contiguous(), norm, None
        )
        assert isinstance(normed, Tensor)
        return torch.cat([normed, total], 1)

    return {
        "plain": lambda rows: gemm(rows[:, :-n].contiguous()),
        "add": add,
        "silu": lambda rows: gemm.silu_and_mul(rows[:, :-n].contiguous()),
        "argmax": lambda rows: gemm.argmax(rows[:, :-n].contiguous()).unsqueeze(1),
    }


def test_blocks_are_what_the_gemm_computes() -> None:
    weight = torch.randn(24, 16)
    plain = plain_gemm_for(weight)
    blocks = forms_of(BlockwiseGemm(plain, 4), 24, weight.device)
    rows = torch.randn(11, 40)
    for name, form in forms_of(plain, 24, weight.device).items():
        for count in (1, 4, 5, 11):
            got, want = blocks[name](rows[:count]), form(rows[:count])
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def random_fp8(n: int, k: int, group: int | None) -> Fp8Weight:
    weight = Fp8Weight.empty(n, k, torch.device("cuda"), group)
    generator = torch.Generator("cuda").manual_seed(0)
    weight.quantize_(torch.randn(n, k, generator=generator, device="cuda") * k**-0.5)
    return weight


def hold_bits(gemm: Gemm, n: int, k: int) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    rows = torch.randn(max(COUNTS), k + n, generator=generator, device="cuda").bfloat16()
    for name, form in forms_of(gemm, n, rows.device).items():
        whole = form(rows)
        for count in COUNTS:
            assert torch.equal(form(rows[:count]), whole[:count]), (name, count)
            assert torch.equal(form(rows[-count:]), whole[-count:]), (name, count)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_fp8(n: int, k: int, group: int | None) -> None:
    weight = random_fp8(n, k, group)
    gemm = Fp8Gemm(weight, None).in_fixed_order()
    if gemm is None:
        pytest.skip("needs Hopper and NVRTC")
    hold_bits(gemm, n, k)
    x = torch.randn(200, k, device="cuda").bfloat16()
    exact = x.double() @ weight.dequantize().double().T
    assert (gemm(x).double() - exact).norm() / exact.norm() < 3e-3


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_int4(n: int, k: int) -> None:
    weight = Int4Weight.of(*(part.cuda() for part in random_int4(n, k)))
    gemm = Int4Gemm(weight, None).in_fixed_order()
    if gemm is None:
        pytest.skip("needs Hopper and NVRTC")
    hold_bits(gemm, n, k)
