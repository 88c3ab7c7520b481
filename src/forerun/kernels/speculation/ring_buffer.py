# mypy: allow-untyped-defs, allow-incomplete-defs
"""Ring buffers of the slots: the newest R vectors of each, by position."""

from __future__ import annotations

from torch import Tensor

from forerun.kernels.cpu import library
from forerun.kernels.cpu import step as cpu
from forerun.kernels.runtime.jit import jit, tl, triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options

BLOCK_SIZE = 4096  # elements that a CTA copies


def ring_buffer_write_ref(buffer: Tensor, slots: Tensor, positions: Tensor, values: Tensor) -> None:
    """Reference implementation of `ring_buffer_write`."""
    buffer[slots, positions.long() % buffer.shape[1]] = values


def ring_buffer_read_ref(buffer: Tensor, slots: Tensor, positions: Tensor, empty: Tensor) -> Tensor:
    """Reference implementation of `ring_buffer_read`, and on GPUs."""
    states = buffer[slots.unsqueeze(1), positions % buffer.shape[1]]
    return states.masked_fill(empty.unsqueeze(2), 0)


def ring_buffer_read(buffer: Tensor, slots: Tensor, positions: Tensor, empty: Tensor) -> Tensor:
    """buffer[slot, position mod R], several vectors per request, [B, W, C].

    Args:
        buffer: [S, R, C], any dtype.
        slots: [B] int64.
        positions: [B, W] int64, >= 0 but where `empty`.
        empty: [B, W] bool: zeros there.
    """
    if not use_triton(buffer) and library.serves_tables(buffer):
        return cpu.ring_read(buffer, slots, positions, empty)
    return ring_buffer_read_ref(buffer, slots, positions, empty)


def ring_buffer_write(buffer: Tensor, slots: Tensor, positions: Tensor, values: Tensor) -> None:
    """buffer[slot, position mod R] = value, one vector per request.

    Args:
        buffer: [S, R, C], any dtype.
        slots: [B] int64.
        positions: [B] int32, >= 0.
        values: [B, C], contiguous, of the buffer's dtype.
    """
    if not use_triton(buffer) and library.serves_tables(buffer):
        cpu.ring_write(buffer, slots, positions, values)
        return
    if not use_triton(buffer):
        ring_buffer_write_ref(buffer, slots, positions, values)
        return
    batch, size = values.shape
    block = min(BLOCK_SIZE, triton.next_power_of_2(size))
    _ring_buffer_write[(batch, triton.cdiv(size, block))](
        buffer, slots, positions, values, buffer.shape[1], size, BLOCK=block, **pdl_options(buffer)
    )


@jit
def _ring_buffer_write(
    buffer, slots, positions, values, ring_size, size, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One CTA per BLOCK elements of a vector."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(slots + request) * ring_size + tl.load(positions + request) % ring_size
    value = tl.load(values + request * size + i, mask=i < size)
    tl.store(buffer + entry * size + i, value, mask=i < size)
