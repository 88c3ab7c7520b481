# mypy: allow-untyped-defs, allow-incomplete-defs
"""The head of a decode step: what the batch needs from the slots' tables, in one kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.attention.paged_kv import pool_rows_ref
from forerun.kernels.runtime.jit import jit_no_specialize, tl, triton, use_triton

PAGES = 1024  # page ids a program copies


@dataclass(frozen=True)
class Prepared:
    """B requests of W rows each, in the batch's order."""

    start: Tensor  # [B] int32, committed length: the position of the first row
    last: Tensor  # [B] int64, the token that stands there
    positions: Tensor  # [B * W] int32
    next_positions: Tensor  # [B * W] int32: positions + 1, of the tokens that the rows draw
    rows: Tensor  # [B * W] int64, pool rows
    page_rows: Tensor  # [B, pages] int32


def prepare_ref(
    slots: Tensor,
    kv_len: Tensor,
    last_token: Tensor,
    page_table: Tensor,
    width: int,
    page: int,
    kv_len_ub: int,
) -> Prepared:
    """The twin of `prepare`."""
    batch, pages = slots.shape[0], min(page_table.shape[1], -(-kv_len_ub // page))
    start, last = kv_len[slots], last_token[slots]
    page_rows = page_table[slots, :pages]
    offsets = torch.arange(width, dtype=torch.int32, device=slots.device)
    positions = (start.unsqueeze(1) + offsets).flatten()
    rows = pool_rows_ref(page_rows, start, None, width, batch * width, page)
    return Prepared(start, last, positions, positions + 1, rows, page_rows)


def prepare(
    slots: Tensor,
    kv_len: Tensor,
    last_token: Tensor,
    page_table: Tensor,
    width: int,
    page: int,
    kv_len_ub: int,
) -> Prepared:
    """Gathers a batch from the slots' tables and lays out its rows.

    It is launched without programmatic dependence, and kernels that read its results before they
    wait for their predecessor (attention, rope) rely on another such kernel in between: the
    embedding's.

    Args:
        slots: [B] int64.
        kv_len: [S] int32, committed lengths.
        last_token: [S] int64.
        page_table: [S, P] int32; pages for W rows past the committed length are there.
        width: W.
        page: positions a page.
        kv_len_ub: at least every committed length plus W. Only so many positions' pages are copied.
    """
    if not use_triton(slots):
        return prepare_ref(slots, kv_len, last_token, page_table, width, page, kv_len_ub)
    batch, pages = slots.shape[0], min(page_table.shape[1], triton.cdiv(kv_len_ub, page))

    def made(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=slots.device)

    total = batch * width
    found = Prepared(
        made(batch),
        made(batch, dtype=torch.int64),
        made(total),
        made(total),
        made(total, dtype=torch.int64),
        made(batch, pages),
    )
    # Not from `pages`, which grows with the texts: a kernel for each size would be compiled then.
    block = min(PAGES, triton.next_power_of_2(page_table.shape[1]))
    _prepare[(batch, triton.cdiv(pages, block))](
        slots, kv_len, last_token, page_table,
        found.start, found.last, found.positions, found.next_positions, found.rows, found.page_rows,
        page_table.stride(0), pages,
        WIDTH=width, PAGE=page, ROWS=triton.next_power_of_2(width), BLOCK=block,
        num_warps=4 if block > 256 else 1,
    )  # fmt: skip
    return found


@jit_no_specialize("pages")
def _prepare(
    slots, kv_len, last_token, page_table,
    start_ptr, last_ptr, positions, next_positions, rows_ptr, page_rows,
    table_row, pages,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program: BLOCK page ids of a request; the first also does its rows."""
    request, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + request)
    table = page_table + slot * table_row
    at = part * BLOCK + tl.arange(0, BLOCK)
    inside = at < pages
    tl.store(page_rows + request * pages + at, tl.load(table + at, mask=inside), mask=inside)
    if part == 0:
        start = tl.load(kv_len + slot)
        tl.store(start_ptr + request, start)
        tl.store(last_ptr + request, tl.load(last_token + slot))
        i = tl.arange(0, ROWS)
        real = i < WIDTH
        position = start + i
        id = tl.load(table + position // PAGE, mask=real, other=0).to(tl.int64)
        place = request * WIDTH + i
        tl.store(positions + place, position, mask=real)
        tl.store(next_positions + place, position + 1, mask=real)
        tl.store(rows_ptr + place, id * PAGE + position % PAGE, mask=real)
