# mypy: allow-untyped-defs, allow-incomplete-defs
"""The most probable prefixes of independent positions, best first: the tokens of a draft tree.

A prefix gives every position up to its end one of the position's tokens, and its score is the sum
of their log-probabilities. The search keeps one candidate for every prefix that is taken: its next
sibling (the next token at its last position), and its first child (the best token one position
further). Nothing better can hide behind these, so N rounds find the N best. (arXiv 2604.12989.)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from forerun.kernels.runtime.jit import jit, tl, triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options

NOBODY = -1  # the token of a node that there is no prefix for
COLUMNS = 4096  # logits a program of `top_log_probs` reads at once


def top_log_probs_ref(logits: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """The twin of `top_log_probs`."""
    values, ids = logits.topk(ranks)
    return values.float() - logits.float().logsumexp(-1, keepdim=True), ids


def top_log_probs(logits: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """The best columns of every row, and the logarithms of their probabilities.

    Args:
        logits: [B, D, V], any float dtype; rows may lie apart, evenly.
        ranks: R <= V.

    Returns:
        scores [B, D, R] float32, falling; ids [B, D, R] int64.
    """
    if not use_triton(logits):
        return top_log_probs_ref(logits, ranks)
    values, ids = logits.topk(ranks)
    scores = torch.empty_like(values, dtype=torch.float32)
    _log_probs[(scores.shape[0] * scores.shape[1],)](
        logits, values, scores, logits.stride(1), logits.shape[-1], ranks,
        BLOCK=COLUMNS, RANKS=triton.next_power_of_2(ranks), num_warps=8, **pdl_options(logits),
    )  # fmt: skip
    return scores, ids


def best_first_ref(scores: Tensor, ids: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """The twin of `best_first`, over the batch at once."""
    batch, depth, ranks = scores.shape
    device = scores.device
    scores = torch.where(scores == scores, scores, -torch.inf)
    behind = pad(scores, (0, 1, 0, 1), value=-torch.inf)  # past the last rank and the last position
    every = torch.arange(batch, device=device)
    # Candidates, one more after every round:
    score = scores.new_full((batch, nodes + 1), -torch.inf)
    above = scores.new_zeros(batch, nodes + 1)  # score of the parent
    rank, place, parent = torch.zeros(3, batch, nodes + 1, dtype=torch.int64, device=device)
    score[:, 0] = scores[:, 0, 0]
    tokens, parents = torch.empty(2, batch, nodes, dtype=torch.int64, device=device)
    for node in range(nodes):
        top, best = score.max(1)
        r, d, before = rank[every, best], place[every, best], above[every, best]
        found = top > -torch.inf
        tokens[:, node] = torch.where(found, ids[every, d, r], NOBODY)
        parents[:, node] = torch.where(found, parent[every, best], 0)
        # Its next sibling takes its place.
        rank[every, best] = (r + 1).clamp_max(ranks - 1)
        score[every, best] = before + behind[every, d, r + 1]
        # Its first child comes anew.
        score[:, node + 1] = top + behind[every, d + 1, 0]
        above[:, node + 1] = top
        place[:, node + 1] = (d + 1).clamp_max(depth - 1)
        parent[:, node + 1] = node + 1
    return tokens, parents


def best_first(scores: Tensor, ids: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """The `nodes` best prefixes as a tree, each after its parent; of equals the elder candidate.

    A prefix whose last token has rank r comes after r siblings. So R = nodes ranks are all that can
    matter.

    Args:
        scores: [B, D, R] float32, contiguous: log-probabilities, falling along R. What is NaN or
            -inf is no token.
        ids: [B, D, R] int64, contiguous: the tokens.
        nodes: N, at most 127; so is D.

    Returns:
        tokens [B, N] int64: the last token of each prefix; -1 where there are fewer than N.
        parents [B, N] int64: the row of the prefix before it. Row 0 is the root, prefix n has row
            n + 1.
    """
    if not use_triton(scores):
        return best_first_ref(scores, ids, nodes)
    batch, depth, ranks = scores.shape
    tokens, parents = torch.empty(2, batch, nodes, dtype=torch.int64, device=scores.device)
    _best_first[(batch,)](
        scores, ids, tokens, parents, depth, ranks, nodes,
        BLOCK=max(32, triton.next_power_of_2(nodes)), num_warps=1, **pdl_options(scores),
    )  # fmt: skip
    return tokens, parents


@jit
def _log_probs(
    logits, values, scores, row_stride, vocab, ranks,
    BLOCK: tl.constexpr, RANKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program a row: its normaliser in one pass, taken from the best values."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, RANKS)
    best = tl.load(values + row * ranks + r, mask=r < ranks, other=float("-inf")).to(tl.float32)
    peak = tl.max(best, 0)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(logits + row * row_stride + at, mask=at < vocab, other=float("-inf"))
        total += tl.exp(x.to(tl.float32) - peak)
    normaliser = peak + tl.log(tl.sum(total, 0))
    tl.store(scores + row * ranks + r, best - normaliser, mask=r < ranks)


@jit
def _number(x):
    return tl.where(x == x, x, float("-inf"))


@jit
def _best_first(
    scores, ids, tokens, parents, depth, ranks, nodes, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """A program a request; a lane a candidate."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    scores += request * depth * ranks
    ids += request * depth * ranks
    i = tl.arange(0, BLOCK)
    score = tl.where(i == 0, _number(tl.load(scores)), float("-inf"))
    above = tl.zeros((BLOCK,), tl.float32)  # score of the parent
    origin = tl.zeros((BLOCK,), tl.int32)  # parent's row << 16 | position << 8 | rank
    for node in range(nodes):
        top = tl.max(score, 0)
        own = i == tl.min(tl.where(score == top, i, BLOCK), 0)
        taken = tl.sum(tl.where(own, origin, 0), 0)
        before = tl.sum(tl.where(own, above, 0.0), 0)
        rank, place = taken & 255, (taken >> 8) & 255
        at = place * ranks + rank
        found = top > float("-inf")
        token = tl.load(ids + at)
        tl.store(tokens + request * nodes + node, tl.where(found, token, -1))
        tl.store(parents + request * nodes + node, tl.where(found, taken >> 16, 0).to(tl.int64))
        more, deeper = rank + 1 < ranks, place + 1 < depth
        sibling = tl.load(scores + at + 1, mask=more, other=float("-inf"))
        child = tl.load(scores + (place + 1) * ranks, mask=deeper, other=float("-inf"))
        # Its next sibling takes its place, its first child comes anew.
        new = i == node + 1
        score = tl.where(own, before + _number(sibling), score)
        score = tl.where(new, top + _number(child), score)
        above = tl.where(new, top, above)
        origin = tl.where(own, taken + more.to(tl.int32), origin)
        first = ((node + 1) << 16) | ((place + deeper.to(tl.int32)) << 8)
        origin = tl.where(new, first, origin)
