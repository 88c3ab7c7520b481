"""Inputs of the verify pass: kernel against reference, and the reference by hand."""

from __future__ import annotations

import pytest
import torch

from forerun.kernels.speculation.verify_inputs import build_verify_inputs, build_verify_inputs_ref


def test_by_hand() -> None:
    limits = torch.tensor([9, 3, 2], dtype=torch.int32)
    input_ids, candidates = build_verify_inputs_ref(
        torch.tensor([7, 8]),
        torch.tensor([[1, 2, 3], [4, 99, -5]]),
        torch.tensor([2, 1]),
        limits,
        None,
        vocab_size=10,
    )
    assert input_ids.tolist() == [[7, 1, 2, 3], [8, 4, 9, 0]]
    assert candidates.tolist() == [[1, 2, -1], [4, 99, -5]]


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 16, 33])
@pytest.mark.parametrize("tree", [False, True])
def test_kernel_matches_reference(num_tokens: int, tree: bool, device: str) -> None:
    def integers(*shape: int, high: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(0, high, shape, dtype=dtype, device=device)

    torch.manual_seed(num_tokens)
    draft = integers(5, num_tokens + 3, high=120)[:, 2 : num_tokens + 1]
    depth = integers(5, num_tokens, high=6, dtype=torch.int32)[:, 1:] if tree else None
    slots = torch.randperm(8, device=device)[:5]
    args = (integers(5, high=100), draft, slots, integers(8, high=9, dtype=torch.int32), depth, 100)
    for got, want in zip(build_verify_inputs(*args), build_verify_inputs_ref(*args), strict=True):
        assert torch.equal(got, want)
