# mypy: allow-untyped-defs, allow-incomplete-defs
"""Divides the tokens of a verify pass among requests: every draft to whom it promises most.

The survival of draft j is the probability that drafts 1 to j are all accepted, so the sum of the
survivals of the verified drafts is what the pass is expected to accept. Survivals never rise along
a request: the largest of all requests together are prefixes of each, and no other division of as
many tokens promises more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.cpu import library
from forerun.kernels.cpu import ragged as cpu
from forerun.kernels.runtime.jit import jit_no_specialize, tl, triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options

LARGEST_TILE = 1 << 15  # survivals that one CTA takes
_ONE = 0x3F800000  # the bits of 1.0


def allocate_ref(survival: Tensor, total: int) -> Tensor:
    """Reference implementation of `allocate`."""
    batch, num_drafts = survival.shape
    wanted = min(max(total - batch, 0), batch * num_drafts)
    by_position = survival.nan_to_num(0.0).clamp(0.0, 1.0).t().flatten()
    taken = by_position.sort(descending=True, stable=True).indices[:wanted]
    widths = torch.ones(batch, dtype=torch.int32, device=survival.device)
    return widths.index_add_(0, taken % batch, torch.ones_like(taken, dtype=torch.int32))


def allocate(survival: Tensor, total: int) -> Tensor:
    """Tokens that each request verifies: one, and the drafts with the largest survivals.

    All tokens are given to somebody, also to drafts that promise nothing: a captured pass computes
    them anyway. Of equal survivals the earlier position goes first, then the earlier request. May
    be captured; nothing is read on the host.

    Args:
        survival: [B, K] float32, B, K >= 1, at any row stride. Values never rise along a row; they
            are clamped to 0 … 1, and NaN is 0.
        total: tokens of the pass. Fewer than B count as B, more than B * (K + 1) as that.

    Returns:
        [B] int32 in 1 … K + 1; their sum is `total`.
    """
    batch, num_drafts = survival.shape
    wanted = min(max(total - batch, 0), batch * num_drafts)
    if not use_triton(survival):
        if library.serves_tables(survival):
            return cpu.allocate(survival, wanted)
        return allocate_ref(survival, total)
    rows, columns = triton.next_power_of_2(num_drafts), triton.next_power_of_2(batch)
    if rows * columns > LARGEST_TILE:
        return allocate_ref(survival, total)
    widths = torch.empty(batch, dtype=torch.int32, device=survival.device)
    _allocate[(1,)](
        survival, widths, wanted, batch, num_drafts,
        survival.stride(0), DRAFTS=rows, BATCH=columns, ONE=_ONE,
        num_warps=min(max(rows * columns // 512, 1), 16), **pdl_options(survival),
    )  # fmt: skip
    return widths


@jit_no_specialize("wanted", "batch", "num_drafts", "row_stride")
def _allocate(
    survival, widths, wanted, batch, num_drafts, row_stride,
    DRAFTS: tl.constexpr, BATCH: tl.constexpr, ONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA. The bits of floats in 0 … 1 order as the floats do, so a bisection of the bits finds
    the smallest survival that is taken; of those that equal it, the first ones are.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    draft, request = tl.arange(0, DRAFTS)[:, None], tl.arange(0, BATCH)[None, :]
    inside = (draft < num_drafts) & (request < batch)
    value = tl.load(survival + request * row_stride + draft, mask=inside, other=0.0)
    value = tl.minimum(tl.where(value > 0.0, value, 0.0), 1.0)
    key = tl.where(inside, value.to(tl.int32, bitcast=True), -1)
    # At least `wanted` keys are `low` or more, fewer are `high` or more.
    low, high = wanted * 0, wanted * 0 + ONE + 1
    for _ in range(30):
        middle = (low + high) // 2
        enough = tl.sum(tl.sum((key >= middle).to(tl.int32), 1), 0) >= wanted
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    above, equal = (key > low).to(tl.int32), (key == low).to(tl.int32)
    left = wanted - tl.sum(tl.sum(above, 1), 0)
    of_position = tl.sum(equal, 1)
    before = tl.cumsum(of_position, 0) - of_position
    rank = before[:, None] + tl.cumsum(equal, 1) - equal
    taken = above + equal * (rank < left).to(tl.int32)
    columns = tl.arange(0, BATCH)
    tl.store(widths + columns, 1 + tl.sum(taken, 0), mask=columns < batch)
