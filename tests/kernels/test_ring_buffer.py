"""Ring buffer writes: kernel and reference against a loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from forerun.kernels.speculation.ring_buffer import (
    ring_buffer_read,
    ring_buffer_write,
    ring_buffer_write_ref,
)


@pytest.mark.parametrize("write", [ring_buffer_write, ring_buffer_write_ref])
@pytest.mark.parametrize("size", [1, 64, 5000])
def test_vectors_land_at_their_position(
    write: Callable[[Tensor, Tensor, Tensor, Tensor], None], size: int, device: torch.device
) -> None:
    torch.manual_seed(0)
    buffer = torch.randn(7, 4, size, device=device).bfloat16()
    want = buffer.clone()
    slots = torch.tensor([5, 0, 3], device=device)
    positions = torch.tensor([0, 6, 103], dtype=torch.int32, device=device)
    values = torch.randn(3, size, device=device).bfloat16()
    write(buffer, slots, positions, values)
    for slot, position, value in zip(slots.tolist(), positions.tolist(), values, strict=True):
        want[slot, position % 4] = value
    assert torch.equal(buffer, want)


def test_reads_are_what_was_written_last_and_zeros(device: torch.device) -> None:
    buffer = torch.randn(7, 4, 6, device=device)
    slots = torch.tensor([5, 0], device=device)
    positions = torch.tensor([[3, 4, 5], [10, 11, 12]], device=device)
    empty = torch.tensor([[False] * 3, [False, True, True]], device=device)
    got = ring_buffer_read(buffer, slots, positions, empty)
    assert torch.equal(got[0], buffer[5, [3, 0, 1]])
    assert torch.equal(got[1, 0], buffer[0, 2]) and not got[1, 1:].any()
