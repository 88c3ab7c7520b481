# mypy: allow-untyped-defs, allow-incomplete-defs
"""Where the rows of a forward live in a paged pool, and their K/V written there.

Position p of request b is pool row `page_table[b, p // P] * P + p % P`, P the page size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.runtime.fp8 import FP8, as_bits, encode_e4m3, encode_e4m3_ref
from forerun.kernels.runtime.jit import jit, jit_no_specialize, tl, triton, use_triton

ROWS = 64  # query rows a program maps
CHUNK = 1024  # elements of a pool row a program copies


def pool_rows(
    page_table: Tensor, start: Tensor, first: Tensor | None, longest: int, total: int, page: int
) -> Tensor:
    """Pool row of every query row, [total] int64.

    Args:
        page_table: [B, pages] int32.
        start: [B] int32, position of each request's first row.
        first: [B + 1] int32, where each request's rows begin in the batch; None: every request
            has `longest` rows.
        longest: rows of the longest request.
        total: rows of the batch.
        page: positions a page.
    """
    if not use_triton(start):
        return pool_rows_ref(page_table, start, first, longest, total, page)
    rows = torch.empty(total, dtype=torch.int64, device=start.device)
    block = ROWS if first is not None else min(ROWS, triton.next_power_of_2(longest))
    grid = (start.shape[0], triton.cdiv(longest, block))
    _pool_rows[grid](
        page_table,
        start,
        start if first is None else first,
        rows,
        page_table.stride(0),
        longest,
        PAGE=page,
        RAGGED=first is not None,
        BLOCK=block,
        num_warps=1 if block < 64 else 2,
    )
    return rows


def pool_rows_ref(
    page_table: Tensor, start: Tensor, first: Tensor | None, longest: int, total: int, page: int
) -> Tensor:
    """Twin of `pool_rows`."""
    index = torch.arange(total, device=start.device)
    if first is None:
        request, row = index // longest, index % longest
    else:
        request = torch.searchsorted(first[1:].contiguous(), index.int(), right=True)
        row = index - first[request]
    position = start[request].long() + row
    return page_table[request, position // page].long() * page + position % page


@jit_no_specialize("longest")
def _pool_rows(
    table_ptr, start_ptr, first_ptr, rows_ptr, table_row, longest,
    PAGE: tl.constexpr, RAGGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin, count = request * longest, longest
    if RAGGED:
        begin = tl.load(first_ptr + request)
        count = tl.load(first_ptr + request + 1) - begin
    position = tl.load(start_ptr + request) + row
    inside = row < count
    table = table_ptr + request.to(tl.int64) * table_row
    page = tl.load(table + position // PAGE, mask=inside, other=0).to(tl.int64)
    tl.store(rows_ptr + begin + row, page * PAGE + position % PAGE, mask=inside)


def write_kv(k: Tensor, v: Tensor, rows: Tensor, k_pool: Tensor, v_pool: Tensor) -> None:
    """Stores k, v [T, Hkv, D] in rows [T] int64 of pools [pages, P, Hkv, D].

    Heads of a token must lie side by side; tokens may be apart (views into a QKV product).
    """
    if not use_triton(k):
        write_kv_ref(k, v, rows, k_pool, v_pool)
        return
    total, heads, dim = k.shape
    k, v = _packed(k), _packed(v)
    size = heads * dim
    chunk = min(CHUNK, triton.next_power_of_2(size))
    _write_kv[(total, triton.cdiv(size, chunk))](
        k,
        v,
        rows,
        as_bits(k_pool),
        as_bits(v_pool),
        k.stride(0),
        v.stride(0),
        SIZE=size,
        FP8=k_pool.dtype == FP8,
        CHUNK=chunk,
        num_warps=2 if chunk >= 512 else 1,
    )


def write_kv_ref(k: Tensor, v: Tensor, rows: Tensor, k_pool: Tensor, v_pool: Tensor) -> None:
    """Twin of `write_kv`."""
    for x, pool in ((k, k_pool), (v, v_pool)):
        cast = encode_e4m3_ref(x) if pool.dtype == FP8 else x.to(pool.dtype)
        as_bits(pool).flatten(0, 1).index_copy_(0, rows, as_bits(cast))


def _packed(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@jit
def _write_kv(
    k_ptr, v_ptr, rows_ptr, k_pool, v_pool, k_row, v_row,
    SIZE: tl.constexpr, FP8: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + token)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = at < SIZE
    k = tl.load(k_ptr + token * k_row + at, mask=inside)
    v = tl.load(v_ptr + token * v_row + at, mask=inside)
    if FP8:
        k, v = encode_e4m3(k.to(tl.float32)), encode_e4m3(v.to(tl.float32))
    tl.store(k_pool + row * SIZE + at, k.to(k_pool.dtype.element_ty), mask=inside)
    tl.store(v_pool + row * SIZE + at, v.to(v_pool.dtype.element_ty), mask=inside)
