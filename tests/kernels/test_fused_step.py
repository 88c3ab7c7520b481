"""Argmax, accept and commit against plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from forerun.kernels.argmax import argmax
from forerun.kernels.commit import accept_commit, accept_commit_torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 7), (3, 2048), (2, 9001)])
def test_argmax(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    check_argmax(rows, vocab, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 480])
def test_argmax_real(rows: int, device: torch.device) -> None:
    check_argmax(rows, 151_936, torch.bfloat16, device)


def check_argmax(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab + 3, generator=generator).to(device, dtype)[:, :vocab]
    assert torch.equal(argmax(logits), logits.float().cpu().argmax(-1).to(device))
    # Many equals: the lowest id, wherever the parts are cut.
    tied = logits.clamp(max=1.0)
    first = (tied == tied.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(argmax(tied), first)
    assert torch.equal(argmax(torch.full_like(logits, -torch.inf)), torch.zeros_like(first))


@pytest.mark.parametrize("drafts", [0, 1, 4, 15])
@pytest.mark.parametrize("forced", [False, True])
def test_accept_commit(drafts: int, forced: bool, device: torch.device) -> None:
    """Requests that agree in 0 … K places, in shuffled slots, with padded rows."""
    width, slots, batch = drafts + 1, 24, drafts + 3
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 50, (batch, width), generator=generator)
    draft = drawn[:, :drafts].clone()
    for i in range(drafts):
        draft[i, i] += 1
    taken = torch.randperm(slots, generator=generator)[:batch]
    taken[-2:] = slots  # nobody's
    start = torch.randint(0, 30, (batch,), generator=generator, dtype=torch.int32)
    start[-2:] = 0
    must = torch.randint(1, width + 1, (batch,), generator=generator, dtype=torch.int32)
    tables = [
        torch.arange(slots + 1, dtype=torch.int32),
        torch.arange(slots + 1),
        torch.zeros(slots + 1, 64, dtype=torch.int32),
    ]
    tables[0][-1] = 0
    want = [table.clone() for table in tables]
    new = accept_commit_torch(draft, drawn, taken, start, *want, must if forced else None)
    tables = [table.to(device) for table in tables]
    inputs = [x.to(device) for x in (draft, drawn, taken, start)]
    got = accept_commit(*inputs, *tables, must.to(device) if forced else None)

    if not forced:
        assert new.tolist() == [*range(1, drafts + 1), *[width] * 3]
    assert torch.equal(got.cpu(), new)
    for table, expected in zip(tables, want, strict=True):
        # What padded rows drew goes where nobody looks, in any order.
        assert torch.equal(table.cpu()[:-1], expected[:-1])
    assert tables[0][-1] == 0
