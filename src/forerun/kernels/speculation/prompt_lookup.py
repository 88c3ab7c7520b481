# mypy: allow-untyped-defs, allow-incomplete-defs
"""Prompt lookup: drafts from what followed the latest text's earlier occurrence in a request.

(Prompt lookup decoding, Saxena 2023.) On GPUs two kernels:

    _longest_matches   the best position of each part of a request's history
    _copy_drafts       the best of the parts, and the tokens behind it
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from forerun.kernels.cpu import library
from forerun.kernels.cpu import step as cpu
from forerun.kernels.runtime.jit import jit, tl, triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options

BLOCK = 1024  # positions that a CTA compares at a time
MAX_PARTS = 64  # of a history; one CTA each


# The ends of B requests' texts: history [S, C] int32, tokens by slot and position; slots [B] int64;
# start [B] int32, the position of each request's last token.
Ends = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Texts:
    """Where the end of a text is looked for, in parts; each part has one best match.

    Without `length` it is the request's own row of `tokens` [S, C], before its last token. With it,
    it is every row of `tokens` [P, C], one part each, whose group is the request's; a match is not
    at a row's last token, since nothing follows there.
    """

    tokens: Tensor  # int32
    part_size: int
    length: Tensor | None = None  # [P] int32, tokens of each row
    group: Tensor | None = None  # [P] int32
    groups: Tensor | None = None  # [S] int32, of the slots

    @property
    def num_parts(self) -> int:
        """P."""
        positions = self.tokens.shape[1]
        return -(-positions // self.part_size) if self.length is None else self.tokens.shape[0]


def longest_matches_ref(ends: Ends, texts: Texts, min_match: int, max_match: int) -> Tensor:
    """Reference implementation of `longest_matches`."""
    history, slots, start = ends
    if texts.length is None or texts.group is None or texts.groups is None:
        text, rows = texts.tokens.index_select(0, slots).unsqueeze(1), slots.new_zeros(1)
        running = torch.ones_like(text, dtype=torch.bool)
        end = start.view(-1, 1, 1)
    else:
        rows = (texts.length > 1).nonzero().flatten()
        text, end = texts.tokens[rows].unsqueeze(0), texts.length[rows].view(1, -1, 1) - 1
        running = texts.groups[slots].view(-1, 1, 1) == texts.group[rows].view(1, -1, 1)
    last = start.view(-1, 1, 1).long()
    column = torch.arange(text.shape[2], device=text.device)
    running = running & (column < end)
    length = torch.zeros_like(running, dtype=torch.int64)
    for back in range(max_match):
        token = history[slots, (last - back).clamp_min(0).flatten()].view(-1, 1, 1)
        shifted = torch.roll(text, back, dims=2)  # the value at column - back
        running = running & (shifted == token) & (column >= back) & (last >= back)
        length = length + running
    index = rows.unsqueeze(1) * text.shape[2] + column
    score = torch.where(length >= min_match, (length << 32) | index, -1)
    padded = F.pad(score, (0, -text.shape[2] % texts.part_size), value=-1)
    parts = padded.shape[1] * padded.shape[2] // texts.part_size
    best = padded.view(len(slots), parts, texts.part_size).amax(2)
    if texts.length is None:
        return best
    return best.new_full((len(slots), texts.num_parts), -1).index_copy(1, rows, best)


def longest_matches(ends: Ends, texts: Texts, min_match: int, max_match: int) -> Tensor:
    """The longest match with the end of each request's text in every part, then the latest.

    Args:
        min_match, max_match: the fewest tokens that are a match, >= 1; the most that are compared.

    Returns:
        [B, P] int64: length << 32 | index, or -1. The index is that of the match's last token in
        the request's row, or in all rows of `Texts.tokens`.
    """
    if not use_triton(texts.tokens):
        return longest_matches_ref(ends, texts, min_match, max_match)
    history, slots, start = ends
    best = slots.new_empty(len(slots), texts.num_parts)
    _longest_matches[(best.numel(),)](  # in one dimension: y has at most 65,535
        history, slots, start, texts.tokens, texts.length, texts.group, texts.groups, best,
        history.stride(0), texts.num_parts, texts.part_size, min_match, max_match,
        SHARED=texts.length is not None, BLOCK=min(BLOCK, texts.part_size), num_warps=4,
        **pdl_options(history),
    )  # fmt: skip
    return best


def prompt_lookup_ref(
    history: Tensor, slots: Tensor, start: Tensor, min_match: int, max_match: int, num_drafts: int
) -> Tensor:
    """Reference implementation of `prompt_lookup`."""
    texts = Texts(history, history.shape[1])
    best = longest_matches_ref((history, slots, start), texts, min_match, max_match)  # [B, 1]
    last = start.unsqueeze(1).long()
    # Without a match, the text repeats itself with period 1.
    position = torch.where(best >= 0, best & 0x7FFFFFFF, last - 1)
    drafts = torch.arange(num_drafts, device=history.device)
    index = position + 1 + drafts % (last - position)
    return history[slots.unsqueeze(1), index].long()


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
    texts = Texts(history, triton.cdiv(history.shape[1], parts * BLOCK) * BLOCK)
    parts, best = (
        texts.num_parts,
        longest_matches((history, slots, start), texts, min_match, max_match),
    )
    drafts = slots.new_empty(batch, num_drafts)
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
    history, slots, start, tokens, lengths, group, groups, best, stride, parts, part_size,
    min_match, max_match, SHARED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per request and part: length << 32 | index of its best match, or -1."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    batch = tl.num_programs(0) // parts
    request, part = (tl.program_id(0) % batch).to(tl.int64), tl.program_id(0) // batch
    last, slot = tl.load(start + request), tl.load(slots + request)
    row, begin = history + slot * stride, part * part_size
    if SHARED:  # the part is a row, whose first token nothing precedes
        text, low = tokens, begin
        own = tl.load(group + part) == tl.load(groups + slot)
        end = begin + tl.where(own, tl.load(lengths + part) - 1, 0)
    else:
        text, low = row, begin * 0
        end = tl.minimum(begin + part_size, last)
    found = tl.full((BLOCK,), -1, tl.int64)
    for first in range(begin, end, BLOCK):
        position = first + tl.arange(0, BLOCK)
        running = position < end
        length = tl.zeros((BLOCK,), tl.int32)
        back = 0
        while (back < max_match) & (tl.max(running.to(tl.int32), 0) > 0):
            inside = running & (position - low >= back)
            token = tl.load(row + last - back, mask=last >= back, other=-1)
            running = inside & (tl.load(text + position - back, mask=inside, other=-2) == token)
            length += running.to(tl.int32)
            back += 1
        score = (length.to(tl.int64) << 32) | position.to(tl.int64)
        found = tl.maximum(found, tl.where(length >= min_match, score, -1))
    tl.store(best + request * parts + part, tl.max(found, 0))


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
