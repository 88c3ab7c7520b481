# mypy: allow-untyped-defs, allow-incomplete-defs
"""The rows that the target verifies, from drafts of any origin."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.runtime.jit import jit, tl, triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options


def verify_ids_ref(
    newest: Tensor, draft: Tensor, slots: Tensor, limits: Tensor, depth: Tensor | None, vocab: int
) -> tuple[Tensor, Tensor]:
    """The twin of `verify_ids`."""
    ids = torch.cat([newest.unsqueeze(1), draft], 1).clamp_(0, vocab - 1)
    if depth is None:
        depth = torch.arange(1, draft.shape[1] + 1, device=draft.device).unsqueeze(0)
    return ids, torch.where(depth <= limits[slots].unsqueeze(1), draft, -1)


def verify_ids(
    newest: Tensor, draft: Tensor, slots: Tensor, limits: Tensor, depth: Tensor | None, vocab: int
) -> tuple[Tensor, Tensor]:
    """What the target runs on, and what its draws are compared with.

    Args:
        newest: [B] int64.
        draft: [B, W - 1] int64, any row stride.
        slots: [B] int64.
        limits: [S] int32, of every slot: drafts of greater depth are not accepted.
        depth: [B, W - 1] int32, of every draft, any row stride; None: a chain, 1 … W - 1.
        vocab: an id outside runs as one inside, and is never accepted.

    Returns:
        ids [B, W] int64; judged [B, W - 1] int64, -1 where nothing may agree.
    """
    if not use_triton(draft):
        return verify_ids_ref(newest, draft, slots, limits, depth, vocab)
    batch, drafts = draft.shape
    ids, judged = draft.new_empty(batch, drafts + 1), draft.new_empty(batch, drafts)
    _verify_ids[(batch,)](
        newest, draft, slots, limits, depth, ids, judged,
        draft.stride(0), 0 if depth is None else depth.stride(0), vocab,
        WIDTH=drafts + 1, BLOCK=triton.next_power_of_2(drafts + 1), num_warps=1,
        **pdl_options(draft),
    )  # fmt: skip
    return ids, judged


@jit
def _verify_ids(
    newest, draft, slots, limits, depth, ids, judged, draft_row, depth_row, vocab,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program a request."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)  # of the row; its draft is i - 1
    drafted = (i > 0) & (i < WIDTH)
    token = tl.load(draft + request * draft_row + i - 1, mask=drafted, other=-1)
    deep = i
    if depth is not None:
        deep = tl.load(depth + request * depth_row + i - 1, mask=drafted, other=0)
    limit = tl.load(limits + tl.load(slots + request))
    place = judged + request * (WIDTH - 1) + i - 1
    tl.store(place, tl.where(deep <= limit, token, -1), mask=drafted)
    row = tl.where(i == 0, tl.load(newest + request), token)
    row = tl.minimum(tl.maximum(row, 0), vocab - 1)
    tl.store(ids + request * WIDTH + i, row, mask=i < WIDTH)
