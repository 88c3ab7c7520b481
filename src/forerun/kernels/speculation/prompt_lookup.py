# mypy: allow-untyped-defs, allow-incomplete-defs
"""Prompt lookup: drafts from what followed the latest text's earlier occurrence in a request.

(Prompt lookup decoding, Saxena 2023.) On GPUs two kernels:

    _longest_matches   the best position of each part of a request's history
    _copy_drafts       the best of the parts, and the tokens behind it
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.cpu import library
from forerun.kernels.cpu import step as cpu
from forerun.kernels.runtime.jit import jit, tl, triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options

BLOCK = 1024  # positions that a CTA compares at a time
MAX_PARTS = 64  # of a history; one CTA each


def prompt_lookup_ref(
    history: Tensor, slots: Tensor, start: Tensor, min_match: int, max_match: int, num_drafts: int
) -> Tensor:
    """Reference implementation of `prompt_lookup`."""
    history = history.index_select(0, slots)  # [B, C]
    last = start.unsqueeze(1).long()
    positions = torch.arange(history.shape[1], device=history.device).unsqueeze(0)
    running = positions < last
    length = torch.zeros_like(history)
    for back in range(max_match):
        token = history.gather(1, (last - back).clamp_min(0))  # [B, 1]
        shifted = torch.roll(history, back, dims=1)  # the value at position - back
        running = running & (shifted == token) & (positions >= back)
        length += running
    # The longest match first, then the latest position.
    score = torch.where(length >= min_match, length * history.shape[1] + positions, -1)
    best, position = score.max(dim=1, keepdim=True)  # [B, 1]
    drafts = torch.arange(num_drafts, device=history.device)
    found = history.gather(1, position + 1 + drafts % (last - position).clamp_min(1))
    return torch.where(best >= 0, found, history.gather(1, last)).long()


def prompt_lookup(
    history: Tensor, slots: Tensor, start: Tensor, min_match: int, max_match: int, num_drafts: int
) -> Tensor:
    """The tokens behind the latest of the longest matches with the end of each request's text.

    A match ends at a position before the last token. Behind the last token the draft goes on with
    its own beginning. Without a match, the last token is repeated.

    Args:
        history: [S, C] int32, tokens by slot and position.
        slots: [B] int64.
        start: [B] int32, the position of each request's last token.
        min_match, max_match: the fewest tokens that are a match, >= 1; the most that are compared.
        num_drafts: K.

    Returns:
        [B, K] int64.
    """
    settings = min_match, max_match, num_drafts
    if not use_triton(history):
        run = cpu.prompt_lookup if library.serves_tables(history) else prompt_lookup_ref
        return run(history, slots, start, *settings)
    batch, stride, parts = len(slots), history.stride(0), _num_parts(history.shape[1])
    part_size = triton.cdiv(history.shape[1], parts * BLOCK) * BLOCK
    best = slots.new_empty(batch, parts)
    drafts = slots.new_empty(batch, num_drafts)
    _longest_matches[batch, parts](
        history, slots, start, best, stride, part_size, min_match, max_match,
        BLOCK=BLOCK, num_warps=4, **pdl_options(history),
    )  # fmt: skip
    _copy_drafts[(batch,)](
        history, slots, start, best, drafts, stride, parts, num_drafts,
        PARTS=triton.next_power_of_2(parts), DRAFTS=triton.next_power_of_2(num_drafts),
        num_warps=1, **pdl_options(history),
    )  # fmt: skip
    return drafts


def _num_parts(positions: int) -> int:
    return min(MAX_PARTS, -(-positions // (2 * BLOCK)))


@jit
def _longest_matches(
    history, slots, start, best, history_stride, part_size, min_match, max_match,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per part: length << 32 | position of its best match, or -1."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    last = tl.load(start + request)
    row = history + tl.load(slots + request) * history_stride
    found = tl.full((BLOCK,), -1, tl.int64)
    begin = part * part_size
    for first in range(begin, tl.minimum(begin + part_size, last), BLOCK):
        position = first + tl.arange(0, BLOCK)
        running = position < last
        length = tl.zeros((BLOCK,), tl.int32)
        for back in range(0, max_match):
            inside = running & (position >= back)
            token = tl.load(row + last - back, mask=last >= back, other=-1)
            running = inside & (tl.load(row + position - back, mask=inside, other=-2) == token)
            length += running.to(tl.int32)
        score = (length.to(tl.int64) << 32) | position.to(tl.int64)
        found = tl.maximum(found, tl.where(length >= min_match, score, -1))
    tl.store(best + request * tl.num_programs(1) + part, tl.max(found, 0))


@jit
def _copy_drafts(
    history, slots, start, best, drafts, history_stride, parts, num_drafts,
    PARTS: tl.constexpr, DRAFTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per request."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    last = tl.load(start + request).to(tl.int64)
    row = history + tl.load(slots + request) * history_stride
    part = tl.arange(0, PARTS)
    found = tl.max(tl.load(best + request * parts + part, mask=part < parts, other=-1), 0)
    # Without a match, the text repeats itself with period 1.
    position = tl.where(found >= 0, found & 0x7FFFFFFF, last - 1)
    i = tl.arange(0, DRAFTS)
    token = tl.load(row + position + 1 + i % (last - position))
    tl.store(drafts + request * num_drafts + i, token.to(tl.int64), mask=i < num_drafts)
