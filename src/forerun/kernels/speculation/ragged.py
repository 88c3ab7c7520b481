# mypy: allow-untyped-defs, allow-incomplete-defs
"""The rows of a ragged verify pass: each request has as many as the step gives it.

A step verifies N tokens of B requests, at most W of each. What belongs to a request is in tables
[B, W]; the place of token i of request b is b * W + i. What the target runs on is packed, row after
row [N]: the tokens of request 0, then those of request 1. How many a request has is known on the
device only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.cpu import library
from forerun.kernels.cpu import ragged as cpu
from forerun.kernels.cpu.step import take_rows
from forerun.kernels.runtime.jit import jit_no_specialize, tl, triton, use_triton

LEAST_BATCH = 64  # requests that the kernel has room for: batches up to it share one


@dataclass(frozen=True)
class RaggedRows:
    """How N rows are divided among B requests."""

    widths: Tensor  # [B] int32, 1 ... W; N in all
    first: Tensor  # [B + 1] int32: request b has rows first[b] up to first[b + 1]
    places: Tensor  # [N] int64: of each row
    rows: Tensor  # [B * W] int64: of each place; past a request's width, its last row

    @property
    def count(self) -> int:
        """N."""
        return self.places.shape[0]

    @property
    def max_width(self) -> int:
        """W."""
        return self.rows.shape[0] // self.widths.shape[0]

    @property
    def owner(self) -> Tensor:
        """[N] int64: index into B of each row's request."""
        return self.places // self.max_width

    def pack(self, places: Tensor) -> Tensor:
        """[B * W, ...] -> [N, ...]."""
        return _taken(places, self.places)

    def unpack(self, rows: Tensor) -> Tensor:
        """[N, ...] -> [B * W, ...]; past a request's width its last row is repeated."""
        return _taken(rows, self.rows)


def _taken(table: Tensor, index: Tensor) -> Tensor:
    """table [R, ...], index [n] int64 -> [n, ...]."""
    if use_triton(table) or not library.serves_tables(table) or not table.is_contiguous():
        return table.index_select(0, index)
    flat = take_rows(table.view(table.shape[0], -1), index)
    return flat.view(index.shape[0], *table.shape[1:])


@dataclass(frozen=True)
class PackedTokens:
    """The tokens of a ragged pass, row by row."""

    rows: RaggedRows
    ids: Tensor  # [N] int64
    positions: Tensor  # [N] int32
    kv_slots: Tensor  # [N] int64


def pack_tokens_ref(
    widths: Tensor,
    num_rows: int,
    ids: Tensor,
    candidates: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
) -> PackedTokens:
    """Reference implementation of `pack_tokens`."""
    batch, width = ids.shape
    first = torch.nn.functional.pad(widths.cumsum(0, dtype=torch.int32), (1, 0))
    index = torch.arange(num_rows, dtype=torch.int32, device=ids.device)
    owner = torch.searchsorted(first[1:].contiguous(), index, right=True).clamp_max(batch - 1)
    places = owner * width + (index - first[owner])
    offsets = torch.arange(width, device=ids.device)
    rows = first[:-1].unsqueeze(1) + torch.minimum(offsets, widths.unsqueeze(1) - 1)
    candidates.masked_fill_(offsets[1:] >= widths.unsqueeze(1), -1)
    made = RaggedRows(widths, first, places, rows.flatten().long())
    return PackedTokens(made, *(made.pack(each.flatten()) for each in (ids, positions, kv_slots)))


def pack_tokens(
    widths: Tensor,
    num_rows: int,
    ids: Tensor,
    candidates: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
) -> PackedTokens:
    """Lays out the rows of a ragged pass and packs what is known of its tokens.

    Launched without programmatic dependent launch, as `build_decode_inputs` is and for the same
    reason.

    Args:
        widths: [B] int32, 1 ... W; their sum is N.
        num_rows: N.
        ids: [B, W] int64, contiguous, as the others.
        candidates: [B, W - 1] int64; past a request's width they become -1, in place: the target
            samples nothing that they could be compared with.
        positions: [B * W] int32.
        kv_slots: [B * W] int64.
    """
    if not use_triton(ids):
        if library.serves_tables(ids):
            given = ids, candidates, positions, kv_slots
            layout, tokens = cpu.pack_tokens(widths, num_rows, given)
            return PackedTokens(RaggedRows(widths, *layout), *tokens)
        return pack_tokens_ref(widths, num_rows, ids, candidates, positions, kv_slots)
    batch, width = ids.shape
    made = RaggedRows(
        widths,
        widths.new_empty(batch + 1),
        ids.new_empty(num_rows),
        ids.new_empty(batch * width),
    )
    packed = PackedTokens(
        made, ids.new_empty(num_rows), positions.new_empty(num_rows), ids.new_empty(num_rows)
    )
    _pack_tokens[(batch,)](
        widths, ids, candidates, positions, kv_slots, made.first, made.places, made.rows,
        packed.ids, packed.positions, packed.kv_slots, num_rows, batch,
        NUM_TOKENS=width, BATCH_BLOCK=max(LEAST_BATCH, triton.next_power_of_2(batch)),
        BLOCK=triton.next_power_of_2(width), num_warps=1 if batch <= 256 else 4,
    )  # fmt: skip
    return packed


@jit_no_specialize("num_rows", "batch")
def _pack_tokens(
    widths, ids, candidates, positions, kv_slots, first_out, places, rows,
    packed_ids, packed_positions, packed_kv_slots, num_rows, batch,
    NUM_TOKENS: tl.constexpr, BATCH_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One CTA per request, which adds up the widths before its own."""
    request = tl.program_id(0)
    b = tl.arange(0, BATCH_BLOCK)
    first = tl.sum(tl.load(widths + b, mask=b < request, other=0), 0)
    width = tl.load(widths + request)
    tl.store(first_out + request, first)
    if request == batch - 1:
        tl.store(first_out + batch, first + width)
    i = tl.arange(0, BLOCK)
    place, row = request * NUM_TOKENS + i, first + i
    inside = i < NUM_TOKENS
    tl.store(rows + place, (first + tl.minimum(i, width - 1)).to(tl.int64), mask=inside)
    tl.store(candidates + place - request - 1, (i * 0 - 1).to(tl.int64), mask=inside & (i >= width))
    # A width past the rows that there are would write outside of them.
    inside = inside & (i < width) & (row < num_rows)
    tl.store(places + row, place.to(tl.int64), mask=inside)
    tl.store(packed_ids + row, tl.load(ids + place, mask=inside), mask=inside)
    tl.store(packed_positions + row, tl.load(positions + place, mask=inside), mask=inside)
    tl.store(packed_kv_slots + row, tl.load(kv_slots + place, mask=inside), mask=inside)
