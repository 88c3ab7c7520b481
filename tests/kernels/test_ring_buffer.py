"""Rows into rings: kernel and twin against a loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from forerun.kernels.speculation.ring_buffer import ring_buffer_write, ring_buffer_write_ref


@pytest.mark.parametrize("keep", [ring_buffer_write, ring_buffer_write_ref])
@pytest.mark.parametrize("columns", [1, 64, 5000])
def test_rows_land_at_their_position(
    keep: Callable[[Tensor, Tensor, Tensor, Tensor], None], columns: int, device: torch.device
) -> None:
    torch.manual_seed(0)
    ring = torch.randn(7, 4, columns, device=device).bfloat16()
    want = ring.clone()
    slots = torch.tensor([5, 0, 3], device=device)
    positions = torch.tensor([0, 6, 103], dtype=torch.int32, device=device)
    rows = torch.randn(3, columns, device=device).bfloat16()
    keep(ring, slots, positions, rows)
    for slot, position, row in zip(slots.tolist(), positions.tolist(), rows, strict=True):
        want[slot, position % 4] = row
    assert torch.equal(ring, want)
