# mypy: allow-untyped-defs, allow-incomplete-defs
"""The kernels of `attention.py`, which explains them, and what `prefill_attention.py` shares."""

from __future__ import annotations

from forerun.kernels.runtime.fp8 import decode_e4m3
from forerun.kernels.runtime.jit import jit, tl


@jit
def visible(row, position, start, bits, width, MASK: tl.constexpr, WINDOW: tl.constexpr):
    """[M, N]: which of `position` [N] the block's `row` [M] sees; `bits` [M] of a tree."""
    if MASK == 0:
        last = (start + row)[:, None]
        seen = position[None, :] <= last
        if WINDOW >= 0:
            seen = seen & (position[None, :] > last - WINDOW)
    elif MASK == 1:
        seen = (position < start + width)[None, :] & (row >= 0)[:, None]
        if WINDOW >= 0:
            seen = seen & (position >= start - WINDOW)[None, :]
    else:
        behind = position - start  # row of the block, where it is one
        shift = tl.minimum(tl.maximum(behind, 0), 63).to(tl.int64)
        marked = ((bits[:, None] >> shift[None, :]) & 1) != 0
        seen = (behind < 0)[None, :] | (marked & (behind < width)[None, :])
    return seen


@jit
def page_ids(table, first, low, high, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pages of the positions from `first` on, within [low, high): one id where one page has all.

    A loop carries those of its next block: what is loaded this way waits for nothing.
    """
    if PAGE % BLOCK_N == 0:
        page = tl.load(table + tl.maximum(tl.minimum(first, high - 1), low) // PAGE)
    else:
        position = tl.maximum(tl.minimum(first + tl.arange(0, BLOCK_N), high - 1), low)
        page = tl.load(table + position // PAGE)
    return page


@jit
def pool_rows_of(
    page, first, low, high, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr
):
    """Pool rows [N] of the positions from `first` on, a multiple of N; `page` from `page_ids`.

    A position outside [low, high) stands for the nearest inside: what lies there is no number.
    """
    position = tl.maximum(tl.minimum(first + tl.arange(0, BLOCK_N), high - 1), low)
    if WIDE:
        page = page.to(tl.int64)
    if PAGE % BLOCK_N == 0:
        rows = page * PAGE + (position - first // PAGE * PAGE)
    else:
        rows = page * PAGE + position % PAGE
    return rows


@jit
def load_kv(pool, offset, d, DIM: tl.constexpr, BLOCK_D: tl.constexpr, FP8: tl.constexpr):
    """[N, D] at `offset` [N] of a pool."""
    if DIM == BLOCK_D:
        x = tl.load(pool + offset[:, None] + d[None, :])
    else:
        x = tl.load(pool + offset[:, None] + d[None, :], mask=(d < DIM)[None, :], other=0)
    if FP8 == 1:
        x = decode_e4m3(x)
    elif FP8 == 2:
        x = x.to(tl.float8e4nv, bitcast=True)
    return x


@jit
def as_kind(q, kind: tl.constexpr):
    """`q` in the dtype it is multiplied in; beyond float16's range its largest number, not inf."""
    if kind == tl.float16 and q.dtype == tl.bfloat16:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0)
    return q.to(kind)


@jit
def soft_step(s, v, qk_scale, top, total, acc):
    """One block of the online softmax, in powers of two; what is not seen is -inf in `s` [M, N].

    `top` [M]: largest score so far, -1e38 before the first; `total` [M]: sum of weights; `acc`
    [M, D]: weighted values.
    """
    new = tl.maximum(top, tl.max(s, 1) * qk_scale)
    p = tl.exp2(s * qk_scale - new[:, None])
    fade = tl.exp2(top - new)
    total = total * fade + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return new, total, acc


@jit
def bring(
    k_ptr, v_ptr, table, first, high,
    PAGE: tl.constexpr, WIDE: tl.constexpr, ROW: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Brings K/V of AHEAD positions from `first` on, below `high`, into the L2 cache (CUDA)."""
    position = tl.minimum(first + tl.arange(0, AHEAD), high - 1)
    page = tl.load(table + position // PAGE)
    if WIDE:
        page = page.to(tl.int64)
    at = (page * PAGE + position % PAGE) * ROW
    LINE: tl.constexpr = 1024 // k_ptr.dtype.element_ty.primitive_bitwidth  # elements of 128 bytes
    lines = tl.arange(0, BLOCK_D // LINE if BLOCK_D > LINE else 1) * LINE
    at = at[:, None] + tl.minimum(lines, DIM - 1)[None, :]
    order: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(order, "=r,l", [k_ptr + at], tl.int32, is_pure=False, pack=1)
    tl.inline_asm_elementwise(order, "=r,l", [v_ptr + at], tl.int32, is_pure=False, pack=1)


@jit
def short_block(
    q_ptr, k_ptr, v_ptr, k_blocks, v_blocks, out_ptr, lse_ptr, table_ptr, start_ptr, tree_ptr,
    qk_scale, q_token, q_head, table_row,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr,
    FP8: tl.constexpr, WIDE: tl.constexpr, BULK: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """One tile of a request's rows, one K/V head, one split of the positions.

    What is older than the kernel that runs just before is asked for before the wait. BULK: K/V
    come through the descriptors [pages, PAGE, KV_HEADS * DIM], and that is a call into the L2
    cache. Otherwise the loop's first blocks are on their way before its first pass waits and loads
    q, unless the block's own rows, which the kernel before writes, are among them.
    """
    kv_head = tl.program_id(0) % KV_HEADS
    tile = tl.program_id(0) // KV_HEADS
    split, splits = tl.program_id(1), tl.num_programs(1)
    request = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    start = tl.load(start_ptr + request)
    table = table_ptr + request.to(tl.int64) * table_row

    low = start * 0  # the oldest position that a row of the tile sees
    if WINDOW >= 0:
        low = start - WINDOW
        if MASK == 0:
            low += (tile * BLOCK_M) // GROUP + 1
        low = tl.minimum(tl.maximum(low, 0), start)
    base = low // BLOCK_N
    blocks = tl.cdiv(start + WIDTH, BLOCK_N) - base
    begin = (base + blocks * split // splits) * BLOCK_N
    end = tl.minimum((base + blocks * (split + 1) // splits) * BLOCK_N, start + WIDTH)
    high = tl.maximum(end, 1)
    page = page_ids(table, begin, low, high, PAGE, BLOCK_N)

    k_ptr += kv_head * DIM
    v_ptr += kv_head * DIM
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row, d = m // GROUP, tl.arange(0, BLOCK_D)
    token = request.to(tl.int64) * WIDTH + row
    head = kv_head * GROUP + m % GROUP
    real = (m < GROUP * WIDTH)[:, None] & (d < DIM)[None, :]
    q_ptr += (token * q_token + head * q_head)[:, None] + d[None, :]
    q_type: tl.constexpr = q_ptr.dtype.element_ty
    # float8 becomes float16 in one instruction, bfloat16 in several.
    kind: tl.constexpr = tl.float16 if FP8 > 0 and q_type.primitive_bitwidth == 16 else q_type
    ROW: tl.constexpr = KV_HEADS * DIM
    q = tl.zeros([BLOCK_M, BLOCK_D], kind)
    if PDL:  # noqa: SIM102  a constant
        if BULK or ((end > start) & (begin + STAGES * BLOCK_N > start)):
            bring(k_ptr, v_ptr, table, begin, high, PAGE, WIDE, ROW, DIM, BLOCK_D, AHEAD)
            tl.extra.cuda.gdc_wait()
    if BULK or not PDL:
        q = as_kind(tl.load(q_ptr, mask=real, other=0), kind)

    top = tl.full([BLOCK_M], -1e38, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in range(begin, end, BLOCK_N):
        origin = first  # position of the block's first row
        if BULK:
            # The last block reaches back: what lies past the end is no number, what is outside
            # the page comes as zeros.
            origin = tl.minimum(first, end - BLOCK_N)
            at = first % PAGE + (origin - first)
            k = k_blocks.load([page, at, kv_head * DIM]).reshape(BLOCK_N, BLOCK_D).to(kind)
            v = v_blocks.load([page, at, kv_head * DIM]).reshape(BLOCK_N, BLOCK_D).to(kind)
        else:
            offset = pool_rows_of(page, first, low, high, PAGE, BLOCK_N, WIDE) * ROW
            k = load_kv(k_ptr, offset, d, DIM, BLOCK_D, FP8).to(kind)
            v = load_kv(v_ptr, offset, d, DIM, BLOCK_D, FP8).to(kind)
        page = page_ids(table, first + BLOCK_N, low, high, PAGE, BLOCK_N)
        if PDL and not BULK:  # noqa: SIM102  a constant
            if first == begin:
                tl.extra.cuda.gdc_wait()
                q = as_kind(tl.load(q_ptr, mask=real, other=0), kind)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if WINDOW >= 0 or first + BLOCK_N > start:
            position = origin + tl.arange(0, BLOCK_N)
            bits = row
            if MASK == 2:
                bits = tl.load(tree_ptr + token, mask=m < GROUP * WIDTH, other=0)
            seen = visible(row, position, start, bits, WIDTH, MASK, WINDOW)
            seen = seen & ((position >= first) & (position < end))[None, :]
            s = tl.where(seen, s, float("-inf"))
        top, total, acc = soft_step(s, v, qk_scale, top, total, acc)

    if PDL:
        tl.extra.cuda.gdc_wait()  # for those that had nothing to do, and then of no effect
    weight = tl.where(total == 0.0, 1.0, total)
    acc = acc / weight[:, None]
    where = token * (KV_HEADS * GROUP) + head
    if SPLIT:
        target = (where * splits + split) * DIM
        tl.store(out_ptr + target[:, None] + d[None, :], acc, mask=real)
        lse = tl.where(total == 0.0, float("-inf"), top + tl.log2(weight))
        tl.store(lse_ptr + where * splits + split, lse, mask=m < GROUP * WIDTH)
    else:
        target = (where * DIM)[:, None] + d[None, :]
        tl.store(out_ptr + target, acc.to(out_ptr.dtype.element_ty), mask=real)


@jit
def combine(
    part_ptr, lse_ptr, out_ptr, rows, splits,
    DIM: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """ROWS of T * Hq: their splits' results, weighted by their sums. part [T, Hq, S, D]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    s, d = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    there = (row < rows)[:, None] & (s < splits)[None, :]
    at = row[:, None] * splits + s[None, :]
    lse = tl.load(lse_ptr + at, mask=there, other=float("-inf"))
    part = tl.load(
        part_ptr + at[:, :, None] * DIM + d[None, None, :],
        mask=there[:, :, None] & (d < DIM)[None, None, :],
        other=0.0,
    )
    top = tl.max(lse, 1)
    weight = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top)[:, None])
    total = tl.sum(weight, 1)
    out = tl.sum(part * weight[:, :, None], 1) / tl.where(total == 0.0, 1.0, total)[:, None]
    mask = (row < rows)[:, None] & (d < DIM)[None, :]
    tl.store(out_ptr + row[:, None] * DIM + d[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
