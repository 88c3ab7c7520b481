# mypy: allow-untyped-defs, allow-incomplete-defs
"""The best token of logits that a low-rank product corrects, without writing the sums.

A Markov head's row adds W2 x to the row's logits, and only the best column is wanted. So the CTAs
stream W2 once, each keeps its best, and a second kernel takes the best of these. Domino's pool is
the same with a matrix per request.

A block's rows read W2 in alternate directions: what one has read last is in the L2 cache still, and
the next begins with it. Its first tiles are loaded before the preceding kernel has ended (PDL).
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.runtime.gpu import gpu_of, next_power_of_2
from forerun.kernels.runtime.jit import jit, tl
from forerun.kernels.runtime.pdl import pdl_options, prefetch_lines

MAX_BATCH = 64  # requests of `best_corrected`: their x stays in registers
MAX_RANK = 512
BLOCK_V = 64  # columns of a tile
AHEAD = 4  # tiles that a CTA requests before the preceding kernel has ended
LINE = 128  # bytes of a line of the L2 cache
POOL_BLOCK = 32


def fits_best_corrected(x: Tensor, weight: Tensor) -> bool:
    """Whether `best_corrected` serves x [B, r] and a weight [V, r] that is not quantized."""
    rank = weight.shape[-1]
    power = 16 <= rank <= MAX_RANK and rank == next_power_of_2(rank)
    plain = weight.numel() > 0 and weight.is_contiguous() and x.dtype == weight.dtype
    return plain and power and len(x) <= MAX_BATCH


def best_corrected(
    logits: Tensor, x: Tensor, weight: Tensor, table: Tensor, backward: bool = False
) -> tuple[Tensor, Tensor]:
    """The column of the largest logits + weight x, on a GPU, and its row of `table`.

    Args:
        logits: [B, V], contiguous rows.
        x: [B, r]; `fits_best_corrected`.
        weight: [V, r].
        table: [V, r], contiguous.
        backward: read `weight` from its end.

    Returns:
        columns [B] int64, the lowest of equals, 0 where all are NaN or -inf; table[columns] [B, r].
    """
    batch, vocab = logits.shape
    rank, gpu = weight.shape[1], gpu_of(x.device)
    tile = BLOCK_V // 2 if gpu.amd else BLOCK_V
    parts = min(gpu.num_sms, -(-vocab // tile))
    best, column = _new_parts(parts, batch, x)
    stages = 2 if gpu.amd or rank > 256 else 4
    _corrected[(parts,)](
        logits, x.contiguous(), weight, best, column, batch, vocab, logits.stride(0),
        RANK=rank, BLOCK_B=max(16, next_power_of_2(batch)), BLOCK_V=tile, BACKWARD=backward,
        PREFETCH=AHEAD * tile * rank * weight.itemsize // LINE, LINE=LINE // weight.itemsize,
        num_warps=8 if gpu.amd else 4, num_stages=stages, **pdl_options(x),
    )  # fmt: skip
    taken = torch.empty_like(x, memory_format=torch.contiguous_format)
    return _best_of(best, column, table, taken), taken


def best_in_pool(logits: Tensor, x: Tensor, pool: Tensor, weight: Tensor) -> Tensor:
    """The column of the largest logits + weight[pool] x of every request, on a GPU.

    Args:
        logits: [B, C], of the pool, contiguous rows.
        x: [B, m].
        pool: [B, C] int64, columns.
        weight: [V, m], contiguous.

    Returns:
        columns [B] int64.
    """
    batch, places = pool.shape
    size = weight.shape[1]
    parts = -(-places // POOL_BLOCK)
    best, column = _new_parts(parts, batch, x)
    _pooled[(parts, batch)](
        logits, x.contiguous(), pool, weight, best, column, batch, places, size,
        logits.stride(0), SIZE=next_power_of_2(size), BLOCK=POOL_BLOCK, num_warps=4,
        **pdl_options(x),
    )  # fmt: skip
    return _best_of(best, column)


def _new_parts(parts: int, batch: int, like: Tensor) -> tuple[Tensor, Tensor]:
    best = torch.empty(parts, batch, dtype=torch.float32, device=like.device)
    return best, torch.empty(parts, batch, dtype=torch.int32, device=like.device)


def _best_of(
    best: Tensor, column: Tensor, table: Tensor | None = None, taken: Tensor | None = None
) -> Tensor:
    """The column of the best part, [B] int64; `taken` becomes its rows of `table`."""
    parts, batch = best.shape
    out = torch.empty(batch, dtype=torch.int64, device=best.device)
    _best_part[(batch,)](
        best, column, out, best if table is None else table, best if taken is None else taken,
        parts, batch, RANK=0 if table is None else table.shape[1], PARTS=next_power_of_2(parts),
        num_warps=1, **pdl_options(best),
    )  # fmt: skip
    return out


@jit
def _tile(step, tiles, BACKWARD: tl.constexpr):
    """The tile that is read at a step of a pass over all `tiles`."""
    tile = step
    if BACKWARD:
        tile = tiles - 1 - step
    return tile


@jit
def _prefetch_tiles(
    weight_ptr, vocab, part, parts, RANK: tl.constexpr, BLOCK_V: tl.constexpr,
    BACKWARD: tl.constexpr, PREFETCH: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """Requests PREFETCH lines, of LINE elements, of a CTA's first tiles."""
    element = tl.arange(0, PREFETCH) * LINE
    step = part + element // (BLOCK_V * RANK) * parts
    tile = _tile(step, tl.cdiv(vocab, BLOCK_V), BACKWARD).to(tl.int64)
    at = tile * (BLOCK_V * RANK) + element % (BLOCK_V * RANK)
    prefetch_lines(weight_ptr + tl.minimum(tl.maximum(at, 0), vocab.to(tl.int64) * RANK - 1))


@jit
def _corrected(
    logits_ptr, x_ptr, weight_ptr, best_ptr, column_ptr, batch, vocab, stride,
    RANK: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_V: tl.constexpr, BACKWARD: tl.constexpr,
    PREFETCH: tl.constexpr, LINE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A CTA takes every num_programs-th tile of columns and keeps each request's best."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    tiles = tl.cdiv(vocab, BLOCK_V)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        _prefetch_tiles(weight_ptr, vocab, part, parts, RANK, BLOCK_V, BACKWARD, PREFETCH, LINE)
        tl.extra.cuda.gdc_wait()
    b, r = tl.arange(0, BLOCK_B), tl.arange(0, RANK)
    served = b < batch
    x = tl.load(x_ptr + r[:, None] + b[None, :] * RANK, mask=served[None, :], other=0.0)
    best = tl.full([BLOCK_B], float("-inf"), tl.float32)
    column = tl.zeros([BLOCK_B], tl.int32)
    for step in range(part, tiles, parts):
        v = _tile(step, tiles, BACKWARD) * BLOCK_V + tl.arange(0, BLOCK_V)
        inside = v < vocab
        at = v.to(tl.int64)[:, None] * RANK + r[None, :]
        weight = tl.load(weight_ptr + at, mask=inside[:, None], other=0.0)
        both = inside[:, None] & served[None, :]
        own = b.to(tl.int64)[None, :] * stride + v[:, None]
        scores = tl.load(logits_ptr + own, mask=both, other=float("-inf")).to(tl.float32)
        scores += tl.dot(weight, x, input_precision="ieee")
        scores = tl.where(both & (scores == scores), scores, float("-inf"))
        largest = tl.max(scores, 0)
        first = tl.min(tl.where(scores == largest[None, :], v[:, None], vocab), 0)
        better = largest > best
        if BACKWARD:
            better |= (largest == best) & (largest > float("-inf"))
        best = tl.where(better, largest, best)
        column = tl.where(better, first, column)
    tl.store(best_ptr + part * batch + b, best, mask=served)
    tl.store(column_ptr + part * batch + b, column, mask=served)


@jit
def _pooled(
    logits_ptr, x_ptr, pool_ptr, weight_ptr, best_ptr, column_ptr, batch, places, size, stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A CTA scores BLOCK places of a request's pool."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    part, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c, m = part * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SIZE)
    inside, in_size = c < places, m < size
    ids = tl.load(pool_ptr + request * places + c, mask=inside, other=0)
    at = ids[:, None] * size + m[None, :]
    weights = tl.load(weight_ptr + at, mask=inside[:, None] & in_size[None, :], other=0.0)
    x = tl.load(x_ptr + request * size + m, mask=in_size, other=0.0).to(tl.float32)
    scores = tl.load(logits_ptr + request * stride + c, mask=inside, other=0.0).to(tl.float32)
    scores += tl.sum(weights.to(tl.float32) * x[None, :], 1)
    scores = tl.where(inside & (scores == scores), scores, float("-inf"))
    largest = tl.max(scores, 0)
    best = tl.where(inside & (scores == largest), ids, 2147483647)
    tl.store(best_ptr + part * batch + request, largest)
    tl.store(column_ptr + part * batch + request, tl.min(best, 0).to(tl.int32))


@jit
def _best_part(
    best_ptr, column_ptr, out_ptr, table_ptr, taken_ptr, parts, batch,
    RANK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request, part = tl.program_id(0), tl.arange(0, PARTS)
    inside = part < parts
    at = part * batch + request
    best = tl.load(best_ptr + at, mask=inside, other=float("-inf"))
    column = tl.load(column_ptr + at, mask=inside, other=2147483647)
    first = tl.min(tl.where(best == tl.max(best, 0), column, 2147483647), 0).to(tl.int64)
    tl.store(out_ptr + request, first)
    if RANK > 0:
        r = tl.arange(0, RANK)
        tl.store(taken_ptr + request * RANK + r, tl.load(table_ptr + first * RANK + r))
