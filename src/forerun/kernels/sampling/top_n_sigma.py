# mypy: allow-untyped-defs, allow-incomplete-defs
"""Top-n-sigma: keeps the logits within n standard deviations of the largest.

"Top-nσ: Not All Logits Are You Need" (Tang et al. 2024, arXiv 2411.07641), over the finite logits
of a row, with the deviation of the population. It is summed over gaps to the largest logit, as
integers: 0 to 2^20, the largest finite gap. Their sums do not depend on the order of addition, so a
row keeps the same tokens in any batch and width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.runtime.jit import jit, tl, use_triton
from forerun.kernels.runtime.pdl import pdl_options

BLOCK = 1024  # logits that a CTA reads at once
UNITS = 2.0**20  # of the largest finite gap: the squares of 2^22 of them still fit into int64
TINY = 1e-300  # in place of a largest gap of 0


def keep_top_n_sigma_ref(logits: Tensor, n: Tensor) -> None:
    """Reference implementation of `keep_top_n_sigma`."""
    largest = logits.amax(-1, keepdim=True)
    finite = logits > -torch.inf
    gap = (largest - logits).double()
    scale = UNITS / torch.where(finite, gap, 0.0).amax(-1, keepdim=True).clamp_min(TINY)
    units = torch.where(finite & largest.isfinite(), gap * scale, 0.0).long()
    count = finite.sum(-1, keepdim=True).double()
    mean = units.sum(-1, keepdim=True).double() / count
    variance = units.square().sum(-1, keepdim=True).double() / count - mean * mean
    sigma = variance.clamp_min(0.0).sqrt() / scale
    wanted = n[:, None, None].double()
    logits.masked_fill_((gap > wanted * sigma) & (wanted > 0) & largest.isfinite(), -torch.inf)


def keep_top_n_sigma(logits: Tensor, n: Tensor) -> None:
    """Writes -inf at the logits below largest - n * sigma, in place.

    Rows that have a NaN or +inf, or are all -inf, stay as they are.

    Args:
        logits: [B, W, V] float32, contiguous.
        n: [B] float32; a request's rows stay as they are where it is not above 0.
    """
    if not use_triton(logits):
        keep_top_n_sigma_ref(logits, n)
        return
    requests, width, vocab = logits.shape
    _keep_top_n_sigma[(requests * width,)](
        logits, n, vocab, width, UNITS=UNITS, TINY=TINY, BLOCK=BLOCK,
        num_warps=4, **pdl_options(logits),
    )  # fmt: skip


@jit
def _keep_top_n_sigma(
    logits, n, vocab, width, UNITS: tl.constexpr, TINY: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per row: its largest and least logit, then the sums, then what is removed."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    wanted = tl.load(n + row // width).to(tl.float64)
    if wanted > 0:
        logits += row * vocab
        i = tl.arange(0, BLOCK)
        high = tl.full((BLOCK,), float("-inf"), tl.float32)
        low = tl.full((BLOCK,), float("inf"), tl.float32)
        for first in range(0, vocab, BLOCK):
            x = tl.load(logits + first + i, mask=first + i < vocab, other=float("-inf"))
            high = tl.maximum(high, tl.where(x == x, x, float("inf")))
            low = tl.minimum(low, tl.where(x > float("-inf"), x, float("inf")))
        largest, least = tl.max(high, 0), tl.min(low, 0)
        if (largest > float("-inf")) & (largest < float("inf")):
            scale = UNITS / tl.maximum((largest - least).to(tl.float64), TINY)
            count = tl.zeros((BLOCK,), tl.int32)
            total = tl.zeros((BLOCK,), tl.int64)
            squares = tl.zeros((BLOCK,), tl.int64)
            for first in range(0, vocab, BLOCK):
                x = tl.load(logits + first + i, mask=first + i < vocab, other=float("-inf"))
                finite = x > float("-inf")
                gap = tl.where(finite, largest - x, 0.0).to(tl.float64)
                units = (gap * scale).to(tl.int64)
                count += finite.to(tl.int32)
                total += units
                squares += units * units
            counted = tl.sum(count, 0).to(tl.float64)
            mean = tl.sum(total, 0).to(tl.float64) / counted
            variance = tl.sum(squares, 0).to(tl.float64) / counted - mean * mean
            sigma = tl.sqrt(tl.maximum(variance, 0.0)) / scale
            for first in range(0, vocab, BLOCK):
                inside = first + i < vocab
                x = tl.load(logits + first + i, mask=inside, other=float("-inf"))
                removed = (largest - x).to(tl.float64) > wanted * sigma
                tl.store(logits + first + i, float("-inf"), mask=inside & removed)
