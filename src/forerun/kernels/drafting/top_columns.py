# mypy: allow-untyped-defs, allow-incomplete-defs
"""The best few columns of rows of logits, and their log-sum-exp, in one pass over the logits.

The k largest values of a row lie in the k blocks of columns with the largest maxima. So one kernel
writes the maximum of every block, and another chooses k blocks, reads them again, and chooses k
columns. `torch.topk` goes over all values several times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.runtime.gpu import next_power_of_2
from forerun.kernels.runtime.jit import jit, tl, use_triton

MAX_K = 64
COLUMNS = 128  # of a block
BLOCKS_PER_CTA = 16
MAX_BLOCKS = 4096  # that one CTA chooses from


def top_columns(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest logits of each row, best first, the lowest column of equals first.

    Args:
        logits: [R, V], any float dtype, contiguous rows. NaN counts as -inf.
        k: at most V.

    Returns:
        values [R, k] float32, columns [R, k] int64, and the log-sum-exp of each row [R] float32.
    """
    rows, vocab = logits.shape
    blocks = -(-vocab // COLUMNS)
    if not has_kernel(logits, k):
        return top_columns_ref(logits, k)
    maxima = torch.empty(rows, 2, blocks, dtype=torch.float32, device=logits.device)
    values = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
    columns = torch.empty(rows, k, dtype=torch.int64, device=logits.device)
    lse = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _block_maxima[(rows, -(-blocks // BLOCKS_PER_CTA))](
        logits, maxima, vocab, logits.stride(0), blocks,
        BLOCKS=BLOCKS_PER_CTA, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    _top_columns[(rows,)](
        logits, maxima, values, columns, lse, vocab, logits.stride(0), blocks, k,
        K=next_power_of_2(k), BLOCKS=next_power_of_2(blocks), COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    return values, columns, lse


def has_kernel(logits: Tensor, k: int) -> bool:
    """Whether `top_columns` launches its kernels for these arguments."""
    blocks = -(-logits.shape[1] // COLUMNS)
    return use_triton(logits) and k <= min(MAX_K, blocks) and blocks <= MAX_BLOCKS


def top_columns_ref(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Reference implementation of `top_columns`, but for the order of equal values."""
    full = logits.float().nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    values, columns = full.topk(k, -1)
    return values, columns, full.logsumexp(-1)


@jit
def _load(ptr, at, inside):
    """Logits as float32; -inf beyond the row and for NaN."""
    x = tl.load(ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@jit
def _block_maxima(
    logits_ptr, maxima_ptr, vocab, stride, blocks,
    BLOCKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """maxima [R, 2, blocks]: the largest value of each block, and the sum of exp(x - it)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x = _load(logits_ptr + row * stride, at, at < vocab)
    largest = tl.max(x, 1)
    shift = tl.where(largest > float("-inf"), largest, 0.0)
    total = tl.sum(tl.exp(x - shift[:, None]), 1)
    out = maxima_ptr + row * 2 * blocks + block
    tl.store(out, largest, mask=block < blocks)
    tl.store(out + blocks, total, mask=block < blocks)


@jit
def _top_columns(
    logits_ptr, maxima_ptr, values_ptr, columns_ptr, lse_ptr, vocab, stride, blocks, k,
    K: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One CTA per row: K blocks by their maxima, then k columns of these."""
    row = tl.program_id(0).to(tl.int64)
    block, slot = tl.arange(0, BLOCKS), tl.arange(0, K)
    inside = block < blocks
    at = maxima_ptr + row * 2 * blocks + block
    largest = tl.load(at, mask=inside, other=float("-inf"))
    total = tl.load(at + blocks, mask=inside, other=0.0)
    best = tl.max(largest, 0)
    shift = tl.where(best > float("-inf"), best, 0.0)
    tl.store(lse_ptr + row, shift + tl.log(tl.sum(total * tl.exp(largest - shift), 0)))

    chosen = tl.zeros([K], tl.int32)
    left = inside
    for i in range(k):
        value = tl.max(tl.where(left, largest, float("-inf")), 0)
        first = tl.min(tl.where(left & (largest == value), block, BLOCKS), 0)
        chosen = tl.where(slot == i, first, chosen)
        left = left & (block != first)

    column = tl.reshape(chosen[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :], [K * COLUMNS])
    used = tl.reshape((slot[:, None] < k) & (tl.arange(0, COLUMNS)[None, :] >= 0), [K * COLUMNS])
    some = used & (column < vocab)
    x = _load(logits_ptr + row * stride, column, some)
    for i in range(k):
        value = tl.max(tl.where(some, x, float("-inf")), 0)
        first = tl.min(tl.where(some & (x == value), column, vocab), 0)
        tl.store(values_ptr + row * k + i, value)
        tl.store(columns_ptr + row * k + i, first.to(tl.int64))
        some = some & (column != first)
