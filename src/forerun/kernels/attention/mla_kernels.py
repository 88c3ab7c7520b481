# mypy: allow-untyped-defs, allow-incomplete-defs
"""The kernel of `mla.py`, which explains it."""

from __future__ import annotations

from forerun.kernels.attention.decode_kernels import (
    attends,
    cast_q,
    kv_slots_of,
    load_kv,
    load_page_ids,
    online_softmax_step,
    prefetch_latent,
    tokens_of,
)
from forerun.kernels.runtime.jit import jit, tl


@jit
def mla_attention_kernel(
    q_ptr, pool, latent_descriptor, rope_descriptor, out_ptr, lse_ptr, page_table, start_ptr,
    first_ptr, tile_map, tree_ptr, qk_scale, q_token_stride, q_head_stride, page_table_stride,
    HEADS: tl.constexpr, Q_LEN: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr, SPLIT_KV: tl.constexpr,
    FP8: tl.constexpr, INT64_OFFSETS: tl.constexpr, TMA: tl.constexpr, PREFETCH_LEN: tl.constexpr,
    PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr, PDL: tl.constexpr = False, WORDS: tl.constexpr = 1,
):  # fmt: skip
    """One CTA per tile of a request's rows (tokens times heads) and split of the positions.

    Q_LEN > 0: every request has that many tokens, or with `first_ptr` at most; the grid is (tiles,
    splits, requests).
    Q_LEN = 0: ragged chunks; the grid is (tiles,), each with an entry of the tile map, in rows.

    A row of the pool [pages, PAGE_SIZE, LATENT + ROPE] is loaded once: whole it is K, its latent
    part is V. Partial results are [T, HEADS, LATENT / PART, splits, PART], which `combine_splits`
    takes as that many more heads of PART values.
    """
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if Q_LEN > 0:
        request = tl.program_id(2)
        first_row = tl.program_id(0) * BLOCK_M
        place = request.to(tl.int64) * Q_LEN  # of the first token, in `tree_ptr`
        first_token, q_len = place, Q_LEN
        if first_ptr is not None:
            first_token, q_len = tokens_of(first_ptr, request)
    else:
        entry = tile_map + tl.program_id(0) * 4
        request = tl.load(entry)
        first_row = tl.load(entry + 3)
        q_len = tl.load(entry + 2) // HEADS
        first_token = (tl.load(entry + 1) // HEADS).to(tl.int64)
        place = first_token
    start = tl.load(start_ptr + request)
    table = page_table + request.to(tl.int64) * page_table_stride

    # Positions [low, limit) are attended to by some row of the tile, those below `full` by all
    # (without a window).
    low, limit, full = start * 0, start + q_len, start
    if MASK == 0:
        limit = start + tl.minimum((first_row + BLOCK_M - 1) // HEADS + 1, q_len)
        full = start + first_row // HEADS + 1
    if WINDOW >= 0:
        low = start - WINDOW
        if MASK == 0:
            low += first_row // HEADS + 1
        low = tl.maximum(low, 0)
    base = low // BLOCK_N
    blocks = tl.cdiv(limit, BLOCK_N) - base
    begin = (base + blocks * split // num_splits) * BLOCK_N
    end = tl.minimum((base + blocks * (split + 1) // num_splits) * BLOCK_N, limit)
    if first_ptr is not None:
        end = tl.where(first_row < HEADS * q_len, end, begin)
    high = tl.maximum(end, 1)
    low = tl.minimum(low, high - 1)
    page = load_page_ids(table, begin, low, high, PAGE_SIZE, BLOCK_N)
    ROW: tl.constexpr = LATENT + ROPE
    if PDL:
        prefetch_latent(
            pool, table, begin, high, PAGE_SIZE, INT64_OFFSETS, ROW, 2 * BLOCK_L, PREFETCH_LEN
        )
        tl.extra.cuda.gdc_wait()

    m, d, r = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    m += first_row
    row, head, inside = m // HEADS, m % HEADS, m < HEADS * q_len
    token = first_token + row
    q_ptr += (token * q_token_stride + head * q_head_stride)[:, None]
    q_type: tl.constexpr = q_ptr.dtype.element_ty
    # float8 converts to float16 in one instruction, to bfloat16 in several.
    dtype: tl.constexpr = tl.float16 if FP8 > 0 and q_type.primitive_bitwidth == 16 else q_type
    q_latent = tl.load(q_ptr + d[None, :], mask=inside[:, None] & (d < LATENT)[None, :], other=0)
    q_rope = tl.load(
        q_ptr + LATENT + r[None, :], mask=inside[:, None] & (r < ROPE)[None, :], other=0
    )
    q_latent, q_rope = cast_q(q_latent, dtype), cast_q(q_rope, dtype)

    row_max = tl.full([BLOCK_M], -1e38, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
    for first in range(begin, end, BLOCK_N):
        origin = first  # position of the block's first row
        if TMA:
            # A request's last block is moved back to end at `end`: rows past it may be NaN. TMA
            # fills with zeros what is outside the page.
            origin = tl.minimum(first, end - BLOCK_N)
            at = first % PAGE_SIZE + (origin - first)
            latent = latent_descriptor.load([page, at, 0]).reshape(BLOCK_N, BLOCK_L)
            rope = rope_descriptor.load([page, at, LATENT]).reshape(BLOCK_N, BLOCK_R)
        else:
            offset = kv_slots_of(page, first, low, high, PAGE_SIZE, BLOCK_N, INT64_OFFSETS) * ROW
            latent = load_kv(pool, offset, d, LATENT, BLOCK_L, FP8)
            rope = load_kv(pool + LATENT, offset, r, ROPE, BLOCK_R, FP8)
        latent, rope = latent.to(dtype), rope.to(dtype)
        page = load_page_ids(table, first + BLOCK_N, low, high, PAGE_SIZE, BLOCK_N)
        # Each is scaled, or Triton makes one chain of the two and computes the first in both
        # warpgroups.
        s = tl.dot(q_rope, tl.trans(rope), input_precision="ieee") * qk_scale
        s += tl.dot(q_latent, tl.trans(latent), input_precision="ieee") * qk_scale
        if WINDOW >= 0 or first + BLOCK_N > full:
            position = origin + tl.arange(0, BLOCK_N)
            tree = tree_ptr + (place + row) * WORDS
            visible = attends(row, position, start, tree, q_len, MASK, WINDOW, WORDS)
            visible = visible & ((position >= first) & (position < end))[None, :]
            s = tl.where(visible, s, float("-inf"))
        row_max, row_sum, acc = online_softmax_step(s, latent, 1.0, row_max, row_sum, acc)

    weight = tl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc / weight[:, None]
    out_row = token * HEADS + head
    mask = inside[:, None] & (d < LATENT)[None, :]
    if SPLIT_KV:
        PARTS: tl.constexpr = LATENT // PART
        part = (out_row[:, None] * PARTS + (d // PART)[None, :]) * num_splits + split
        tl.store(out_ptr + part * PART + (d % PART)[None, :], acc, mask=mask)
        lse = tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log2(weight))
        for i in tl.static_range(PARTS):
            tl.store(lse_ptr + (out_row * PARTS + i) * num_splits + split, lse, mask=inside)
    else:
        out = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (out_row * LATENT)[:, None] + d[None, :], out, mask=mask)
