# mypy: allow-untyped-defs, allow-incomplete-defs
"""Products with few rows: y = x Wᵀ for 1 to 128 rows, bound by reading W once.

W [N, K] bfloat16 row-major, as checkpoints store it. A program owns BLOCK_N rows of W and one of
`split` ranges of K; x is small and comes out of the L2 cache. With split > 1 every program leaves
a float32 partial, and the last one to arrive at a tile adds them up in a fixed order, so results
are the same bits run after run; and within a row bucket (`rows_block`) a row's result does not
depend on how many rows stand beside it.

What surrounds a product is done in its epilogue: bias, residual, SiLU · up, argmax. RMSNorm is
split in two: the product that ends in a residual stores r · w and each tile's sum of r², and the
next product multiplies its result by 1 / sqrt(mean r² + eps), a factor of the whole row (`Scaled`).

Where the GPU has programmatic dependent launch, a kernel starts while its predecessor runs out,
and asks for its first rows of W to be brought into the L2 cache before it waits for x.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.dispatch import jit, jit_for_any, tl, use_triton
from forerun.kernels.pdl import pdl_options

MAX_ROWS = 128


@dataclass(frozen=True)
class GemmConfig:
    """How a product is cut up. Block sizes in elements."""

    block_n: int = 64
    block_k: int = 128
    split: int = 1  # ranges of K
    warps: int = 4
    stages: int = 4  # tiles in flight
    swap: bool = False  # W on the left: wgmma on Hopper, which needs block_n >= 64
    prefetch: int = 512  # elements of every row of W brought into L2 ahead


@dataclass(frozen=True)
class Scaled:
    """Rows before RMSNorm's last step: `x` [T, K] is r · w, `squares` [P, T] float32 sums of r²."""

    x: Tensor
    squares: Tensor
    eps: float

    def factor(self) -> Tensor:
        """[T, 1] float32: what `x` still has to be multiplied by."""
        return torch.rsqrt(self.squares.sum(0) / self.x.shape[1] + self.eps).unsqueeze(1)


@dataclass(frozen=True)
class Matrix:
    """`weight` [N, K], `bias` [N] or None, and zeroed `locks` [>= tiles] int32 of its own.

    A product leaves `locks` zeroed. Two products with one matrix must not run at once.
    """

    weight: Tensor
    bias: Tensor | None
    locks: Tensor

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> Matrix:
        tiles = -(-weight.shape[0] // 16)
        return cls(weight, bias, torch.zeros(tiles, dtype=torch.int32, device=weight.device))


def rows_block(rows: int) -> int:
    """The bucket of a row count: 16, 32, 64 or 128."""
    return max(16, 1 << (rows - 1).bit_length())


def gemm(x: Tensor | Scaled, m: Matrix, config: GemmConfig) -> Tensor:
    """x [T, K] -> x Wᵀ + b [T, N]."""
    if not use_triton(m.weight):
        return _sum_torch(x, m).to(m.weight.dtype)
    out = m.weight.new_empty(_plain(x).shape[0], m.weight.shape[0])
    _launch(x, m, config, out=out)
    return out


def gemm_add(x: Tensor | Scaled, m: Matrix, residual: Tensor, config: GemmConfig) -> Tensor:
    """residual [T, N] + x Wᵀ + b, a new tensor."""
    if not use_triton(m.weight):
        return (_sum_torch(x, m) + residual.float()).to(residual.dtype)
    out = torch.empty_like(residual)
    _launch(x, m, config, out=out, residual=residual)
    return out


def gemm_add_scaled(
    x: Tensor | Scaled,
    m: Matrix,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    config: GemmConfig,
) -> tuple[Scaled, Tensor]:
    """(RMSNorm of the sum, short of its last step; the sum) of residual [T, N] + x Wᵀ + b."""
    if not use_triton(m.weight):
        total = gemm_add(x, m, residual, config)
        full = total.float()
        scaled = (full * norm_weight.float()).to(total.dtype)
        return Scaled(scaled, full.square().sum(1).unsqueeze(0), eps), total
    out, scaled = torch.empty_like(residual), torch.empty_like(residual)
    rows, n = residual.shape
    squares = residual.new_empty(-(-n // config.block_n), rows, dtype=torch.float32)
    _launch(
        x, m, config, out=out, residual=residual,
        norm_weight=norm_weight, scaled=scaled, out_squares=squares,
    )  # fmt: skip
    return Scaled(scaled, squares, eps), out


def gemm_silu(x: Tensor | Scaled, m: Matrix, config: GemmConfig) -> Tensor:
    """W = [gate | up] rows: silu(x gateᵀ) · (x upᵀ), [T, N / 2]."""
    if not use_triton(m.weight):
        gate, up = _sum_torch(x, m).chunk(2, -1)
        return (F.silu(gate) * up).to(m.weight.dtype)
    out = m.weight.new_empty(_plain(x).shape[0], m.weight.shape[0] // 2)
    _launch(x, m, config, out=out, paired=True)
    return out


def gemm_argmax(x: Tensor | Scaled, m: Matrix, config: GemmConfig) -> Tensor:
    """[T] int64: argmax of `gemm` (rounded to bfloat16 like it; the lowest id of equals)."""
    if not use_triton(m.weight):
        return gemm(x, m, config).argmax(-1)
    n, rows = m.weight.shape[0], _plain(x).shape[0]
    tiles = -(-n // config.block_n)
    best = torch.empty(tiles, rows, dtype=torch.float32, device=m.weight.device)
    ids = torch.empty(tiles, rows, dtype=torch.int32, device=m.weight.device)
    _launch(x, m, config, best=best, best_ids=ids)
    out = torch.empty(rows, dtype=torch.int64, device=m.weight.device)
    options = pdl_options(out)
    _best_kernel[(rows,)](best, ids, out, rows, tiles, BLOCK=1024, **options)
    return out


def gemm_partials(x: Tensor, m: Matrix, config: GemmConfig) -> Tensor:
    """[split, T, N] float32, to be summed over the first dimension by whoever reads it; no bias."""
    rows, n = x.shape[0], m.weight.shape[0]
    if not use_triton(m.weight):
        parts = [
            F.linear(a.float(), b.float())
            for a, b in zip(x.chunk(config.split, 1), m.weight.chunk(config.split, 1), strict=True)
        ]
        return torch.stack(parts)
    partial = torch.empty(config.split, rows, n, dtype=torch.float32, device=x.device)
    _launch(x, Matrix(m.weight, None, m.locks), config, partial=partial)
    return partial


def _plain(x: Tensor | Scaled) -> Tensor:
    return x.x if isinstance(x, Scaled) else x


def _sum_torch(x: Tensor | Scaled, m: Matrix) -> Tensor:
    """x Wᵀ + b in float32."""
    y = F.linear(_plain(x).float(), m.weight.float())
    if isinstance(x, Scaled):
        y = y * x.factor()
    return y if m.bias is None else y + m.bias.float()


def _launch(
    x: Tensor | Scaled,
    m: Matrix,
    config: GemmConfig,
    *,
    out: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    scaled: Tensor | None = None,
    out_squares: Tensor | None = None,
    best: Tensor | None = None,
    best_ids: Tensor | None = None,
    partial: Tensor | None = None,
    paired: bool = False,
) -> None:
    """`partial` alone, `best` and `best_ids`, or `out` with what goes with it, is written."""
    rows_in = _plain(x)
    squares = x.squares if isinstance(x, Scaled) else None
    rows, k = rows_in.shape
    n = m.weight.shape[0] // (2 if paired else 1)
    assert rows <= MAX_ROWS and m.weight.is_contiguous() and rows_in.stride(1) == 1
    tiles, split = -(-n // config.block_n), config.split
    only_partials = partial is not None
    if partial is None and split > 1:
        size = (split, rows, m.weight.shape[0])
        partial = torch.empty(size, dtype=torch.float32, device=rows_in.device)
    even = k % (config.block_k * split) == 0
    options = pdl_options(rows_in)
    _gemm_kernel[(tiles * split,)](
        rows_in, m.weight, m.bias, squares, residual, norm_weight,
        out, scaled, out_squares, best, best_ids, partial, m.locks,
        rows, n, k, rows_in.stride(0), 0 if squares is None else squares.shape[0],
        x.eps if isinstance(x, Scaled) else 0.0,
        BLOCK_M=rows_block(rows), BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        SPLIT=split, SWAP=config.swap, PAIRED=paired, PARTIALS=only_partials, EVEN_K=even,
        PREFETCH=min(config.prefetch, k // split) if even and options["PDL"] else 0,
        THREADS=32 * config.warps,
        num_warps=config.warps, num_stages=config.stages, **options,
    )  # fmt: skip


@jit_for_any("M", "P")
def _gemm_kernel(
    x,  # [M, K], stride_x
    w,  # [N, K], with PAIRED [2N, K]
    bias,  # [N], with PAIRED [2N], or None
    squares,  # [P, M] float32: x is `Scaled`; or None
    residual,  # [M, N] or None
    norm_weight,  # [N] or None
    out,  # [M, N] or None
    scaled,  # [M, N]
    out_squares,  # [tiles, M] float32
    best,  # [tiles, M] float32: each tile's largest, instead of `out`; or None
    best_ids,  # [tiles, M] int32
    partial,  # [SPLIT, M, N or 2N] float32
    locks,  # [tiles] int32 zeros, and zeros again at the end
    M,
    N,
    K,
    stride_x,
    P,
    eps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    SWAP: tl.constexpr,
    PAIRED: tl.constexpr,
    PARTIALS: tl.constexpr,
    EVEN_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    span = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT) * BLOCK_K
    k_first = part * span
    k_last = tl.minimum(K, k_first + span)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH > 0:
            _prefetch(w, tile * BLOCK_N, N, K, k_first, BLOCK_N, PREFETCH, THREADS)
            if PAIRED:
                up_rows = w + N.to(tl.int64) * K
                _prefetch(up_rows, tile * BLOCK_N, N, K, k_first, BLOCK_N, PREFETCH, THREADS)
        tl.extra.cuda.gdc_wait()

    m = tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row = tl.minimum(n, N - 1).to(tl.int64)  # rows past the end repeat the last one
    w_tile = w + row[:, None] * K + k[None, :]
    x_tile = x + m[:, None] * stride_x + k[None, :]
    present = m[:, None] < M
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    up = acc
    for at in range(k_first, k_last, BLOCK_K):
        if EVEN_K:
            xs = tl.load(x_tile + at, mask=present, other=0.0)
            ws = tl.load(w_tile + at)
        else:
            inside = at + k[None, :] < k_last
            xs = tl.load(x_tile + at, mask=present & inside, other=0.0)
            ws = tl.load(w_tile + at, mask=inside, other=0.0)
        acc = _dot(ws, xs, acc, SWAP)
        if PAIRED:
            second = w_tile + N.to(tl.int64) * K + at
            if EVEN_K:
                us = tl.load(second)
            else:
                us = tl.load(second, mask=inside, other=0.0)
            up = _dot(us, xs, up, SWAP)
    if SWAP:
        acc = tl.trans(acc)
        up = tl.trans(up)

    width = 2 * N if PAIRED else N
    place = m[:, None] * width + n[None, :]
    written = present & (n[None, :] < N)
    if SPLIT > 1 or PARTIALS:
        here = partial + part * M * width + place
        tl.store(here, acc, mask=written)
        if PAIRED:
            tl.store(here + N, up, mask=written)
    if not PARTIALS:
        last = True
        if SPLIT > 1:
            tl.debug_barrier()  # all of the program's partial is written before it reports
            last = tl.atomic_add(locks + tile, 1, sem="acq_rel") == SPLIT - 1
        if last:
            if SPLIT > 1:
                tl.store(locks + tile, 0)
                acc = _total(partial + place, M * width, written, SPLIT, BLOCK_M, BLOCK_N)
                if PAIRED:
                    up = _total(partial + place + N, M * width, written, SPLIT, BLOCK_M, BLOCK_N)
            _finish(
                acc, up, m, n, present, written, tile, bias, squares, residual, norm_weight,
                out, scaled, out_squares, best, best_ids, M, N, K, P, eps, PAIRED,
                w.dtype.element_ty,
            )  # fmt: skip


@jit
def _finish(
    acc, up, m, n, present, written, tile, bias, squares, residual, norm_weight,
    out, scaled, out_squares, best, best_ids, M, N, K, P, eps, PAIRED: tl.constexpr,
    w_type: tl.constexpr,
):  # fmt: skip
    """The epilogue: float32 sums [BLOCK_M, BLOCK_N] -> what the caller asked for."""
    if squares is not None:
        total = tl.zeros_like(m).to(tl.float32)[:, None]
        p = tl.arange(0, 32)[None, :]
        for first in range(0, P, 32):
            tiles = present & (first + p < P)
            part = tl.load(squares + (first + p) * M + m[:, None], mask=tiles, other=0.0)
            total += tl.sum(part, 1, keep_dims=True)
        factor = tl.rsqrt(total / K + eps)
        acc *= factor
        up *= factor
    inside = n < N
    if bias is not None:
        acc += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
        if PAIRED:
            up += tl.load(bias + N + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    if PAIRED:
        acc = acc * tl.sigmoid(acc) * up
    place = m[:, None] * N + n[None, :]
    if best is not None:
        logits = acc.to(w_type).to(tl.float32)
        logits = tl.where(inside[None, :], logits, float("-inf"))
        value, index = tl.max(logits, 1, return_indices=True)
        tl.store(best + tile * M + m, value, mask=m < M)
        tl.store(best_ids + tile * M + m, index + tl.min(n, 0), mask=m < M)
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
def _dot(ws, xs, acc, SWAP: tl.constexpr):
    if SWAP:
        acc = tl.dot(ws, tl.trans(xs), acc)
    else:
        acc = tl.dot(xs, tl.trans(ws), acc)
    return acc


@jit
def _total(first, step, mask, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sum of SPLIT partials in their order, past the L1 cache: other programs wrote them."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for part in tl.static_range(SPLIT):
        acc += tl.load(first + part * step, mask=mask, other=0.0, cache_modifier=".cg")
    return acc


@jit
def _prefetch(
    w, first, N, K, k_first, BLOCK_N: tl.constexpr, COUNT: tl.constexpr, THREADS: tl.constexpr
):
    """Asks for COUNT elements of BLOCK_N rows of `w`, one request a thread."""
    PIECES: tl.constexpr = max(THREADS // BLOCK_N, 1)
    PIECE: tl.constexpr = COUNT // PIECES
    i = tl.arange(0, PIECES * BLOCK_N)
    row = tl.minimum(first + i // PIECES, N - 1).to(tl.int64)
    address = (w + row * K + k_first + i % PIECES * PIECE).to(tl.int64)
    size = tl.full((PIECES * BLOCK_N,), PIECE * 2, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; // $0",
        "=r,l,r",
        [address, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit_for_any("M")
def _best_kernel(best, best_ids, out, M, tiles, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[row] = the id of the largest of row's `tiles` candidates, the lowest of equals."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    value = tl.full((BLOCK,), float("-inf"), tl.float32)
    index = tl.full((BLOCK,), 2**31 - 1, tl.int32)
    for first in range(0, tiles, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        v = tl.load(best + tile * M + row, mask=tile < tiles, other=float("-inf"))
        i = tl.load(best_ids + tile * M + row, mask=tile < tiles, other=2**31 - 1)
        better = (v > value) | ((v == value) & (i < index))
        value = tl.where(better, v, value)
        index = tl.where(better, i, index)
    top = tl.max(value, 0)
    tl.store(out + row, tl.min(tl.where(value == top, index, 2**31 - 1), 0).to(tl.int64))
