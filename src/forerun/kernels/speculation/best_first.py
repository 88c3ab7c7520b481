# mypy: allow-untyped-defs, allow-incomplete-defs
"""The most probable prefixes of independent positions, best first: the tokens of a draft tree.

A prefix takes one token at every position up to its end, and its score is the sum of their
log-probabilities. For every prefix taken, the search adds two candidates: its next sibling (the
next best token at its last position) and its first child (the best token at the next position). No
better prefix can follow from others, so N rounds find the N best. (DDTree, arXiv 2604.12989.)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from forerun.kernels.runtime.jit import jit, tl, triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options

NO_TOKEN = -1  # the token of a node that no prefix is left for
BLOCK_SIZE = 4096  # logits that a CTA of `top_log_probs` reads at once


def top_log_probs_ref(logits: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Reference implementation of `top_log_probs`."""
    values, ids = logits.topk(ranks)
    return values.float() - logits.float().logsumexp(-1, keepdim=True), ids


def top_log_probs(logits: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """The `ranks` most probable tokens of every position, and their log-probabilities.

    Args:
        logits: [B, D, V], any float dtype; positions at any even stride.
        ranks: R <= V.

    Returns:
        scores [B, D, R] float32, descending; ids [B, D, R] int64.
    """
    if not use_triton(logits):
        return top_log_probs_ref(logits, ranks)
    values, ids = logits.topk(ranks)
    scores = torch.empty_like(values, dtype=torch.float32)
    _log_probs[(scores.shape[0] * scores.shape[1],)](
        logits, values, scores, logits.stride(1), logits.shape[-1], ranks,
        BLOCK=BLOCK_SIZE, RANKS=triton.next_power_of_2(ranks), num_warps=8, **pdl_options(logits),
    )  # fmt: skip
    return scores, ids


def best_first_ref(scores: Tensor, ids: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Reference implementation of `best_first`, over the whole batch at once."""
    batch, depth, ranks = scores.shape
    device = scores.device
    scores = torch.where(scores == scores, scores, -torch.inf)
    padded = pad(scores, (0, 1, 0, 1), value=-torch.inf)  # past the last rank and the last position
    every = torch.arange(batch, device=device)
    # The candidates, one more after every round:
    score = scores.new_full((batch, nodes + 1), -torch.inf)
    above = scores.new_zeros(batch, nodes + 1)  # score of the parent
    rank, position, parent = torch.zeros(3, batch, nodes + 1, dtype=torch.int64, device=device)
    score[:, 0] = scores[:, 0, 0]
    tokens, parents = torch.empty(2, batch, nodes, dtype=torch.int64, device=device)
    for node in range(nodes):
        top, best = score.max(1)
        r, d, before = rank[every, best], position[every, best], above[every, best]
        found = top > -torch.inf
        tokens[:, node] = torch.where(found, ids[every, d, r], NO_TOKEN)
        parents[:, node] = torch.where(found, parent[every, best], 0)
        # Its next sibling takes its place.
        rank[every, best] = (r + 1).clamp_max(ranks - 1)
        score[every, best] = before + padded[every, d, r + 1]
        # Its first child is a new candidate.
        score[:, node + 1] = top + padded[every, d + 1, 0]
        above[:, node + 1] = top
        position[:, node + 1] = (d + 1).clamp_max(depth - 1)
        parent[:, node + 1] = node + 1
    return tokens, parents


def best_first(scores: Tensor, ids: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """The `nodes` best prefixes as a tree, each after its parent; ties go to the older candidate.

    A prefix whose last token has rank r comes after r siblings, so no more than R = nodes ranks can
    matter.

    Args:
        scores: [B, D, R] float32, contiguous: log-probabilities, descending along R. NaN or -inf
            means that there is no token.
        ids: [B, D, R] int64, contiguous: the tokens.
        nodes: N <= 255; D <= 255.

    Returns:
        tokens [B, N] int64: the last token of each prefix; -1 if there are fewer than N.
        parents [B, N] int64: the node of the prefix one token shorter. Node 0 is the root, prefix
            n is node n + 1.
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
    """One CTA per position: the log-sum-exp of its logits in one pass, and the scores."""
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
def _nan_to_neg_inf(x):
    return tl.where(x == x, x, float("-inf"))


@jit
def _best_first(
    scores, ids, tokens, parents, depth, ranks, nodes, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One CTA per request, one lane per candidate."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    scores += request * depth * ranks
    ids += request * depth * ranks
    i = tl.arange(0, BLOCK)
    score = tl.where(i == 0, _nan_to_neg_inf(tl.load(scores)), float("-inf"))
    above = tl.zeros((BLOCK,), tl.float32)  # score of the parent
    origin = tl.zeros((BLOCK,), tl.int32)  # parent node << 16 | position << 8 | rank
    for node in range(nodes):
        top = tl.max(score, 0)
        own = i == tl.min(tl.where(score == top, i, BLOCK), 0)
        taken = tl.sum(tl.where(own, origin, 0), 0)
        before = tl.sum(tl.where(own, above, 0.0), 0)
        rank, position = taken & 255, (taken >> 8) & 255
        at = position * ranks + rank
        found = top > float("-inf")
        token = tl.load(ids + at)
        tl.store(tokens + request * nodes + node, tl.where(found, token, -1))
        tl.store(parents + request * nodes + node, tl.where(found, taken >> 16, 0).to(tl.int64))
        more, deeper = rank + 1 < ranks, position + 1 < depth
        sibling = tl.load(scores + at + 1, mask=more, other=float("-inf"))
        child = tl.load(scores + (position + 1) * ranks, mask=deeper, other=float("-inf"))
        # Its next sibling takes its place, its first child is a new candidate.
        new = i == node + 1
        score = tl.where(own, before + _nan_to_neg_inf(sibling), score)
        score = tl.where(new, top + _nan_to_neg_inf(child), score)
        above = tl.where(new, top, above)
        origin = tl.where(own, taken + more.to(tl.int32), origin)
        first = ((node + 1) << 16) | ((position + deeper.to(tl.int32)) << 8)
        origin = tl.where(new, first, origin)
