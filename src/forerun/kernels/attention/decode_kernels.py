# mypy: allow-untyped-defs, allow-incomplete-defs
"""The kernels of `decode.py`, which explains them, and helpers that `prefill.py` shares."""

from __future__ import annotations

from forerun.kernels.runtime.fp8 import decode_e4m3
from forerun.kernels.runtime.jit import jit, tl
from forerun.kernels.runtime.pdl import prefetch_lines


@jit
def attends(
    token, position, start, tree, q_len,
    MASK: tl.constexpr, WINDOW: tl.constexpr, WORDS: tl.constexpr = 1,
):  # fmt: skip
    """[M, N] bool: whether query `token` [M] attends to `position` [N].

    `tree` [M]: where the WORDS words of each token's bits are; read by the mask of trees only.
    """
    if MASK == 0:
        last = (start + token)[:, None]
        visible = position[None, :] <= last
        if WINDOW >= 0:
            visible = visible & (position[None, :] > last - WINDOW)
    elif MASK == 1:
        visible = (position < start + q_len)[None, :] & (token >= 0)[:, None]
        if WINDOW >= 0:
            visible = visible & (position >= start - WINDOW)[None, :]
    elif MASK == 3:
        distance = position[None, :] - (start + token)[:, None]
        near = (distance > -WINDOW) & (distance < WINDOW)
        visible = near & (position < start + q_len)[None, :]
    else:
        offset = position - start  # the query token at this position, where >= 0
        context = (offset < 0)[None, :]
        visible = context
        depth, later = 0, 0
        for word in tl.static_range(WORDS):
            bits = tl.load(tree + word, mask=token < q_len, other=0)
            shift = tl.minimum(tl.maximum(offset - word * 64, 0), 63).to(tl.int64)
            in_tree = ((bits[:, None] >> shift[None, :]) & 1) != 0
            own = offset < q_len
            if WORDS > 1:
                own = own & (offset // 64 == word)
            visible = visible | (in_tree & own[None, :])
            if WINDOW >= 0:
                depth += count_bits(bits).to(tl.int32)
            if (WINDOW >= 0) & (WINDOW < WORDS * 64):
                # Its ancestors after the one at this position, without the sign that >> brings.
                unsigned = tl.full([1], 0x7FFFFFFFFFFFFFFF, tl.int64) >> shift
                after = (bits[:, None] >> tl.minimum(shift + 1, 63)[None, :]) & unsigned[None, :]
                if WORDS > 1:
                    after = tl.where((offset < word * 64)[None, :], bits[:, None], after)
                    after = tl.where((offset >= word * 64 + 64)[None, :], 0, after)
                later += count_bits(after).to(tl.int32)
        if WINDOW >= 0:
            # A token of a tree stands as deep as it has ancestors, which come before it.
            near = position[None, :] >= (start + depth - WINDOW)[:, None]
            if WINDOW >= WORDS * 64:
                near = near | (offset >= 0)[None, :]
            else:
                near = tl.where(context, near, later < WINDOW)
            visible = visible & near
    return visible


@jit
def count_bits(x):
    """Set bits of int64 numbers, the sign included: sums of 2, 4, 8 bits, then of the bytes."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return (x * 0x0101010101010101) >> 56


@jit
def tokens_of(first_ptr, request):
    """Where a request's tokens begin among all, int64, and how many it has."""
    first = tl.load(first_ptr + request)
    return first.to(tl.int64), tl.load(first_ptr + request + 1) - first


@jit
def load_page_ids(table, first, low, high, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page ids of the positions from `first` on, within [low, high): one id if one page has all.

    A loop loads those of its next block ahead, so that K/V loads do not wait for them.
    """
    if PAGE_SIZE % BLOCK_N == 0:
        page = tl.load(table + tl.maximum(tl.minimum(first, high - 1), low) // PAGE_SIZE)
    else:
        position = tl.maximum(tl.minimum(first + tl.arange(0, BLOCK_N), high - 1), low)
        page = tl.load(table + position // PAGE_SIZE)
    return page


@jit
def kv_slots_of(
    page, first, low, high,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, INT64_OFFSETS: tl.constexpr,
):  # fmt: skip
    """KV slots [N] of the positions from `first` on, a multiple of N; `page` from `load_page_ids`.

    A position outside [low, high) is replaced by the nearest inside: K/V outside may be NaN.
    """
    position = tl.maximum(tl.minimum(first + tl.arange(0, BLOCK_N), high - 1), low)
    if INT64_OFFSETS:
        page = page.to(tl.int64)
    if PAGE_SIZE % BLOCK_N == 0:
        kv_slots = page * PAGE_SIZE + (position - first // PAGE_SIZE * PAGE_SIZE)
    else:
        kv_slots = page * PAGE_SIZE + position % PAGE_SIZE
    return kv_slots


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
def cast_q(q, dtype: tl.constexpr):
    """`q` in the dtype of the dot product; clamped to float16's range, so that it is not inf."""
    if dtype == tl.float16 and q.dtype == tl.bfloat16:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0)
    return q.to(dtype)


@jit
def tanh_of(s, scale):
    """tanh(s · scale / (2 log2(e))), for the soft-cap: `scale` is that of exp2 of the double."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(s * scale))


@jit
def online_softmax_step(s, v, qk_scale, row_max, row_sum, acc):
    """One block of the online softmax, in powers of two; masked scores are -inf in `s` [M, N].

    `row_max` [M]: largest score so far, -1e38 before the first; `row_sum` [M]: sum of weights;
    `acc` [M, D]: weighted values.
    """
    new = tl.maximum(row_max, tl.max(s, 1) * qk_scale)
    p = tl.exp2(s * qk_scale - new[:, None])
    rescale = tl.exp2(row_max - new)
    row_sum = row_sum * rescale + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return new, row_sum, acc


@jit
def begin_softmax(sinks_ptr, head, BLOCK_M: tl.constexpr):
    """(row_max, row_sum) [M] before the first block: of the heads' sinks [M], or of nothing."""
    if sinks_ptr is None:
        row_max = tl.full([BLOCK_M], -1e38, tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
    else:
        row_max = tl.load(sinks_ptr + head) * 1.4426950408889634  # log2(e)
        row_sum = tl.full([BLOCK_M], 1.0, tl.float32)
    return row_max, row_sum


@jit
def _lines_of(
    table, first, high, element_bits: tl.constexpr,
    PAGE_SIZE: tl.constexpr, INT64_OFFSETS: tl.constexpr, ROW: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, PREFETCH_LEN: tl.constexpr,
):  # fmt: skip
    """Offsets of the 128-byte lines of DIM values of each position, in rows of ROW."""
    position = tl.minimum(first + tl.arange(0, PREFETCH_LEN), high - 1)
    page = tl.load(table + position // PAGE_SIZE)
    if INT64_OFFSETS:
        page = page.to(tl.int64)
    at = (page * PAGE_SIZE + position % PAGE_SIZE) * ROW
    LINE: tl.constexpr = 1024 // element_bits  # elements of 128 bytes
    lines = tl.arange(0, BLOCK_D // LINE if BLOCK_D > LINE else 1) * LINE
    return at[:, None] + tl.minimum(lines, DIM - 1)[None, :]


@jit
def prefetch_kv(
    k_ptr, v_ptr, table, first, high,
    PAGE_SIZE: tl.constexpr, INT64_OFFSETS: tl.constexpr, ROW: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, PREFETCH_LEN: tl.constexpr,
):  # fmt: skip
    """Prefetches K/V of PREFETCH_LEN positions from `first` on, below `high`, into L2 (CUDA)."""
    at = _lines_of(
        table, first, high, k_ptr.dtype.element_ty.primitive_bitwidth,
        PAGE_SIZE, INT64_OFFSETS, ROW, DIM, BLOCK_D, PREFETCH_LEN,
    )  # fmt: skip
    prefetch_lines(k_ptr + at)
    prefetch_lines(v_ptr + at)


@jit
def prefetch_latent(
    pool, table, first, high,
    PAGE_SIZE: tl.constexpr, INT64_OFFSETS: tl.constexpr, ROW: tl.constexpr,
    BLOCK_ROW: tl.constexpr, PREFETCH_LEN: tl.constexpr,
):  # fmt: skip
    """Prefetches the rows of PREFETCH_LEN positions from `first` on, below `high`, into L2."""
    at = _lines_of(
        table, first, high, pool.dtype.element_ty.primitive_bitwidth,
        PAGE_SIZE, INT64_OFFSETS, ROW, ROW, BLOCK_ROW, PREFETCH_LEN,
    )  # fmt: skip
    prefetch_lines(pool + at)


@jit
def decode_attention_kernel(
    q_ptr, k_ptr, v_ptr, k_descriptor, v_descriptor, out_ptr, lse_ptr, page_table, start_ptr,
    first_ptr, tree_ptr, sinks_ptr, qk_scale, q_token_stride, q_head_stride, page_table_stride,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, Q_LEN: tl.constexpr, DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr, SPLIT_KV: tl.constexpr,
    FP8: tl.constexpr, INT64_OFFSETS: tl.constexpr, TMA: tl.constexpr, PREFETCH_LEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr = False, SOFTCAP: tl.constexpr = 0.0, WORDS: tl.constexpr = 1,
):  # fmt: skip
    """One CTA per tile of a request's rows, K/V head, and split of the positions.

    A request has Q_LEN tokens, or with `first_ptr` at most so many.

    K/V written before the preceding kernel is requested before the PDL wait. TMA: blocks come
    through the descriptors over [pages, PAGE_SIZE, KV_HEADS * DIM], and the request is a prefetch
    into L2. Otherwise the loop's first blocks are in flight before its first iteration waits and
    loads q, unless the query tokens' own K/V, which the preceding kernel writes, is among them.
    """
    kv_head = tl.program_id(0) % KV_HEADS
    tile = tl.program_id(0) // KV_HEADS
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    request = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    start = tl.load(start_ptr + request)
    table = page_table + request.to(tl.int64) * page_table_stride
    place = request.to(tl.int64) * Q_LEN  # of the first token, in `tree_ptr`
    first_token, q_len = place, Q_LEN
    if first_ptr is not None:
        first_token, q_len = tokens_of(first_ptr, request)

    low = start * 0  # the oldest position that a row of the tile attends to
    if WINDOW >= 0:
        low = start - WINDOW
        if MASK == 0 or MASK == 3:
            low += (tile * BLOCK_M) // GROUP + 1
        low = tl.minimum(tl.maximum(low, 0), start)
    base = low // BLOCK_N
    blocks = tl.cdiv(start + q_len, BLOCK_N) - base
    begin = (base + blocks * split // num_splits) * BLOCK_N
    end = tl.minimum((base + blocks * (split + 1) // num_splits) * BLOCK_N, start + q_len)
    if first_ptr is not None:
        end = tl.where(tile * BLOCK_M < GROUP * q_len, end, begin)
    high = tl.maximum(end, 1)
    page = load_page_ids(table, begin, low, high, PAGE_SIZE, BLOCK_N)

    k_ptr += kv_head * DIM
    v_ptr += kv_head * DIM
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row, d = m // GROUP, tl.arange(0, BLOCK_D)
    token = first_token + row
    head = kv_head * GROUP + m % GROUP
    q_mask = (m < GROUP * q_len)[:, None] & (d < DIM)[None, :]
    q_ptr += (token * q_token_stride + head * q_head_stride)[:, None] + d[None, :]
    q_type: tl.constexpr = q_ptr.dtype.element_ty
    # float8 converts to float16 in one instruction, to bfloat16 in several.
    dtype: tl.constexpr = tl.float16 if FP8 > 0 and q_type.primitive_bitwidth == 16 else q_type
    ROW: tl.constexpr = KV_HEADS * DIM
    q = tl.zeros([BLOCK_M, BLOCK_D], dtype)
    if PDL:  # noqa: SIM102  a constant
        if TMA or ((end > start) & (begin + STAGES * BLOCK_N > start)):
            prefetch_kv(
                k_ptr, v_ptr, table, begin, high,
                PAGE_SIZE, INT64_OFFSETS, ROW, DIM, BLOCK_D, PREFETCH_LEN,
            )  # fmt: skip
            tl.extra.cuda.gdc_wait()
    if TMA or not PDL:
        q = cast_q(tl.load(q_ptr, mask=q_mask, other=0), dtype)

    # With splits, `combine_splits` adds the sinks.
    row_max, row_sum = begin_softmax(None if SPLIT_KV else sinks_ptr, head, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    softmax_scale = qk_scale
    if SOFTCAP > 0.0:
        softmax_scale = SOFTCAP * 1.4426950408889634  # log2(e)
    for first in range(begin, end, BLOCK_N):
        origin = first  # position of the block's first K/V
        if TMA:
            # The last block is moved back to end at `end`: K/V past it may be NaN. TMA fills
            # with zeros what is outside the page.
            origin = tl.minimum(first, end - BLOCK_N)
            at = first % PAGE_SIZE + (origin - first)
            k = k_descriptor.load([page, at, kv_head * DIM]).reshape(BLOCK_N, BLOCK_D).to(dtype)
            v = v_descriptor.load([page, at, kv_head * DIM]).reshape(BLOCK_N, BLOCK_D).to(dtype)
        else:
            offset = kv_slots_of(page, first, low, high, PAGE_SIZE, BLOCK_N, INT64_OFFSETS) * ROW
            k = load_kv(k_ptr, offset, d, DIM, BLOCK_D, FP8).to(dtype)
            v = load_kv(v_ptr, offset, d, DIM, BLOCK_D, FP8).to(dtype)
        page = load_page_ids(table, first + BLOCK_N, low, high, PAGE_SIZE, BLOCK_N)
        if PDL and not TMA:  # noqa: SIM102  a constant
            if first == begin:
                tl.extra.cuda.gdc_wait()
                q = cast_q(tl.load(q_ptr, mask=q_mask, other=0), dtype)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if SOFTCAP > 0.0:
            s = tanh_of(s, qk_scale)
        if WINDOW >= 0 or first + BLOCK_N > start:
            position = origin + tl.arange(0, BLOCK_N)
            tree = tree_ptr + (place + row) * WORDS
            visible = attends(row, position, start, tree, q_len, MASK, WINDOW, WORDS)
            visible = visible & ((position >= first) & (position < end))[None, :]
            s = tl.where(visible, s, float("-inf"))
        row_max, row_sum, acc = online_softmax_step(s, v, softmax_scale, row_max, row_sum, acc)

    if PDL:
        tl.extra.cuda.gdc_wait()  # for CTAs with an empty split; else without effect
    weight = tl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc / weight[:, None]
    out_row = token * (KV_HEADS * GROUP) + head
    if SPLIT_KV:
        target = (out_row * num_splits + split) * DIM
        tl.store(out_ptr + target[:, None] + d[None, :], acc, mask=q_mask)
        lse = tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log2(weight))
        tl.store(lse_ptr + out_row * num_splits + split, lse, mask=m < GROUP * q_len)
    else:
        target = (out_row * DIM)[:, None] + d[None, :]
        tl.store(out_ptr + target, acc.to(out_ptr.dtype.element_ty), mask=q_mask)


@jit
def combine_splits(
    partial_ptr, lse_ptr, out_ptr, sinks_ptr, rows, num_splits, NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_SPLITS: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """One CTA per BLOCK_ROWS of T * Hq: combines the splits by their log-sum-exp.

    The sinks [Hq] count once, here.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    s, d = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (s < num_splits)[None, :]
    at = row[:, None] * num_splits + s[None, :]
    lse = tl.load(lse_ptr + at, mask=inside, other=float("-inf"))
    partial = tl.load(
        partial_ptr + at[:, :, None] * DIM + d[None, None, :],
        mask=inside[:, :, None] & (d < DIM)[None, None, :],
        other=0.0,
    )
    row_max = tl.max(lse, 1)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + row % NUM_HEADS) * 1.4426950408889634  # log2(e)
        row_max = tl.maximum(row_max, sink)
    weight = tl.exp2(lse - tl.where(row_max == float("-inf"), 0.0, row_max)[:, None])
    row_sum = tl.sum(weight, 1)
    if sinks_ptr is not None:
        row_sum += tl.exp2(sink - row_max)
    out = tl.sum(partial * weight[:, :, None], 1)
    out = out / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    mask = (row < rows)[:, None] & (d < DIM)[None, :]
    tl.store(out_ptr + row[:, None] * DIM + d[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
