# mypy: allow-untyped-defs, allow-incomplete-defs
"""Stream-K GEMM in Triton with fused epilogues, for any GPU (arXiv 2301.03598).

Output tiles are BLOCK_M tokens by BLOCK_N rows of W; computing a tile takes K / BLOCK_K
iterations. All iterations, tile after tile, are distributed evenly over a fixed number of CTAs,
one or two per SM. x is small and is read from L2.

If a tile is computed by several CTAs, each writes a float32 split-K partial, and the CTA that
arrives last sums them in a fixed order. So the result is the same in every run.

With programmatic dependent launch (`runtime/pdl.py`), a CTA prefetches the first blocks of its
W tile into L2 before it waits for x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.core.tokens import INVALID_TOKEN
from forerun.kernels.gemm.arguments import GemmArguments
from forerun.kernels.gemm.config import TritonGemmConfig, m_bucket, num_tiles
from forerun.kernels.runtime.fp8 import FP8 as FP8_DTYPE
from forerun.kernels.runtime.fp8 import as_bits, decode_e4m3
from forerun.kernels.runtime.gpu import gpu_of
from forerun.kernels.runtime.jit import jit, jit_no_specialize, tl
from forerun.kernels.runtime.pdl import pdl_options

MAX_M = 512


def new_semaphores(weight: Tensor) -> Tensor:
    """Zeroed semaphores for every GEMM with this weight: one per tile of at least 128 x 16."""
    count = -(-weight.shape[0] // 16) * (MAX_M // 128)
    return torch.zeros(count, dtype=torch.int32, device=weight.device)


def launch(config: TritonGemmConfig, args: GemmArguments, semaphores: Tensor) -> None:
    """Runs one GEMM; `semaphores` are zero and stay so."""
    x, weight = args.x, args.weight
    (m, k), weight_rows = x.shape, weight.shape[0]
    bucket, tiles = m_bucket(m), num_tiles(m, weight_rows, config)
    assert weight.is_contiguous() and x.stride(1) == 1
    assert args.group % config.block_k == 0
    block_m, iters_per_tile = min(config.block_m, bucket), -(-k // config.block_k)
    num_ctas = min(config.num_ctas, tiles * iters_per_tile)
    max_split = max_splits(num_ctas, tiles, iters_per_tile)
    if max_split > 1:
        assert m <= MAX_M and tiles <= len(semaphores)
        assert tiles * iters_per_tile * num_ctas < 1 << 31, "`_cta_of_iter` multiplies in 32 bits"
    partials = args.partials
    if partials is None and max_split > 1:  # a workspace
        size = (2 * num_ctas, block_m, config.block_n)
        partials = torch.empty(size, dtype=torch.float32, device=x.device)
    gemm_kernel[(num_ctas,)](
        x, as_bits(weight), args.scales, args.bias, args.sum_of_squares, args.residual,
        args.norm_weight, args.out, args.norm_out, args.sum_of_squares_out,
        args.tile_max, args.tile_argmax,
        partials, semaphores,
        m, weight_rows // (2 if args.silu_mul else 1), k, x.stride(0), args.norm_tiles,
        args.eps, bucket // block_m, tiles * iters_per_tile,
        config.prefetch_k if k * weight.itemsize % 128 == 0 else 0,
        BLOCK_M=block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        MAX_SPLIT=max_split, EARLY_LAUNCH=config.early_launch, SWAP_AB=config.swap_ab,
        SILU_MUL=args.silu_mul, WRITE_PARTIALS=args.partials is not None,
        FP8=fp8_weight_mode(weight), GROUP=args.group,
        EVEN_K=k % config.block_k == 0,
        NUM_THREADS=32 * config.num_warps,
        num_warps=config.num_warps, num_stages=config.num_stages, **pdl_options(x),
    )  # fmt: skip


def fp8_weight_mode(weight: Tensor) -> int:
    """0: not e4m3; 1: decoded by shifts in Triton; 2: by PTX, four at once."""
    if weight.dtype != FP8_DTYPE:
        return 0
    gpu = gpu_of(weight.device)
    return 1 if gpu.amd or gpu.interpreted else 2


def max_splits(num_ctas: int, tiles: int, iters_per_tile: int) -> int:
    """The largest number of CTAs that work on one tile."""
    if num_ctas % tiles == 0:
        return num_ctas // tiles
    if tiles % num_ctas == 0:
        return 1
    return -(-(iters_per_tile - 1) // (tiles * iters_per_tile // num_ctas)) + 1


def reduce_argmax(tile_max: Tensor, tile_argmax: Tensor) -> Tensor:
    """[M, N tiles] maxima and their indices -> the index of each token's largest, [M] int64.

    INVALID_TOKEN where the maximum is +inf (which also represents NaN) or -inf.
    """
    m, tiles = tile_max.shape
    out = torch.empty(m, dtype=torch.int64, device=tile_max.device)
    options = pdl_options(out)
    reduce_argmax_kernel[(m,)](
        tile_max, tile_argmax, out, tiles, INVALID=INVALID_TOKEN, BLOCK=1024, **options
    )
    return out


@jit_no_specialize("M", "norm_tiles", "total_iters", "tiles_m")
def gemm_kernel(
    x,  # [M, K], stride_x
    w,  # [N, K]; with SILU_MUL [2N, K], gate before up; with FP8 e4m3 bits
    scales,  # [N, G] float32 of w; with SILU_MUL [2N, G]; or None
    bias,  # [N], with SILU_MUL [2N], or None
    sum_of_squares,  # [norm_tiles, M] float32: finish x's deferred RMSNorm; or None
    residual,  # [M, N] or None
    norm_weight,  # [N] or None
    out,  # [M, N] or None
    norm_out,  # [M, N]
    sum_of_squares_out,  # [N tiles, M] float32
    tile_max,  # [M, N tiles] float32: each tile's largest, instead of `out`; or None
    tile_argmax,  # [M, N tiles] int32
    partials,  # workspace [2 * CTAs, BLOCK_M, BLOCK_N] float32; with WRITE_PARTIALS [S, M, N]
    semaphores,  # [tiles] int32, zero before and after
    M,
    N,
    K,
    stride_x,
    norm_tiles,
    eps,
    tiles_m,
    total_iters,  # tiles * iterations per tile
    prefetch_k,  # a multiple of 64, with PDL
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MAX_SPLIT: tl.constexpr,
    EARLY_LAUNCH: tl.constexpr,
    SWAP_AB: tl.constexpr,
    SILU_MUL: tl.constexpr,
    WRITE_PARTIALS: tl.constexpr,
    EVEN_K: tl.constexpr,
    NUM_THREADS: tl.constexpr,
    FP8: tl.constexpr,  # how w is decoded: 0: it is not e4m3
    GROUP: tl.constexpr,  # columns that share a scale, a multiple of BLOCK_K; 0: all
    PDL: tl.constexpr,
):
    iters_per_tile = tl.cdiv(K, BLOCK_K)
    cta, num_ctas = tl.program_id(0), tl.num_programs(0)
    begin, end = _iter_range(cta, num_ctas, total_iters)
    first_tile = begin // iters_per_tile
    if PDL:
        if EARLY_LAUNCH:
            tl.extra.cuda.gdc_launch_dependents()
        if prefetch_k > 0:
            first = begin - first_tile * iters_per_tile
            column = first * BLOCK_K
            count = tl.minimum(tl.minimum(K - column, (end - begin) * BLOCK_K), prefetch_k)
            prefetch_weight(
                w, first_tile // tiles_m, column, count, N, K, BLOCK_N, SILU_MUL, NUM_THREADS,
                1 if FP8 else 2,
            )  # fmt: skip
        tl.extra.cuda.gdc_wait()

    k = tl.arange(0, BLOCK_K)
    for tile in range(first_tile, (end - 1) // iters_per_tile + 1):
        start = tile * iters_per_tile
        tile_n = tile // tiles_m
        m = tile % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
        m_mask = m[:, None] < M
        acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP_AB else (BLOCK_M, BLOCK_N), tl.float32)
        x_tile = x + m[:, None].to(tl.int64) * stride_x + k[None, :]
        row = _weight_rows(tile_n, tl.arange(0, BLOCK_N), N, BLOCK_N, SILU_MUL)
        w_tile = w + row[:, None] * K + k[None, :]
        for i in range(tl.maximum(begin - start, 0), tl.minimum(end - start, iters_per_tile)):
            offset = i * BLOCK_K
            if EVEN_K:
                xs = tl.load(x_tile + offset, mask=m_mask, other=0.0)
                ws = tl.load(w_tile + offset)
            else:
                k_mask = offset + k[None, :] < K
                xs = tl.load(x_tile + offset, mask=m_mask & k_mask, other=0.0)
                ws = tl.load(w_tile + offset, mask=k_mask, other=0.0)
            if FP8:
                ws = decode_fp8(ws, xs.dtype, FP8)
            if GROUP:
                scale = tl.load(scales + row * tl.cdiv(K, GROUP) + offset // GROUP)
                if SWAP_AB:
                    acc += tl.dot(ws, tl.trans(xs)) * scale[:, None]
                else:
                    acc += tl.dot(xs, tl.trans(ws)) * scale[None, :]
            else:
                acc = tl.dot(ws, tl.trans(xs), acc) if SWAP_AB else tl.dot(xs, tl.trans(ws), acc)
        if PDL and not EARLY_LAUNCH:  # noqa: SIM102  a constexpr
            if start + iters_per_tile >= end:
                tl.extra.cuda.gdc_launch_dependents()
        if SWAP_AB:
            acc = tl.trans(acc)
        if FP8 and GROUP == 0:
            acc *= tl.load(scales + row)[None, :]

        first_cta, others = cta, cta * 0
        if MAX_SPLIT > 1:
            first_cta = _cta_of_iter(start, num_ctas, total_iters)
            others = _cta_of_iter(start + iters_per_tile - 1, num_ctas, total_iters) - first_cta
        split = cta - first_cta
        column = tl.arange(0, BLOCK_N)[None, :]
        is_last = True if MAX_SPLIT == 1 else others == 0
        if WRITE_PARTIALS:
            column += tile_n * BLOCK_N
            address = partials + (split * M + m[:, None]) * N + column
            tl.store(address, acc, mask=m_mask & (column < N))
        elif MAX_SPLIT > 1:  # noqa: SIM102  a constexpr
            if others > 0:
                # A CTA shares at most two tiles with others: its first tile, and its last one, of
                # which it is the first CTA. So two workspace slots per CTA, 2p and 2p + 1, do.
                address = partials + tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + column
                slot = (2 * cta + (split == 0)) * BLOCK_M * BLOCK_N
                tl.store(address + slot, acc, mask=m_mask)
                tl.debug_barrier()  # the whole partial is written before the CTA signals
                is_last = tl.atomic_add(semaphores + tile, 1, sem="acq_rel") == others
                if is_last:
                    tl.store(semaphores + tile, 0)
                    acc = _sum_partials(
                        address, first_cta, others, m_mask, BLOCK_M, BLOCK_N, MAX_SPLIT
                    )
        if not WRITE_PARTIALS:  # noqa: SIM102  a constexpr
            if is_last:
                _epilogue(
                    acc, tile_n, m, bias, sum_of_squares, residual, norm_weight,
                    out, norm_out, sum_of_squares_out, tile_max, tile_argmax,
                    M, N, K, norm_tiles, eps,
                    x.dtype.element_ty, BLOCK_M, BLOCK_N, SILU_MUL,
                )  # fmt: skip


@jit
def _sum_partials(
    address, first_cta, others, mask,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MAX_SPLIT: tl.constexpr,
):  # fmt: skip
    """Sums a tile's split-K partials in order; L1 is bypassed, since other SMs wrote them."""
    acc = tl.zeros(address.shape, tl.float32)
    for i in tl.static_range(MAX_SPLIT):
        slot = 2 * (first_cta + i) + (i == 0)
        acc += tl.load(
            address + slot * BLOCK_M * BLOCK_N,
            mask=mask & (i <= others),
            other=0.0,
            cache_modifier=".cg",
        )
    return acc


@jit
def _iter_range(cta, num_ctas, total_iters):
    """The iterations [begin, end) of a CTA: from cta * total_iters // num_ctas on.

    That product may exceed 2^31, where every tile has a CTA: so only the remainder is multiplied.
    """
    each, more = total_iters // num_ctas, total_iters % num_ctas
    begin = cta * each + cta * more // num_ctas
    return begin, (cta + 1) * each + (cta + 1) * more // num_ctas


@jit
def _cta_of_iter(iteration, num_ctas, total_iters):
    """The CTA that computes an iteration."""
    return ((iteration + 1) * num_ctas - 1) // total_iters


@jit
def _weight_rows(tile, i, N, BLOCK_N: tl.constexpr, SILU_MUL: tl.constexpr):
    """Row of W for row i of an N tile; rows past the end repeat the last one."""
    if SILU_MUL:
        half: tl.constexpr = BLOCK_N // 2
        row = tl.minimum(tile * half + i % half, N - 1) + i // half * N
    else:
        row = tl.minimum(tile * BLOCK_N + i, N - 1)
    return row.to(tl.int64)


@jit
def _epilogue(
    acc, tile, m, bias, sum_of_squares, residual, norm_weight,
    out, norm_out, sum_of_squares_out, tile_max, tile_argmax, M, N, K, norm_tiles, eps,
    x_type: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SILU_MUL: tl.constexpr,
):  # fmt: skip
    """Accumulators [BLOCK_M, BLOCK_N] float32 -> the output of tile `tile` along N."""
    m_mask = m[:, None] < M
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if SILU_MUL:
        n = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        gate_up = tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2))
        acc, up = tl.split(tl.permute(gate_up, (0, 2, 1)))
    n_mask = n < N
    inv_rms = tl.full((BLOCK_M, 1), 1.0, tl.float32)
    if sum_of_squares is not None:
        total = tl.zeros((BLOCK_M, 1), tl.float32)
        p = tl.arange(0, 32)[None, :]
        for first in range(0, norm_tiles, 32):
            mask = m_mask & (first + p < norm_tiles)
            part = tl.load(sum_of_squares + (first + p) * M + m[:, None], mask=mask, other=0.0)
            total += tl.sum(part, 1, keep_dims=True)
        inv_rms = tl.rsqrt(total / K + eps)
        acc *= inv_rms
    if bias is not None:
        acc += tl.load(bias + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
    if SILU_MUL:
        if sum_of_squares is not None:
            up *= inv_rms
        if bias is not None:
            up += tl.load(bias + N + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
        acc = acc * tl.sigmoid(acc) * up
    mask = m_mask & n_mask[None, :]
    offset = m[:, None].to(tl.int64) * N + n[None, :]
    if tile_max is not None:
        logits = acc.to(x_type).to(tl.float32)
        logits = tl.where(logits == logits, logits, float("inf"))  # NaN is as invalid as +inf
        logits = tl.where(n_mask[None, :], logits, float("-inf"))
        value, index = tl.max(logits, 1, return_indices=True)
        slot = m * tl.cdiv(N, BLOCK_N) + tile
        tl.store(tile_max + slot, value, mask=m < M)
        tl.store(tile_argmax + slot, index + tile * BLOCK_N, mask=m < M)
    else:
        if residual is not None:
            acc += tl.load(residual + offset, mask=mask, other=0.0).to(tl.float32)
        rounded = acc.to(out.dtype.element_ty)
        tl.store(out + offset, rounded, mask=mask)
        if norm_out is not None:
            r = tl.where(mask, rounded.to(tl.float32), 0.0)
            norm = tl.load(norm_weight + n, mask=n_mask, other=0.0).to(tl.float32)
            tl.store(norm_out + offset, (r * norm[None, :]).to(out.dtype.element_ty), mask=mask)
            tl.store(sum_of_squares_out + tile * M + m, tl.sum(r * r, 1), mask=m < M)


@jit
def decode_fp8(bits, dtype: tl.constexpr, FP8: tl.constexpr):
    """e4m3 bits (uint8) -> bfloat16 (float32 in tests), exact but for NaN.

    In bfloat16's fields a value is 2^-120 of the true one: the exponent biases are 7 and 127.
    Multiplying by 2^120 also normalises subnormals.
    """
    if FP8 == 1:
        return decode_e4m3(bits).to(dtype)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, scale, zero;
        mov.b32 scale, 0x7b807b80;
        mov.b32 zero, 0x80008000;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        shr.b32 c, a, 4;
        lop3.b32 c, c, 0x07f007f0, 0, 0xc0;
        lop3.b32 a, a, 0x80008000, c, 0xea;
        fma.rn.bf16x2 $0, a, scale, zero;
        shr.b32 c, b, 4;
        lop3.b32 c, c, 0x07f007f0, 0, 0xc0;
        lop3.b32 b, b, 0x80008000, c, 0xea;
        fma.rn.bf16x2 $1, b, scale, zero;
        }""",
        "=r,=r,r",
        [bits],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@jit
def prefetch_weight(
    w, tile, first, count, N, K,
    BLOCK_N: tl.constexpr, SILU_MUL: tl.constexpr, NUM_THREADS: tl.constexpr,
    ITEM_BYTES: tl.constexpr = 2,
):  # fmt: skip
    """Prefetches `count` columns of a tile's rows of W into L2; one bulk prefetch per thread."""
    THREADS_PER_ROW: tl.constexpr = max(NUM_THREADS // BLOCK_N, 1)
    i = tl.arange(0, THREADS_PER_ROW * BLOCK_N)
    row = _weight_rows(tile, i // THREADS_PER_ROW, N, BLOCK_N, SILU_MUL)
    length = count // THREADS_PER_ROW
    address = (w + row * K + first + i % THREADS_PER_ROW * length).to(tl.int64)
    size = i * 0 + length * ITEM_BYTES
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; // $0",
        "=r,l,r",
        [address, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def reduce_argmax_kernel(
    tile_max, tile_argmax, out, tiles,
    INVALID: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[m] = the index of the largest of m's `tiles` maxima; ties: the lowest index."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    m = tl.program_id(0)
    value = tl.full((BLOCK,), float("-inf"), tl.float32)
    index = tl.full((BLOCK,), 2**31 - 1, tl.int32)
    for first in range(0, tiles, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        v = tl.load(tile_max + m * tiles + tile, mask=tile < tiles, other=float("-inf"))
        i = tl.load(tile_argmax + m * tiles + tile, mask=tile < tiles, other=2**31 - 1)
        better = (v > value) | ((v == value) & (i < index))
        value = tl.where(better, v, value)
        index = tl.where(better, i, index)
    top = tl.max(value, 0)
    id = tl.min(tl.where(value == top, index, 2**31 - 1), 0)
    finite = (top > float("-inf")) & (top < float("inf"))
    tl.store(out + m, tl.where(finite, id, INVALID).to(tl.int64))
