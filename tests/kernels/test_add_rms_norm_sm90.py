"""RMSNorm of few tokens' partials on Hopper: the same bits as the kernel of more tokens."""

from __future__ import annotations

import pytest
import torch

from forerun.kernels.elementwise import add_rms_norm_sm90
from forerun.kernels.elementwise.rms_norm import add_rms_norm
from forerun.kernels.runtime.gpu import gpu_of


def test_other_tensors_do_not_fit() -> None:
    """On a CPU none does."""
    residual, weight = torch.zeros(1, 2048, dtype=torch.bfloat16), torch.ones(2048)
    assert not add_rms_norm_sm90.fits(torch.zeros(8, 1, 2048), residual, weight.bfloat16())
    assert not add_rms_norm_sm90.fits(torch.zeros(1, 2048), residual, weight.bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", add_rms_norm_sm90.HIDDEN)
@pytest.mark.parametrize("parts", [2, 4, 8, 9])
def test_bits_do_not_depend_on_the_number_of_tokens(hidden: int, parts: int) -> None:
    device = torch.device("cuda")
    if gpu_of(device).capability != 90 or gpu_of(device).amd:
        pytest.skip("for Hopper")
    random = torch.Generator(device).manual_seed(parts)
    total = add_rms_norm_sm90.MAX_TOKENS + 16
    x = torch.randn(parts, total, hidden, generator=random, device=device)
    residual = torch.randn(total, hidden, generator=random, device=device).bfloat16() * 4
    weight = torch.rand(hidden, generator=random, device=device).bfloat16()
    x[:, 3], residual[3] = 0, 0
    x[0, 8, 5] = float("nan")
    assert not add_rms_norm_sm90.fits(x, residual, weight)
    want = add_rms_norm(x, residual, weight, 1e-6)
    for tokens in (*range(1, 18), 31, 32, 33, 63, add_rms_norm_sm90.MAX_TOKENS):
        for first in range(0, total - tokens, 9):
            rows = slice(first, first + tokens)
            some = x[:, rows].contiguous(), residual[rows]
            assert add_rms_norm_sm90.fits(*some, weight)
            got = add_rms_norm(*some, weight, 1e-6)
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b[rows], rtol=0, atol=0, equal_nan=True)
