# mypy: allow-untyped-defs, allow-incomplete-defs
"""Greedy walks over the candidates of a block's rows: one CTA per request goes row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.runtime.gpu import next_power_of_2
from forerun.kernels.runtime.jit import jit, tl


def selector_walk(
    anchor: Tensor,
    unary: Tensor,
    candidates: Tensor,
    projected: Tensor,
    before: Tensor,
    after: Tensor,
) -> Tensor:
    """DFlash2's walk, on a GPU: c after p scores `unary` + <before[p] · projected, after[c]>.

    Args:
        anchor: [B] int64.
        unary: [B, D, K] float32.
        candidates: [B, D, K] int64.
        projected: [B, D, r].
        before, after: [V, r].

    Returns:
        tokens [B, D] int64; the first of equal scores.
    """
    batch, depth, k = candidates.shape
    rank = before.shape[1]
    tokens = torch.empty(batch, depth, dtype=torch.int64, device=anchor.device)
    _selector_walk[(batch,)](
        anchor, unary, candidates, projected.contiguous(), before, after, tokens, depth, k, rank,
        K=next_power_of_2(k), RANK=next_power_of_2(rank), num_warps=8,
    )  # fmt: skip
    return tokens


def lattice_walk(start: Tensor, out: Tensor, into: Tensor, columns: Tensor, depth: int) -> Tensor:
    """LiLiCorr's walk, on a GPU: candidate j after i has <out of i, into of j>.

    Args:
        start: [B, d], out of the anchor.
        out, into: [B, S, K, d].
        columns: [B, S, K] int64.

    Returns:
        tokens [B, depth] int64, of the first rows; the first of equal scores.
    """
    batch, slots, k, size = out.shape
    tokens = torch.empty(batch, depth, dtype=torch.int64, device=start.device)
    _lattice_walk[(batch,)](
        start.contiguous(), out.contiguous(), into.contiguous(), columns, tokens, depth, slots, k,
        size, K=next_power_of_2(k), SIZE=next_power_of_2(size), num_warps=4,
    )  # fmt: skip
    return tokens


@jit
def _first_best(scores, index, inside, K: tl.constexpr):
    """The lowest index of the largest score; NaN counts as -inf."""
    scores = tl.where(inside & (scores == scores), scores, float("-inf"))
    return tl.min(tl.where(inside & (scores == tl.max(scores, 0)), index, K - 1), 0)


@jit
def _selector_walk(
    anchor_ptr, unary_ptr, candidates_ptr, projected_ptr, before_ptr, after_ptr, tokens_ptr,
    depth, k, rank, K: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    index, r = tl.arange(0, K), tl.arange(0, RANK)
    inside, in_rank = index < k, r < rank
    token = tl.load(anchor_ptr + request)
    for i in range(depth):
        row = request * depth + i
        ids = tl.load(candidates_ptr + row * k + index, mask=inside, other=0)
        at = ids[:, None] * rank + r[None, :]
        own = tl.load(after_ptr + at, mask=inside[:, None] & in_rank[None, :], other=0.0)
        query = tl.load(before_ptr + token * rank + r, mask=in_rank, other=0.0).to(tl.float32)
        query *= tl.load(projected_ptr + row * rank + r, mask=in_rank, other=0.0).to(tl.float32)
        scores = tl.load(unary_ptr + row * k + index, mask=inside, other=0.0)
        scores += tl.sum(own.to(tl.float32) * query[None, :], 1)
        best = _first_best(scores, index, inside, K)
        token = tl.sum(tl.where(index == best, ids, 0), 0)
        tl.store(tokens_ptr + row, token)


@jit
def _lattice_walk(
    start_ptr, out_ptr, into_ptr, columns_ptr, tokens_ptr, depth, slots, k, size,
    K: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    index, d = tl.arange(0, K), tl.arange(0, SIZE)
    inside, in_size = index < k, d < size
    before = tl.load(start_ptr + request * size + d, mask=in_size, other=0.0).to(tl.float32)
    for i in range(depth):
        row = (request * slots + i) * k
        at = (row + index)[:, None] * size + d[None, :]
        both = inside[:, None] & in_size[None, :]
        into = tl.load(into_ptr + at, mask=both, other=0.0).to(tl.float32)
        best = _first_best(tl.sum(into * before[None, :], 1), index, inside, K)
        tl.store(tokens_ptr + request * depth + i, tl.load(columns_ptr + row + best))
        before = tl.load(out_ptr + (row + best) * size + d, mask=in_size, other=0.0).to(tl.float32)
