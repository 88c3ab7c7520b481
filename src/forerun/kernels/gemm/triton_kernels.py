# mypy: allow-untyped-defs, allow-incomplete-defs
"""The kernels of `gemm.py`, which explains them."""

from __future__ import annotations

from forerun.kernels.runtime.jit import jit, jit_no_specialize, tl


@jit_no_specialize("M", "P", "units", "tiles_m")
def gemm_kernel(
    x,  # [M, K], stride_x
    w,  # [N, K], with PAIRED [2N, K]
    bias,  # [N], with PAIRED [2N], or None
    squares,  # [P, M] float32: x is `DeferredNorm`; or None
    residual,  # [M, N] or None
    norm_weight,  # [N] or None
    out,  # [M, N] or None
    scaled,  # [M, N]
    out_squares,  # [tiles over N, M] float32
    best,  # [M, tiles over N] float32: each tile's largest, instead of `out`; or None
    best_ids,  # [M, tiles over N] int32
    partial,  # [2 * programs, BLOCK_M, BLOCK_N] float32; with PARTIALS [PARTS, M, N]
    locks,  # [tiles] int32 zeros, and zeros again at the end
    M,
    N,
    K,
    stride_x,
    P,
    eps,
    tiles_m,
    units,  # tiles * chunks
    prefetch,  # a multiple of 64 elements, with PDL
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
    SWAP: tl.constexpr,
    PAIRED: tl.constexpr,
    PARTIALS: tl.constexpr,
    EVEN_K: tl.constexpr,
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
):
    chunks = tl.cdiv(K, BLOCK_K)
    program, programs = tl.program_id(0), tl.num_programs(0)
    begin, end = _share(program, programs, units)
    first_tile = begin // chunks
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        if prefetch > 0:
            first = begin - first_tile * chunks
            column = first * BLOCK_K
            count = tl.minimum(tl.minimum(K - column, (end - begin) * BLOCK_K), prefetch)
            _prefetch(w, first_tile // tiles_m, column, count, N, K, BLOCK_N, PAIRED, THREADS)
        tl.extra.cuda.gdc_wait()

    k = tl.arange(0, BLOCK_K)
    for tile in range(first_tile, (end - 1) // chunks + 1):
        start = tile * chunks
        tile_n = tile // tiles_m
        m = tile % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
        present = m[:, None] < M
        acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
        x_tile = x + m[:, None] * stride_x + k[None, :]
        row = _rows(tile_n, tl.arange(0, BLOCK_N), N, BLOCK_N, PAIRED)
        w_tile = w + row[:, None] * K + k[None, :]
        for chunk in range(tl.maximum(begin - start, 0), tl.minimum(end - start, chunks)):
            at = chunk * BLOCK_K
            if EVEN_K:
                xs = tl.load(x_tile + at, mask=present, other=0.0)
                ws = tl.load(w_tile + at)
            else:
                inside = at + k[None, :] < K
                xs = tl.load(x_tile + at, mask=present & inside, other=0.0)
                ws = tl.load(w_tile + at, mask=inside, other=0.0)
            acc = tl.dot(ws, tl.trans(xs), acc) if SWAP else tl.dot(xs, tl.trans(ws), acc)
        if PDL and not EARLY:  # noqa: SIM102  a constant
            if start + chunks >= end:
                tl.extra.cuda.gdc_launch_dependents()
        if SWAP:
            acc = tl.trans(acc)

        first_program = _owner(start, programs, units)
        others = _owner(start + chunks - 1, programs, units) - first_program
        part = program - first_program
        column = tl.arange(0, BLOCK_N)[None, :]
        last = True if PARTS == 1 else others == 0
        if PARTIALS:
            column += tile_n * BLOCK_N
            place = partial + (part * M + m[:, None]) * N + column
            tl.store(place, acc, mask=present & (column < N))
        elif PARTS > 1:  # noqa: SIM102  a constant
            if others > 0:
                # A program shares at most two tiles: its first one, and its last as the first of
                # that tile's programs. So slots 2p and 2p + 1 are enough.
                place = partial + tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + column
                slot = (2 * program + (part == 0)) * BLOCK_M * BLOCK_N
                tl.store(place + slot, acc, mask=present)
                tl.debug_barrier()  # all of the program's partial is written before it reports
                last = tl.atomic_add(locks + tile, 1, sem="acq_rel") == others
                if last:
                    tl.store(locks + tile, 0)
                    acc = _sum(place, first_program, others, present, BLOCK_M, BLOCK_N, PARTS)
        if not PARTIALS:  # noqa: SIM102  a constant
            if last:
                _finish(
                    acc, tile_n, m, bias, squares, residual, norm_weight,
                    out, scaled, out_squares, best, best_ids, M, N, K, P, eps,
                    w.dtype.element_ty, BLOCK_M, BLOCK_N, PAIRED,
                )  # fmt: skip


@jit
def _sum(
    place, first_program, others, present,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """What a tile's programs left, past the L1 cache: others wrote it."""
    acc = tl.zeros(place.shape, tl.float32)
    for i in tl.static_range(PARTS):
        slot = 2 * (first_program + i) + (i == 0)
        acc += tl.load(
            place + slot * BLOCK_M * BLOCK_N,
            mask=present & (i <= others),
            other=0.0,
            cache_modifier=".cg",
        )
    return acc


@jit
def _share(program, programs, units):
    """The range of units that a program works on."""
    return program * units // programs, (program + 1) * units // programs


@jit
def _owner(unit, programs, units):
    """The program that works on a unit."""
    return ((unit + 1) * programs - 1) // units


@jit
def _rows(tile, i, N, BLOCK_N: tl.constexpr, PAIRED: tl.constexpr):
    """Row of W that is the tile's i-th; those past the end repeat the last."""
    if PAIRED:
        half: tl.constexpr = BLOCK_N // 2
        row = tl.minimum(tile * half + i % half, N - 1) + i // half * N
    else:
        row = tl.minimum(tile * BLOCK_N + i, N - 1)
    return row.to(tl.int64)


@jit
def _finish(
    acc, tile, m, bias, squares, residual, norm_weight,
    out, scaled, out_squares, best, best_ids, M, N, K, P, eps,
    w_type: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """The epilogue: float32 sums [BLOCK_M, BLOCK_N] -> what the caller asked for."""
    present = m[:, None] < M
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if PAIRED:
        n = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        pairs = tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2))
        acc, up = tl.split(tl.permute(pairs, (0, 2, 1)))
    inside = n < N
    factor = tl.full((BLOCK_M, 1), 1.0, tl.float32)
    if squares is not None:
        total = tl.zeros((BLOCK_M, 1), tl.float32)
        p = tl.arange(0, 32)[None, :]
        for first in range(0, P, 32):
            there = present & (first + p < P)
            part = tl.load(squares + (first + p) * M + m[:, None], mask=there, other=0.0)
            total += tl.sum(part, 1, keep_dims=True)
        factor = tl.rsqrt(total / K + eps)
        acc *= factor
    if bias is not None:
        acc += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    if PAIRED:
        if squares is not None:
            up *= factor
        if bias is not None:
            up += tl.load(bias + N + n, mask=inside, other=0.0).to(tl.float32)[None, :]
        acc = acc * tl.sigmoid(acc) * up
    written = present & inside[None, :]
    place = m[:, None] * N + n[None, :]
    if best is not None:
        logits = acc.to(w_type).to(tl.float32)
        logits = tl.where(inside[None, :], logits, float("-inf"))
        value, index = tl.max(logits, 1, return_indices=True)
        slot = m * tl.cdiv(N, BLOCK_N) + tile
        tl.store(best + slot, value, mask=m < M)
        tl.store(best_ids + slot, index + tile * BLOCK_N, mask=m < M)
    else:
        if residual is not None:
            acc += tl.load(residual + place, mask=written, other=0.0).to(tl.float32)
        rounded = acc.to(out.dtype.element_ty)
        tl.store(out + place, rounded, mask=written)
        if scaled is not None:
            r = tl.where(written, rounded.to(tl.float32), 0.0)
            norm = tl.load(norm_weight + n, mask=inside, other=0.0).to(tl.float32)
            tl.store(scaled + place, (r * norm[None, :]).to(out.dtype.element_ty), mask=written)
            tl.store(out_squares + tile * M + m, tl.sum(r * r, 1), mask=m < M)


@jit
def _prefetch(
    w, tile, first, count, N, K,
    BLOCK_N: tl.constexpr, PAIRED: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Asks for `count` elements of a tile's rows, from column `first` on; one request a thread."""
    PIECES: tl.constexpr = max(THREADS // BLOCK_N, 1)
    i = tl.arange(0, PIECES * BLOCK_N)
    row = _rows(tile, i // PIECES, N, BLOCK_N, PAIRED)
    piece = count // PIECES
    address = (w + row * K + first + i % PIECES * piece).to(tl.int64)
    size = i * 0 + piece * 2
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; // $0",
        "=r,l,r",
        [address, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def best_kernel(best, best_ids, out, tiles, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[row] = the id of the largest of row's `tiles` candidates, the lowest of equals."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    value = tl.full((BLOCK,), float("-inf"), tl.float32)
    index = tl.full((BLOCK,), 2**31 - 1, tl.int32)
    for first in range(0, tiles, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        v = tl.load(best + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
        i = tl.load(best_ids + row * tiles + tile, mask=tile < tiles, other=2**31 - 1)
        better = (v > value) | ((v == value) & (i < index))
        value = tl.where(better, v, value)
        index = tl.where(better, i, index)
    top = tl.max(value, 0)
    tl.store(out + row, tl.min(tl.where(value == top, index, 2**31 - 1), 0).to(tl.int64))
