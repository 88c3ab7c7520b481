# mypy: allow-untyped-defs, allow-incomplete-defs
"""The paged K/V cache: which KV slot a token has, and K/V written there.

Position p of request b has KV slot `page_table[b, p // P] * P + p % P`, P the page size: an index
into the pool with its first two dimensions, pages and offsets, flattened.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.cpu import library
from forerun.kernels.cpu import step as cpu
from forerun.kernels.runtime.fp8 import FP8, as_bits, encode_e4m3, encode_e4m3_ref
from forerun.kernels.runtime.jit import jit, jit_no_specialize, tl, triton, use_triton
from forerun.kernels.speculation.ragged import RaggedRows

MAX_BLOCK = 64  # tokens that a CTA maps
MAX_CHUNK = 1024  # elements of a token's K or V that a CTA copies


@dataclass(frozen=True)
class PagedKV:
    """The K/V of one layer, and where each of B requests finds its own."""

    k: Tensor  # pool [pages, P, Hkv, D], any float dtype or float8_e4m3fn
    v: Tensor
    page_table: Tensor  # [B, pages] int32
    start: Tensor  # [B] int32, position of each request's first query token
    rows: RaggedRows | None = None  # which query tokens are whose; None: requests have as many

    @property
    def page_size(self) -> int:
        return self.k.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[2]


def compute_kv_slots(
    page_table: Tensor,
    start: Tensor,
    cu_q_lens: Tensor | None,
    max_q_len: int,
    num_tokens: int,
    page_size: int,
) -> Tensor:
    """The KV slot of every token of a batch, [num_tokens] int64.

    Args:
        page_table: [B, pages] int32.
        start: [B] int32, position of each request's first token.
        cu_q_lens: [B + 1] int32, cumulative token counts; None: every request has `max_q_len`.
        max_q_len: tokens of the longest request.
        num_tokens: of the batch.
        page_size: tokens per page.
    """
    if not use_triton(start) and cu_q_lens is None and library.serves_tables(start):
        return cpu.kv_slots(page_table, start, max_q_len, page_size)
    if not use_triton(start):
        return compute_kv_slots_ref(page_table, start, cu_q_lens, max_q_len, num_tokens, page_size)
    kv_slots = torch.empty(num_tokens, dtype=torch.int64, device=start.device)
    ragged = cu_q_lens is not None
    block = MAX_BLOCK if ragged else min(MAX_BLOCK, triton.next_power_of_2(max_q_len))
    _compute_kv_slots[(start.shape[0], triton.cdiv(max_q_len, block))](
        page_table, start, start if cu_q_lens is None else cu_q_lens, kv_slots,
        page_table.stride(0), max_q_len,
        PAGE_SIZE=page_size, RAGGED=ragged, BLOCK=block, num_warps=1 if block < 64 else 2,
    )  # fmt: skip
    return kv_slots


def compute_kv_slots_ref(
    page_table: Tensor,
    start: Tensor,
    cu_q_lens: Tensor | None,
    max_q_len: int,
    num_tokens: int,
    page_size: int,
) -> Tensor:
    """Reference implementation of `compute_kv_slots`."""
    index = torch.arange(num_tokens, device=start.device)
    if cu_q_lens is None:
        request, offset = index // max_q_len, index % max_q_len
    else:
        request = torch.searchsorted(cu_q_lens[1:].contiguous(), index.int(), right=True)
        offset = index - cu_q_lens[request]
    position = start[request].long() + offset
    page = page_table[request, position // page_size].long()
    return page * page_size + position % page_size


@jit_no_specialize("max_q_len")
def _compute_kv_slots(
    page_table, start_ptr, cu_q_lens, kv_slots, page_table_stride, max_q_len,
    PAGE_SIZE: tl.constexpr, RAGGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One CTA per BLOCK tokens of a request."""
    request = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin, q_len = request * max_q_len, max_q_len
    if RAGGED:
        begin = tl.load(cu_q_lens + request)
        q_len = tl.load(cu_q_lens + request + 1) - begin
    position = tl.load(start_ptr + request) + i
    inside = i < q_len
    table = page_table + request.to(tl.int64) * page_table_stride
    page = tl.load(table + position // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
    tl.store(kv_slots + begin + i, page * PAGE_SIZE + position % PAGE_SIZE, mask=inside)


def write_kv(k: Tensor, v: Tensor, kv_slots: Tensor, k_pool: Tensor, v_pool: Tensor) -> None:
    """Stores the K/V of T tokens in the pools.

    Args:
        k, v: [T, Hkv, D]; the heads of a token are contiguous, tokens at any stride (views into
            the output of a QKV GEMM).
        kv_slots: [T] int64, distinct but for the null page.
        k_pool, v_pool: [pages, P, Hkv, D], any float dtype; float8 is clamped.
    """
    if not use_triton(k):
        write_kv_ref(k, v, kv_slots, k_pool, v_pool)
        return
    num_tokens, heads, dim = k.shape
    k, v = _with_contiguous_heads(k), _with_contiguous_heads(v)
    size = heads * dim
    chunk = min(MAX_CHUNK, triton.next_power_of_2(size))
    _write_kv[(num_tokens, triton.cdiv(size, chunk))](
        k, v, kv_slots, as_bits(k_pool), as_bits(v_pool), k.stride(0), v.stride(0),
        SIZE=size, FP8=k_pool.dtype == FP8, CHUNK=chunk, num_warps=2 if chunk >= 512 else 1,
    )  # fmt: skip


def write_kv_ref(k: Tensor, v: Tensor, kv_slots: Tensor, k_pool: Tensor, v_pool: Tensor) -> None:
    """Reference implementation of `write_kv`."""
    for x, pool in ((k, k_pool), (v, v_pool)):
        cast = encode_e4m3_ref(x) if pool.dtype == FP8 else x.to(pool.dtype)
        as_bits(pool).flatten(0, 1).index_copy_(0, kv_slots, as_bits(cast))


def _with_contiguous_heads(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@jit
def _write_kv(
    k_ptr, v_ptr, kv_slots, k_pool, v_pool, k_stride, v_stride,
    SIZE: tl.constexpr, FP8: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One CTA per CHUNK elements of a token."""
    token = tl.program_id(0).to(tl.int64)
    kv_slot = tl.load(kv_slots + token)
    i = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = i < SIZE
    k = tl.load(k_ptr + token * k_stride + i, mask=inside)
    v = tl.load(v_ptr + token * v_stride + i, mask=inside)
    if FP8:
        k, v = encode_e4m3(k.to(tl.float32)), encode_e4m3(v.to(tl.float32))
    tl.store(k_pool + kv_slot * SIZE + i, k.to(k_pool.dtype.element_ty), mask=inside)
    tl.store(v_pool + kv_slot * SIZE + i, v.to(v_pool.dtype.element_ty), mask=inside)
