"""The most probable tokens: the lowest id of equals first, whatever a batch asks for."""

from __future__ import annotations

import pytest
import torch

from forerun.kernels.sampling.sort_keys import from_sort_keys, sort_keys
from forerun.sampling.logprobs import LogprobRows, top_tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [7, 300, 4000])
def test_equals_are_told_by_their_ids(
    vocab: int, dtype: torch.dtype, each_device: torch.device
) -> None:
    """Of bfloat16 many values are equal, and of integers nearly all."""
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(0)) * 3
    logits[2:4] = logits[2:4].round()
    logits[4], logits[5, ::2] = 0.0, float("-inf")
    logits[4, ::3] *= -1  # -0 equals 0
    logits = logits.to(each_device, dtype)
    want, order = (logits.float() + 0.0).sort(dim=-1, descending=True, stable=True)
    for n in range(min(20, vocab) + 1):
        values, ids = top_tokens(logits, n)
        assert torch.equal(ids, order[:, :n]) and torch.equal(values, want[:, :n])
        alone = [top_tokens(row[None], n)[1] for row in logits]
        assert torch.equal(torch.cat(alone), ids)


def test_what_others_ask_for_does_not_matter(each_device: torch.device) -> None:
    logits = torch.randn(2, 3, 500, device=each_device).round()
    none = torch.zeros(2, 0, dtype=torch.int64, device=each_device)
    few, many = LogprobRows.of(logits, 3, none), LogprobRows.of(logits, 11, none)
    assert few.top_ids.shape == (2, 3, 3)
    assert torch.equal(few.top_ids, many.top_ids[..., :3])
    assert torch.equal(few.top, many.top[..., :3])
    assert LogprobRows.of(logits, 0, none).top.shape == (2, 3, 0)


def test_keys_sort_like_values_and_ids() -> None:
    values = torch.tensor([1.5, -2.0, 0.0, -0.0, 1.5, float("inf"), float("-inf"), -1e-30])
    ids = torch.tensor([9, 1, 5, 4, 8, 0, 2**31 - 1, 7])
    keys = sort_keys(values, ids)
    order = sorted(range(8), key=lambda i: (float(values[i]), int(ids[i])))
    assert keys.argsort().tolist() == order
    back, same = from_sort_keys(keys)
    assert torch.equal(back, values) and torch.equal(same, ids)


def test_a_vocabulary_of_fewer_tokens(each_device: torch.device) -> None:
    values, ids = top_tokens(torch.zeros(2, 5, device=each_device), 20)
    assert ids.tolist() == [list(range(5))] * 2 and values.shape == (2, 5)
