"""Masks of forbidden tokens: the reference against bits, the kernel against it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forerun.kernels.sampling.bitmask import TokenMasks, mask_tokens, mask_tokens_ref

pytest.importorskip("triton")


def masks(requests: int, width: int, vocab: int, rows: int) -> TokenMasks:
    """The first position has a mask."""
    generator = torch.Generator().manual_seed(vocab)
    bits = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), generator=generator)
    index = torch.randint(-1, rows, (requests, width), generator=generator)
    index[0, 0] = 0
    return TokenMasks(bits.int(), index.int())


def logits_like(requests: int, width: int, vocab: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(requests, width, vocab + 24, generator=generator).to(dtype)
    return wide[:, :, 8 : 8 + vocab]  # strides of its own, no aligned beginning


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("requests", "width", "vocab"), [(1, 1, 31), (3, 4, 100), (2, 3, 9001)])
def test_reference_masks_the_bits_that_are_0(
    requests: int, width: int, vocab: int, dtype: torch.dtype
) -> None:
    logits, mask = logits_like(requests, width, vocab, dtype), masks(requests, width, vocab, 3)
    before = logits.clone()
    mask_tokens_ref(logits, mask)
    for request in range(requests):
        for node in range(width):
            row = int(mask.rows[request, node])
            words = [-1] * 400 if row < 0 else mask.bitmask[row].tolist()
            for token in [0, 1, 30, vocab // 2, vocab - 2, vocab - 1]:
                allowed = words[token // 32] >> (token % 32) & 1
                want = before[request, node, token] if allowed else torch.tensor(-torch.inf)
                assert logits[request, node, token] == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("requests", "width", "vocab"), [(1, 1, 31), (3, 4, 100), (2, 3, 9001)])
def test_kernel_equals_reference(
    requests: int, width: int, vocab: int, dtype: torch.dtype, device: torch.device
) -> None:
    hold(logits_like(requests, width, vocab, dtype), masks(requests, width, vocab, 3), device)


def hold(logits: Tensor, mask: TokenMasks, device: torch.device) -> None:
    want = logits.clone()
    mask_tokens_ref(want, mask)
    assert (want == -torch.inf).any()
    result = torch.empty(*logits.shape[:2], logits.shape[2] + 5, dtype=logits.dtype, device=device)
    result = result[:, :, : logits.shape[2]].copy_(logits)
    mask_tokens(result, TokenMasks(mask.bitmask.to(device), mask.rows.to(device)))
    assert torch.equal(result.cpu(), want)


def test_a_group_of_requests() -> None:
    logits, mask = logits_like(4, 2, 70, torch.float32), masks(4, 2, 70, 5)
    want = logits.clone()
    mask_tokens_ref(want, mask)
    for first, last in ((0, 1), (1, 4)):
        mask_tokens(logits[first:last], mask.between(first, last))
    assert torch.equal(logits, want)


@pytest.mark.gpu
def test_kernel_equals_reference_at_the_size_of_a_step(device: torch.device) -> None:
    hold(logits_like(9, 16, 151936, torch.bfloat16), masks(9, 16, 151936, 60), device)
