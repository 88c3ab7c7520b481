# mypy: allow-untyped-defs, allow-incomplete-defs
"""Counts how often drafts are accepted at each confidence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.cpu import library
from forerun.kernels.cpu import ragged as cpu
from forerun.kernels.runtime.jit import jit, tl, use_triton

BLOCK = 256  # drafts that a CTA counts


@dataclass(frozen=True)
class DraftsBySlot:
    """What the drafts of S slots are subject to, by slot."""

    limits: Tensor  # [S] int32, drafts that may be accepted
    temperature: Tensor  # [S] float32, any stride; 0: greedy
    padding_slot: int  # whose drafts do not count


def count_reliability_ref(
    counts: Tensor,
    confidence: Tensor,
    num_committed: Tensor,
    slots: Tensor,
    drafts: DraftsBySlot,
    widths: Tensor | None,
) -> None:
    """Reference implementation of `count_reliability`."""
    bins = counts.shape[0] // 2
    draft = torch.arange(confidence.shape[1], device=confidence.device)
    limits = drafts.limits[slots].masked_fill(slots == drafts.padding_slot, 0)
    if widths is not None:
        limits = torch.minimum(limits, widths - 1)
    accepted = draft < num_committed.unsqueeze(1) - 1
    tested = (draft < num_committed.unsqueeze(1)) & (draft < limits.unsqueeze(1))
    rows = (confidence * bins).long().clamp_(0, bins - 1)
    rows += torch.where(drafts.temperature[slots] <= 0, 0, bins).unsqueeze(1)
    values = torch.stack((torch.ones_like(confidence), accepted.float(), confidence), -1).double()
    values = values.where(tested.unsqueeze(-1), 0.0)
    counts.index_add_(0, rows.flatten(), values.flatten(0, 1))


def count_reliability(
    counts: Tensor,
    confidence: Tensor,
    num_committed: Tensor,
    slots: Tensor,
    drafts: DraftsBySlot,
    widths: Tensor | None = None,
) -> None:
    """Adds the drafts of a step to their bins. Drafts after a rejected one were not tested.

    Args:
        counts: [2 * bins, 3] float64: drafts, accepted ones, the sum of their confidences; rows of
            greedy requests, then of others, by `bins` equal ranges of confidence. Updated.
        confidence: [B, D] float32, from 0 to 1, contiguous.
        num_committed: [B] int32, accepted drafts and the bonus token.
        slots: [B] int64.
        drafts: by slot.
        widths: [B] int32, tokens that were verified; None: all drafts and one.
    """
    if not use_triton(confidence):
        if library.serves_tables(confidence):
            of_slots = drafts.limits, drafts.temperature
            step = confidence, num_committed, slots, *of_slots, widths
            stride = drafts.temperature.stride(0)
            cpu.count_reliability(counts, step, confidence.shape[1], stride, drafts.padding_slot)
        else:
            count_reliability_ref(counts, confidence, num_committed, slots, drafts, widths)
        return
    total = confidence.numel()
    _count_reliability[(-(-total // BLOCK),)](
        counts, confidence, num_committed, slots, drafts.limits, drafts.temperature, widths,
        total, confidence.shape[1], drafts.temperature.stride(0), drafts.padding_slot,
        BINS=counts.shape[0] // 2, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


@jit
def _count_reliability(
    counts_ptr, confidence_ptr, committed_ptr, slots_ptr, limits_ptr, temperature_ptr, widths_ptr,
    total, depth, temperature_stride, padding_slot, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One CTA per BLOCK drafts."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request, draft = at // depth, at % depth
    inside = at < total
    slot = tl.load(slots_ptr + request, mask=inside, other=padding_slot)
    committed = tl.load(committed_ptr + request, mask=inside, other=0)
    limit = tl.load(limits_ptr + slot, mask=inside, other=0)
    if widths_ptr is not None:
        limit = tl.minimum(limit, tl.load(widths_ptr + request, mask=inside, other=1) - 1)
    tested = inside & (slot != padding_slot) & (draft < committed) & (draft < limit)
    confidence = tl.load(confidence_ptr + at, mask=tested, other=0.0)
    own = tl.minimum(tl.maximum((confidence * BINS).to(tl.int32), 0), BINS - 1)
    temperature = tl.load(temperature_ptr + slot * temperature_stride, mask=tested, other=0.0)
    counts_ptr += (own + tl.where(temperature <= 0, 0, BINS)) * 3
    one = tl.full([BLOCK], 1.0, tl.float64)
    tl.atomic_add(counts_ptr, one, mask=tested, sem="relaxed")
    tl.atomic_add(counts_ptr + 1, one, mask=tested & (draft < committed - 1), sem="relaxed")
    tl.atomic_add(counts_ptr + 2, confidence.to(tl.float64), mask=tested, sem="relaxed")
