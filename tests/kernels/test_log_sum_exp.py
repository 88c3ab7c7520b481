"""log Σ exp of rows, against PyTorch's in float64; the same bits in any batch."""

from __future__ import annotations

import pytest
import torch

from forerun.kernels.sampling.log_sum_exp import log_sum_exp, log_sum_exp_ref

pytest.importorskip("triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 100, 4096, 9001])
def test_against_torch(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    logits = (8 * torch.randn(3, vocab, device=device)).to(dtype)
    logits[1, : vocab // 2] = -torch.inf
    expected = logits.double().logsumexp(-1)
    assert torch.allclose(log_sum_exp(logits).double(), expected, atol=2e-6, rtol=2e-6)
    assert torch.allclose(log_sum_exp_ref(logits).double(), expected, atol=2e-6, rtol=2e-6)


def test_rows_without_a_token(device: torch.device) -> None:
    logits = torch.zeros(3, 5000, device=device)
    logits[0] = -torch.inf
    logits[1, 4500] = torch.nan
    logits[2, 4500] = torch.inf
    out = log_sum_exp(logits)
    assert out[0] == -torch.inf
    assert out[1].isnan()
    assert not out[2].isfinite()


@pytest.mark.exhaustive
def test_a_row_has_the_same_bits_in_any_batch(device: torch.device) -> None:
    logits = 8 * torch.randn(70, 9001, device=device)
    whole = log_sum_exp(logits)
    for first, last in ((0, 1), (3, 4), (5, 64), (69, 70)):  # also where a row begins unaligned
        assert torch.equal(log_sum_exp(logits[first:last]), whole[first:last])
