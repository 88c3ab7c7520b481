"""Argmax, accept and commit against plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from forerun.kernels.sampling.argmax import argmax
from forerun.kernels.speculation.accept import SimulatedAcceptance, accept_commit, accept_commit_ref
from forerun.kernels.speculation.decode_inputs import prepare, prepare_ref


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
    signs = logits * 0  # 0 and -0 are equal
    assert torch.equal(argmax(signs), torch.zeros_like(first))
    holes = torch.where(logits > 1, torch.nan, logits)
    assert torch.equal(argmax(holes), holes.nan_to_num(-torch.inf).argmax(-1))


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
    taken[-2:] = slots  # the padding slot
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
    new = accept_commit_ref(draft, drawn, taken, start, *want, must if forced else None)
    tables = [table.to(device) for table in tables]
    inputs = [x.to(device) for x in (draft, drawn, taken, start)]
    got = accept_commit(*inputs, *tables, must.to(device) if forced else None)

    if not forced:
        assert new.tolist() == [*range(1, drafts + 1), *[width] * 3]
    assert torch.equal(got.cpu(), new)
    for table, expected in zip(tables, want, strict=True):
        # What padded rows drew goes where padding_slot looks, in any order.
        assert torch.equal(table.cpu()[:-1], expected[:-1])
    assert tables[0][-1] == 0


@pytest.mark.parametrize("mean", [1.0, 1.2, 3.0, 6.5, 10.0])
def test_pace(mean: float, device: torch.device) -> None:
    """Steps of a slot add up to the mean, in the kernel as in its twin, also after many of them."""
    slots, width, steps = torch.tensor([2, 0]), 10, 40
    kernel, twin = (
        SimulatedAcceptance.of(mean, 4, device),
        SimulatedAcceptance.of(mean, 4, torch.device("cpu")),
    )
    for pace in (kernel, twin):
        pace.steps[0] = 50_000
    drawn = torch.zeros(2, width, dtype=torch.int64)
    total = torch.zeros(2, dtype=torch.int64)
    for _ in range(steps):
        start = torch.zeros(2, dtype=torch.int32)
        tables = [start.new_zeros(4), drawn.new_zeros(4), start.new_zeros(4, 16)]
        want = accept_commit_ref(drawn[:, 1:] + 1, drawn, slots, start, *tables, twin)
        on_device = [x.to(device) for x in (drawn[:, 1:] + 1, drawn, slots, start, *tables)]
        new = accept_commit(*on_device, kernel)
        assert torch.equal(new.cpu(), want)
        assert int(mean) <= int(want.min()) and int(want.max()) <= int(mean) + 1
        total += want
    assert total.tolist() == [int(steps * mean + 1e-6)] * 2
    assert kernel.steps.tolist() == [50_000 + steps, 0, steps, 0]
    for pace in (kernel, twin):
        pace.set(2.0)
    assert twin.next(slots).tolist() == [2, 2]
    assert accept_commit(*on_device, kernel).tolist() == [2, 2]


@pytest.mark.parametrize("width", [1, 10, 16])
@pytest.mark.parametrize("page", [1, 16])
def test_prepare(page: int, width: int, device: torch.device) -> None:
    check_prepare(5, 9, 60, width, page, device)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 32])
def test_prepare_real(batch: int, device: torch.device) -> None:
    check_prepare(batch, 64, 40_000, 16, 16, device)


def check_prepare(
    batch: int, slots: int, positions: int, width: int, page: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(0)
    pages = -(-positions // page)
    kv_len = torch.randint(0, positions - width, (slots,), generator=generator, dtype=torch.int32)
    last = torch.randint(0, 10**9, (slots,), generator=generator)
    table = torch.randint(0, 2**20, (slots, pages), generator=generator, dtype=torch.int32)
    taken = torch.randperm(slots, generator=generator)[:batch]
    bound = int(kv_len[taken].max()) + width
    want = prepare_ref(taken, kv_len, last, table, width, page, bound)
    got = prepare(*(x.to(device) for x in (taken, kv_len, last, table)), width, page, bound)
    for name, expected in vars(want).items():
        found = vars(got)[name]
        assert found.dtype == expected.dtype
        assert torch.equal(found.cpu(), expected), name
    # By the definition: the last row of the last request.
    position = int(kv_len[taken[-1]]) + width - 1
    row = int(table[taken[-1], position // page]) * page + position % page
    assert int(got.rows[-1]) == row and int(got.positions[-1]) == position
