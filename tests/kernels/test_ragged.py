"""The rows of a ragged pass: kernel against reference, and the reference by hand."""

from __future__ import annotations

import pytest
import torch

from forerun.kernels.speculation.ragged import pack_tokens, pack_tokens_ref


def test_by_hand() -> None:
    widths = torch.tensor([2, 1, 3], dtype=torch.int32)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    candidates = torch.tensor([[2, 3], [5, 6], [8, 9]])
    positions = torch.tensor([10, 11, 12, 0, 1, 2, 5, 6, 7], dtype=torch.int32)
    packed = pack_tokens_ref(widths, 6, ids, candidates, positions, positions.long() + 100)
    rows = packed.rows
    assert (rows.count, rows.max_width) == (6, 3)
    assert rows.first.tolist() == [0, 2, 3, 6]
    assert rows.places.tolist() == [0, 1, 3, 6, 7, 8]
    assert rows.owner.tolist() == [0, 0, 1, 2, 2, 2]
    assert rows.rows.tolist() == [0, 1, 1, 2, 2, 2, 3, 4, 5]
    assert packed.ids.tolist() == [1, 2, 4, 7, 8, 9]
    assert packed.positions.tolist() == [10, 11, 0, 5, 6, 7]
    assert packed.kv_slots.tolist() == [110, 111, 100, 105, 106, 107]
    assert candidates.tolist() == [[2, -1], [-1, -1], [8, 9]]
    assert rows.unpack(packed.ids).tolist() == [1, 2, 2, 4, 4, 4, 7, 8, 9]
    assert rows.pack(rows.unpack(packed.ids)).tolist() == packed.ids.tolist()


@pytest.mark.parametrize("batch", [1, 2, 7, 64])
@pytest.mark.parametrize("width", [2, 5, 16, 33])
def test_kernel_matches_reference(batch: int, width: int, each_device: torch.device) -> None:
    torch.manual_seed(batch * width)
    widths = torch.randint(1, width + 1, (batch,), dtype=torch.int32, device=each_device)
    ids, candidates = (
        torch.randint(0, 99, (batch, n), device=each_device) for n in (width, width - 1)
    )
    positions = torch.randint(0, 999, (batch * width,), dtype=torch.int32, device=each_device)
    given = ids, candidates, positions, torch.randperm(batch * width, device=each_device)
    count = int(widths.sum())
    other = candidates.clone()
    got = pack_tokens(widths, count, *given)
    want = pack_tokens_ref(widths, count, given[0], other, *given[2:])
    assert torch.equal(candidates, other)
    for mine, theirs in zip(vars(got.rows).values(), vars(want.rows).values(), strict=True):
        assert torch.equal(mine, theirs)
    for name in ("ids", "positions", "kv_slots"):
        assert torch.equal(vars(got)[name], vars(want)[name])


def test_rows_of_any_shape(each_device: torch.device) -> None:
    widths = torch.tensor([2, 3, 1], dtype=torch.int32, device=each_device)
    ids = torch.arange(9, device=each_device).view(3, 3)
    packed = pack_tokens(widths, 6, ids, ids[:, 1:].clone(), ids.flatten().int(), ids.flatten())
    table = torch.randn(9, 4, 5, device=each_device)
    for each in (table, table.transpose(1, 2), table[:, 0], table[:, 0, 0]):
        assert torch.equal(packed.rows.pack(each), each[packed.rows.places])
    assert torch.equal(packed.rows.unpack(table[:6]), table[packed.rows.rows])
