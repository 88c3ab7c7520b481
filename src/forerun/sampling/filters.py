"""Temperature, top-k, top-p, min-p: from logits to the weights that a token is drawn by.

Everything is told in two numbers a token: its *gap* to the row's largest logit (>= 0), and its
weight exp(-gap / temperature) in [0, 1], an unnormalised probability. Top-k and top-p keep the
tokens of the smallest gaps; between equal gaps the lower token id comes first.

There is no sort: the k-th token, or the edge of the nucleus, is found by radix select over the bits
of the gap (a float32 >= 0 orders like its bits), three histograms of 11, 10 and 10 bits.
Sums are integers (weights times 2^40), so that no order of addition can change what is kept: a
row's filters give the same in any batch. A row whose parameter is off keeps everything, exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

_UNIT = 2.0**40  # fixed point of a weight; 2^22 tokens of weight 1 still fit into int64
_ALL = 1 << 62  # no sum of masses reaches it
_DIGITS = ((20, 1 << 11), (10, 1 << 10), (0, 1 << 10))  # (shift, values) of 31 bits


def gaps(logits: Tensor) -> Tensor:
    """max - logit of every row: [..., V] float32 >= 0, 0 exactly where the logit is the largest."""
    return (
        logits.amax(-1, keepdim=True) - logits
    ).abs_()  # abs: 0 - 0 may be -0, whose bits sort last


def filtered_weights(
    gap: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """Unnormalised probabilities after temperature → top-k → top-p → min-p, in this order.

    Semantics as in transformers' warpers, one after the other with renormalisation: top-p counts
    over what top-k left (a token stays while those before it hold less than top_p), min-p compares
    with the largest probability left. `None`: no row uses that filter.

    Args:
        gap: [..., V] float32, of `gaps`.
        temperature: [...] float32 > 0, broadcastable to the rows, as all below.
        top_k: [...] integers; below 1 is off.
        top_p: [...] float32; from 1 is off.
        min_p: [...] float32; 0 is off.

    Returns:
        [..., V] float32; a row's largest is 1, filtered tokens are 0.
    """
    weights = (gap / -temperature[..., None]).exp_()
    bits = gap.view(torch.int32)
    if top_k is not None:
        count = top_k.long()[..., None]
        target = torch.where(count > 0, count, _ALL)
        one = torch.ones((), dtype=torch.int64, device=gap.device)
        weights = torch.where(_within(bits, one.expand(bits.shape), target), weights, 0.0)
    if top_p is not None:
        mass = (weights * _UNIT).long()
        share = top_p.double()[..., None]
        reached = (share * mass.sum(-1, keepdim=True)).ceil_().long().clamp_min_(1)
        target = torch.where(share < 1.0, reached, _ALL)
        weights = torch.where(_within(bits, mass, target), weights, 0.0)
    if min_p is not None:
        weights = torch.where(weights >= min_p[..., None], weights, 0.0)
    return weights


def _within(bits: Tensor, mass: Tensor, target: Tensor) -> Tensor:
    """Which tokens come before the mass `target` is reached, in order of (bits, token id).

    Args:
        bits: [..., V] int32 >= 0.
        mass: [..., V] int64 >= 0.
        target: [..., 1] int64 >= 1. A token stays while the mass before it is less.

    Returns:
        [..., V] bool, True where the token stays.
    """
    # `pivot`: the bits of the token that reaches the target, found digit by digit. Tokens below the
    # digit's range fall into the first bin and those above into the last, so sums stay whole.
    pivot = torch.zeros_like(target, dtype=torch.int32)
    for shift, values in _DIGITS:
        digit = ((bits - pivot) >> shift).clamp_(-1, values).add_(1).long()
        histogram = mass.new_zeros((*bits.shape[:-1], values + 2)).scatter_add_(-1, digit, mass)
        reached = histogram.cumsum_(-1)
        found = (reached < target).sum(-1, keepdim=True).clamp_(1, values)
        pivot = pivot + ((found - 1) << shift).int()
    before = reached.gather(-1, found - 1)

    tied = torch.where(bits == pivot, mass, 0)
    full = tied.cumsum(-1).sub_(tied) >= target - before  # the mass before a tie, lower ids first
    return bits <= pivot - full.int()
