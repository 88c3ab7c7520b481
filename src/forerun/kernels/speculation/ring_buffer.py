# mypy: allow-untyped-defs, allow-incomplete-defs
"""Rows of a step into their slots' rings."""

from __future__ import annotations

from torch import Tensor

from forerun.kernels.runtime.jit import jit, tl, triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options

COLUMNS = 4096  # elements that a program copies


def ring_buffer_write_ref(ring: Tensor, slots: Tensor, positions: Tensor, rows: Tensor) -> None:
    """The twin of `ring_buffer_write`."""
    ring[slots, positions.long() % ring.shape[1]] = rows


def ring_buffer_write(ring: Tensor, slots: Tensor, positions: Tensor, rows: Tensor) -> None:
    """ring[slot, position mod R] = row.

    Args:
        ring: [S, R, C], any dtype.
        slots: [B] int64.
        positions: [B] int32, not negative.
        rows: [B, C], contiguous.
    """
    if not use_triton(ring):
        ring_buffer_write_ref(ring, slots, positions, rows)
        return
    batch, columns = rows.shape
    block = min(COLUMNS, triton.next_power_of_2(columns))
    _ring_buffer_write[(batch, triton.cdiv(columns, block))](
        ring, slots, positions, rows, ring.shape[1], columns, BLOCK=block, **pdl_options(ring)
    )


@jit
def _ring_buffer_write(
    ring, slots, positions, rows, size, columns, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A program: BLOCK columns of a row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(slots + request) * size + tl.load(positions + request) % size
    values = tl.load(rows + request * columns + at, mask=at < columns)
    tl.store(ring + row * columns + at, values, mask=at < columns)
