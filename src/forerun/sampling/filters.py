"""Temperature, top-k, top-p and min-p: from logits to unnormalised probabilities.

A token has a *gap*, the row's largest logit minus its own (>= 0), and a *weight*,
exp(-gap / temperature) in [0, 1]. Top-k and top-p keep the tokens with the smallest gaps; of tokens
with equal gaps, the lower ids come first.

Nothing is sorted. The threshold of top-k or top-p is found by radix select over the bits of the gap
(a float32 >= 0 sorts like its bits), with three histograms of 11, 10 and 10 bits. Sums are integers
(weights in fixed point, 40 fraction bits), which do not depend on the order of addition, so a row
keeps the same tokens in any batch. A row whose filter is off keeps all tokens, weights unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FIXED_POINT = 2.0**40  # 2^22 tokens of weight 1 still fit into int64
_UNREACHABLE = 1 << 62  # no sum of weights reaches it
_DIGITS = ((20, 1 << 11), (10, 1 << 10), (0, 1 << 10))  # (shift, values) of 31 bits


def gaps(logits: Tensor) -> Tensor:
    """max - logit in every row: [..., V] float32 >= 0, exactly 0 at the largest logit.

    A row with a NaN or +inf, or of -inf alone, has NaN gaps.
    """
    largest = logits.amax(-1, keepdim=True)
    return (largest - logits).abs_()  # abs: 0 - 0 may be -0, whose bits sort last


def filtered_weights(
    gap: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """Unnormalised probabilities after temperature, top-k, top-p and min-p, in this order.

    Semantics of transformers' logits warpers, applied one after another with renormalisation: top-p
    applies to what top-k kept (a token is kept while those before it sum to less than top_p), and
    min-p is relative to the largest probability. `None`: no row uses the filter.

    Args:
        gap: [..., V] float32, from `gaps`.
        temperature: [...] float32 > 0, broadcastable to the rows, as are the following.
        top_k: [...] integers; below 1: off.
        top_p: [...] float32; 1: off.
        min_p: [...] float32; 0: off.

    Returns:
        [..., V] float32; the largest of a row is 1, removed tokens are 0.
    """
    weights = (gap / -temperature[..., None]).exp_()
    bits = gap.view(torch.int32)
    if top_k is not None:
        count = top_k.long()[..., None]
        target = torch.where(count > 0, count, _UNREACHABLE)
        one = torch.ones((), dtype=torch.int64, device=gap.device)
        weights = torch.where(_kept(bits, one.expand(bits.shape), target), weights, 0.0)
    if top_p is not None:
        fixed = (weights * _FIXED_POINT).long()
        mass = top_p.double()[..., None]
        reached = (mass * fixed.sum(-1, keepdim=True)).ceil_().long().clamp_min_(1)
        target = torch.where(mass < 1.0, reached, _UNREACHABLE)
        weights = torch.where(_kept(bits, fixed, target), weights, 0.0)
    if min_p is not None:
        weights = torch.where(weights >= min_p[..., None], weights, 0.0)
    return weights


def _kept(bits: Tensor, values: Tensor, target: Tensor) -> Tensor:
    """Which tokens are needed to reach the sum `target`, in the order of (bits, token id).

    Args:
        bits: [..., V] int32 >= 0.
        values: [..., V] int64 >= 0.
        target: [..., 1] int64 >= 1. A token is kept while the values before it sum to less.

    Returns:
        [..., V] bool.
    """
    # `threshold`: the bits of the token that reaches the target, found digit by digit. Tokens below
    # the digit's range are counted in the first bin and those above in the last.
    threshold = torch.zeros_like(target, dtype=torch.int32)
    for shift, size in _DIGITS:
        digit = ((bits - threshold) >> shift).clamp_(-1, size).add_(1).long()
        histogram = values.new_zeros((*bits.shape[:-1], size + 2)).scatter_add_(-1, digit, values)
        reached = histogram.cumsum_(-1)
        found = (reached < target).sum(-1, keepdim=True).clamp_(1, size)
        threshold = threshold + ((found - 1) << shift).int()
    before = reached.gather(-1, found - 1)

    tied = torch.where(bits == threshold, values, 0)
    full = tied.cumsum(-1).sub_(tied) >= target - before  # the sum before a tie, lower ids first
    return bits <= threshold - full.int()
