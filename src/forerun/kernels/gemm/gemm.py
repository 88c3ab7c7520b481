"""Products with few rows: y = x Wᵀ for up to 512 rows, most of them bound by reading W once.

W [N, K] bfloat16 row-major, as checkpoints store it, is cut into tiles of BLOCK_N rows, and these
into chunks of BLOCK_K columns. All chunks, tile after tile, are dealt out evenly to a fixed number
of programs (stream-K, arXiv 2301.03598), one or two a multiprocessor; x is small and comes out of
the L2 cache. Where a tile has several programs, each leaves a float32 partial, and the last to
arrive adds them up in a fixed order: results are the same bits run after run, and within a row
bucket (`rows_block`) a row's result does not depend on how many rows stand beside it.

What surrounds a product is done in its epilogue: bias, residual, SiLU · up, argmax. RMSNorm is
split in two: the product that ends in a residual stores r · w and each tile's sum of r², and the
next product multiplies its result by 1 / sqrt(mean r² + eps), a factor of the whole row
(`DeferredNorm`).

Where the GPU has programmatic dependent launch, a kernel starts while its predecessor runs out,
and asks for its first chunks of W to be brought into the L2 cache before it waits for x.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.gemm import gemm_sm90
from forerun.kernels.gemm.gemm_sm90 import Sm90Config
from forerun.kernels.gemm.triton_kernels import best_kernel, gemm_kernel
from forerun.kernels.runtime.jit import use_triton
from forerun.kernels.runtime.pdl import pdl_options

MAX_ROWS = 512  # of Triton's kernel


@dataclass(frozen=True)
class GemmConfig:
    """How a product is cut up. Block sizes in elements."""

    block_n: int = 64  # rows of W in a tile; with SiLU half gate, half up
    block_k: int = 128
    programs: int = 128
    warps: int = 4
    stages: int = 4  # chunks in flight
    swap: bool = False  # W on the left: wgmma on Hopper, which needs block_n >= 64
    prefetch: int = 256  # elements of every row of its first tile that a program brings into L2
    early: bool = True  # the next kernel may start at once; else when the last chunk is read
    block_m: int = 128  # rows of x in a tile, where there are so many
    parts: bool = False  # partial sums are left to the next kernel, where it can add them up


Config = GemmConfig | Sm90Config  # the kernel of this file, or that of `gemm_sm90.py`


@dataclass(frozen=True)
class DeferredNorm:
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
        most = -(-weight.shape[0] // 16) * (MAX_ROWS // 128)
        return cls(weight, bias, torch.zeros(most, dtype=torch.int32, device=weight.device))


def rows_block(rows: int) -> int:
    """The bucket of a row count: 16, 32, 64, 128, then multiples of 128."""
    return max(16, 1 << (rows - 1).bit_length()) if rows <= 128 else -(-rows // 128) * 128


def tiles(rows: int, n: int, config: Config) -> int:
    """How many tiles a product has: the same for all row counts of a bucket."""
    bucket = rows_block(rows)
    return -(-bucket // min(config.block_m, bucket)) * -(-n // config.block_n)


def uses_split_k(config: Config) -> bool:
    """Whether partial sums are left to the next kernel, where it can add them up."""
    return config.split > 1 if isinstance(config, Sm90Config) else config.parts


def gemm(x: Tensor | DeferredNorm, m: Matrix, config: Config) -> Tensor:
    """x [T, K] -> x Wᵀ + b [T, N]."""
    if not use_triton(m.weight):
        return _sum_ref(x, m).to(m.weight.dtype)
    out = m.weight.new_empty(_plain(x).shape[0], m.weight.shape[0])
    _launch(x, m, config, out=out)
    return out


def gemm_add(x: Tensor | DeferredNorm, m: Matrix, residual: Tensor, config: Config) -> Tensor:
    """residual [T, N] + x Wᵀ + b, a new tensor."""
    if not use_triton(m.weight):
        return (_sum_ref(x, m) + residual.float()).to(residual.dtype)
    out = torch.empty_like(residual)
    _launch(x, m, config, out=out, residual=residual)
    return out


def gemm_add_deferred_norm(
    x: Tensor | DeferredNorm,
    m: Matrix,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    config: Config,
) -> tuple[DeferredNorm, Tensor]:
    """(RMSNorm of the sum, short of its last step; the sum) of residual [T, N] + x Wᵀ + b."""
    if not use_triton(m.weight):
        total = gemm_add(x, m, residual, config)
        full = total.float()
        scaled = (full * norm_weight.float()).to(total.dtype)
        return DeferredNorm(scaled, full.square().sum(1).unsqueeze(0), eps), total
    out, scaled = torch.empty_like(residual), torch.empty_like(residual)
    rows, n = residual.shape
    squares = residual.new_empty(-(-n // config.block_n), rows, dtype=torch.float32)
    _launch(
        x, m, config, out=out, residual=residual,
        norm_weight=norm_weight, scaled=scaled, out_squares=squares,
    )  # fmt: skip
    return DeferredNorm(scaled, squares, eps), out


def gemm_silu(x: Tensor | DeferredNorm, m: Matrix, config: Config) -> Tensor:
    """W = [gate | up] rows: silu(x gateᵀ) · (x upᵀ), [T, N / 2]."""
    if not use_triton(m.weight):
        gate, up = _sum_ref(x, m).chunk(2, -1)
        return (F.silu(gate) * up).to(m.weight.dtype)
    out = m.weight.new_empty(_plain(x).shape[0], m.weight.shape[0] // 2)
    _launch(x, m, config, out=out, paired=True)
    return out


def gemm_argmax(x: Tensor | DeferredNorm, m: Matrix, config: Config) -> Tensor:
    """[T] int64: argmax of `gemm` (rounded to bfloat16 like it; the lowest id of equals)."""
    if not use_triton(m.weight):
        return gemm(x, m, config).argmax(-1)
    n, rows = m.weight.shape[0], _plain(x).shape[0]
    across = -(-n // config.block_n)
    best = torch.empty(rows, across, dtype=torch.float32, device=m.weight.device)
    ids = torch.empty(rows, across, dtype=torch.int32, device=m.weight.device)
    _launch(x, m, config, best=best, best_ids=ids)
    out = torch.empty(rows, dtype=torch.int64, device=m.weight.device)
    options = pdl_options(out)
    best_kernel[(rows,)](best, ids, out, across, BLOCK=1024, **options)
    return out


def gemm_partials(x: Tensor, m: Matrix, config: Config) -> Tensor:
    """[S, T, N] float32, to be summed over the first dimension by whoever reads it; no bias.

    S programs a tile: `config.programs` must be S times the number of tiles.
    """
    rows, n = x.shape[0], m.weight.shape[0]
    if isinstance(config, Sm90Config):
        split, rest = config.split, 0
    else:
        split, rest = divmod(config.programs, tiles(rows, n, config))
    assert rest == 0 and split > 0
    if not use_triton(m.weight):
        parts = zip(x.tensor_split(split, 1), m.weight.tensor_split(split, 1), strict=True)
        return torch.stack([F.linear(a.float(), b.float()) for a, b in parts])
    partial = torch.empty(split, rows, n, dtype=torch.float32, device=x.device)
    _launch(x, Matrix(m.weight, None, m.locks), config, partial=partial)
    return partial


def _plain(x: Tensor | DeferredNorm) -> Tensor:
    return x.x if isinstance(x, DeferredNorm) else x


def _sum_ref(x: Tensor | DeferredNorm, m: Matrix) -> Tensor:
    """x Wᵀ + b in float32."""
    y = F.linear(_plain(x).float(), m.weight.float())
    if isinstance(x, DeferredNorm):
        y = y * x.factor()
    return y if m.bias is None else y + m.bias.float()


def _launch(
    x: Tensor | DeferredNorm,
    m: Matrix,
    config: Config,
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
    squares = x.squares if isinstance(x, DeferredNorm) else None
    rows, k = rows_in.shape
    eps = x.eps if isinstance(x, DeferredNorm) else 0.0
    if isinstance(config, Sm90Config):
        target = next(t for t in (out, best, partial) if t is not None)
        if partial is None and config.split > 1:
            config = replace(config, split=1)
        gemm_sm90.launch(
            config, rows_in, m.weight, target,
            paired=paired, partials=partial is not None, best_ids=best_ids, bias=m.bias,
            residual=residual, norm_weight=norm_weight, scaled=scaled, out_squares=out_squares,
            squares=squares, eps=eps,
        )  # fmt: skip
        return
    n = m.weight.shape[0] // (2 if paired else 1)
    assert rows <= MAX_ROWS and tiles(rows, m.weight.shape[0], config) <= len(m.locks)
    assert m.weight.is_contiguous() and rows_in.stride(1) == 1
    bucket = rows_block(rows)
    block_m = min(config.block_m, bucket)
    count, chunks = tiles(rows, m.weight.shape[0], config), -(-k // config.block_k)
    programs = min(config.programs, count * chunks)
    parts = max_splits(programs, count, chunks)
    only_partials = partial is not None
    if partial is None and parts > 1:
        size = (2 * programs, block_m, config.block_n)
        partial = torch.empty(size, dtype=torch.float32, device=rows_in.device)
    options = pdl_options(rows_in)
    gemm_kernel[(programs,)](
        rows_in, m.weight, m.bias, squares, residual, norm_weight,
        out, scaled, out_squares, best, best_ids, partial, m.locks,
        rows, n, k, rows_in.stride(0), 0 if squares is None else squares.shape[0],
        eps, bucket // block_m, count * chunks,
        config.prefetch if k % 64 == 0 else 0,
        BLOCK_M=block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        PARTS=parts, EARLY=config.early, SWAP=config.swap, PAIRED=paired, PARTIALS=only_partials,
        EVEN_K=k % config.block_k == 0,
        THREADS=32 * config.warps,
        num_warps=config.warps, num_stages=config.stages, **options,
    )  # fmt: skip


def max_splits(programs: int, tiles: int, chunks: int) -> int:
    """The most programs that one tile can have."""
    if programs % tiles == 0:
        return programs // tiles
    if tiles % programs == 0:
        return 1
    return -(-(chunks - 1) // (tiles * chunks // programs)) + 1
