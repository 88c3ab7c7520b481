# mypy: allow-untyped-defs, allow-incomplete-defs
"""The thresholds of top-k and top-p, searched over whole rows of logits.

A token's *gap* is max_logit - logit >= 0; the bits of a float32 >= 0 sort as the number does. A row
keeps the tokens up to a threshold (bits, id), in the order of (gap bits, token id). The weight of a
token, exp(-gap / temperature), is an integer in fixed point with 40 fraction bits, so that sums do
not depend on their order.

Top-k beyond what fits into registers is bisected by one CTA (`bisect_threshold`, slow). Top-p is a
radix select with many CTAs per row, for rows with a target weight that `candidates.py` left in the
scratch:

    1. _radix_digit, level 0   histogram of weight by the upper bits of the gap: 128 bins per
                               octave, over the 32 octaves below the gap at which a weight is 0;
                               gap 0 has a bin of its own.
    2. _radix_digit, level 1   the same by the next 12 bits, within the bin that reaches the target.
    3. _last_digit             the last 4 bits, by counts: tokens of one gap have one weight. Then
                               which of the tied tokens are kept, lower ids first.

In each, the last CTA of a row to arrive reads what all of them added up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.runtime.gpu import gpu_of, vector_warps
from forerun.kernels.runtime.jit import jit, tl, triton
from forerun.kernels.runtime.pdl import pdl_options
from forerun.kernels.sampling.params import SamplingBatch

BLOCK = 2048  # logits that a CTA reads at once
NUM_BINS, BINS_PER_LINE = 4096, 64
LAST_BINS = 16  # values of the last digit
STATE_SIZE = 6  # int64 per row: target, what is left of it, first bits of the bin, arrivals x 3


@dataclass(frozen=True)
class RowParts:
    """How rows of logits are split among CTAs: enough to fill the device four times over."""

    num_parts: int
    part_size: int  # logits, a multiple of BLOCK
    max_parts: int  # of any number of rows, a power of two: one compiled kernel serves them all

    @classmethod
    def of(cls, logits: Tensor) -> RowParts:
        """`logits` [R, V]."""
        rows, vocab = logits.shape
        blocks, fill = triton.cdiv(vocab, BLOCK), 4 * gpu_of(logits.device).num_sms
        parts = max(1, min(blocks, triton.cdiv(fill, rows)))
        part_size = triton.cdiv(blocks, parts) * BLOCK
        return cls(
            triton.cdiv(vocab, part_size), part_size, triton.next_power_of_2(min(blocks, fill))
        )


@dataclass(frozen=True)
class TopPScratch:
    """Scratch of the radix select over R rows in P parts."""

    part_weights: Tensor  # [R, P] int64
    state: Tensor  # [R, STATE_SIZE] int64; target 0: nothing to search
    histograms: Tensor  # [R, 2, NUM_BINS] int64, weights
    counts: Tensor  # [R, P, LAST_BINS] int32

    @classmethod
    def of(cls, logits: Tensor, num_parts: int) -> TopPScratch:
        rows = logits.shape[0]

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(rows, *shape, dtype=dtype, device=logits.device)

        return cls(
            empty(torch.int64, num_parts),
            empty(torch.int64, STATE_SIZE),
            empty(torch.int64, 2, NUM_BINS),
            empty(torch.int32, num_parts, LAST_BINS),
        )


def find_top_p_thresholds(
    logits: Tensor,
    batch: SamplingBatch,
    max_logit: Tensor,
    threshold: Tensor,
    scratch: TopPScratch,
    parts: RowParts,
) -> None:
    """Sets `threshold` of the rows that have a target weight in the scratch.

    Args:
        logits: [R, V].
        batch: the B requests; R / B consecutive rows each.
        max_logit: [R, 1] float32.
        threshold: [R, 2] int32, (bits, id) of the last token kept; on entry that of top-k.
        scratch: of `sample_candidates`.
        parts: of the rows.
    """
    rows, vocab = logits.shape
    options = {"num_warps": vector_warps(BLOCK, logits), **pdl_options(logits)}
    grid = (rows, parts.num_parts)
    strides = (logits.stride(0), batch.floats.stride(0))
    for level in range(2):
        _radix_digit[grid](
            logits, batch.slots, batch.floats, max_logit, threshold, scratch.histograms,
            scratch.state, vocab, *strides, rows // len(batch.slots), parts.part_size,
            LEVEL=level, NUM_BINS=NUM_BINS, BINS_PER_LINE=BINS_PER_LINE, STATE_SIZE=STATE_SIZE,
            BLOCK=BLOCK, **options,
        )  # fmt: skip
    _last_digit[grid](
        logits, batch.slots, batch.floats, max_logit, threshold, scratch.counts,
        scratch.state, vocab, *strides, rows // len(batch.slots), parts.part_size,
        MAX_PARTS=parts.max_parts, LAST_BINS=LAST_BINS, STATE_SIZE=STATE_SIZE, BLOCK=BLOCK,
        **options,
    )  # fmt: skip


@jit
def token_weight(bits, temperature):
    """exp(-gap / temperature); 1 for the largest logit, whatever the temperature."""
    gap = bits.to(tl.float32, bitcast=True)
    return tl.where(bits == 0, 1.0, tl.exp(gap * (-1.0 / temperature)))


@jit
def to_fixed(weight):
    """float32 -> int64 with 40 fraction bits."""
    return (weight * 1099511627776.0).to(tl.int64)


@jit
def load_gap_bits(logits, id, max_logit, vocab, threshold_bits, threshold_id):
    """(gap bits, which are kept: up to the threshold) of the tokens `id`."""
    x = tl.load(logits + id, mask=id < vocab, other=float("-inf")).to(tl.float32)
    bits = tl.abs(max_logit - x).to(tl.int32, bitcast=True)
    tied = (bits == threshold_bits) & (id <= threshold_id)
    return bits, (id < vocab) & ((bits < threshold_bits) | tied)


@jit
def _load_values(
    logits, first, max_logit, temperature, vocab, threshold_bits, threshold_id,
    WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(bits, ids, values) of BLOCK tokens: 1 or the weight up to the threshold, 0 past it."""
    id = first + tl.arange(0, BLOCK)
    bits, kept = load_gap_bits(logits, id, max_logit, vocab, threshold_bits, threshold_id)
    value = kept.to(tl.int64)
    if WEIGHTS:
        value = to_fixed(tl.where(kept, token_weight(bits, temperature), 0.0))
    return bits, id, value


@jit
def sum_below(
    logits, max_logit, temperature, vocab, threshold_bits, threshold_id, limit,
    WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of the row's values up to the threshold whose bits are below `limit`."""
    total = tl.zeros((BLOCK,), tl.int64)
    for first in tl.range(0, vocab, BLOCK, num_stages=4):
        bits, _, value = _load_values(
            logits, first, max_logit, temperature, vocab, threshold_bits, threshold_id,
            WEIGHTS, BLOCK,
        )  # fmt: skip
        total += tl.where(bits < limit, value, 0)
    return tl.sum(total, 0)


@jit
def bisect_threshold(
    logits, max_logit, temperature, vocab, threshold_bits, threshold_id, target,
    WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(bits, id) of the last token needed to reach `target`, by bisection in one CTA: slow."""
    pivot = tl.full((), 0, tl.int32)
    for i in range(16):  # two bits at a time, 30 to 0
        step = 1 << tl.maximum(29 - 2 * i, 0)
        one = tl.zeros((BLOCK,), tl.int64)
        two, three = one, one
        for first in tl.range(0, vocab, BLOCK, num_stages=4):
            bits, _, value = _load_values(
                logits, first, max_logit, temperature, vocab, threshold_bits, threshold_id,
                WEIGHTS, BLOCK,
            )  # fmt: skip
            beyond = bits - pivot
            one += tl.where(beyond < step, value, 0)
            two += tl.where(beyond < 2 * step, value, 0)
            three += tl.where(beyond < 3 * step, value, 0)
        steps = (tl.sum(one, 0) < target).to(tl.int32) + (tl.sum(two, 0) < target).to(tl.int32)
        pivot += step * (steps + (tl.sum(three, 0) < target).to(tl.int32))
    missing = target - sum_below(
        logits, max_logit, temperature, vocab, threshold_bits, threshold_id, pivot, WEIGHTS, BLOCK
    )
    end = tl.full((), -1, tl.int32)
    for first in tl.range(0, vocab, BLOCK, num_stages=4):
        bits, id, value = _load_values(
            logits, first, max_logit, temperature, vocab, threshold_bits, threshold_id,
            WEIGHTS, BLOCK,
        )  # fmt: skip
        tied = tl.where(bits == pivot, value, 0)
        stays = (bits == pivot) & (id < vocab) & (tl.cumsum(tied, 0) - tied < missing)
        end = tl.maximum(end, tl.max(tl.where(stays, id, -1), 0))
        missing -= tl.sum(tied, 0)
    return pivot, tl.where(pivot == threshold_bits, tl.minimum(end, threshold_id), end)


@jit
def sum_part_weights(
    logits, group_max, slots, floats, ints, part_weights,
    vocab, row_stride, floats_stride, ints_stride, num_groups, rows_per_request, part_size,
    GROUPS_BLOCK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The weight of one part of a row, for rows with top-p and no top-k."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row // rows_per_request)
    temperature = tl.load(floats + slot * floats_stride)
    top_p = tl.load(floats + slot * floats_stride + 1)
    top_k = tl.load(ints + slot * ints_stride + 1)
    if (temperature > 0) & (top_p < 1.0) & ((top_k <= 0) | (top_k >= vocab)):
        group = tl.arange(0, GROUPS_BLOCK)
        maxima = tl.load(
            group_max + row * num_groups + group, mask=group < num_groups, other=float("-inf")
        )
        max_logit = tl.max(maxima, 0)
        total = tl.zeros((BLOCK,), tl.int64)
        begin = part * part_size
        for first in tl.range(begin, begin + part_size, BLOCK, num_stages=3):
            id = first + tl.arange(0, BLOCK)
            bits, inside = load_gap_bits(
                logits + row * row_stride, id, max_logit, vocab, 0x7FFFFFFF, vocab
            )
            total += to_fixed(tl.where(inside, token_weight(bits, temperature), 0.0))
        tl.store(part_weights + row * tl.num_programs(1) + part, tl.sum(total, 0))


@jit
def _radix_digit(
    logits, slots, floats, max_logit_ptr, threshold, histograms, state,
    vocab, row_stride, floats_stride, rows_per_request, part_size,
    LEVEL: tl.constexpr, NUM_BINS: tl.constexpr, BINS_PER_LINE: tl.constexpr,
    STATE_SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per part of a row: adds to the row's histogram; the last one finds the bin."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    state += row * STATE_SIZE
    if tl.load(state) > 0:
        temperature = tl.load(floats + tl.load(slots + row // rows_per_request) * floats_stride)
        max_logit = tl.load(max_logit_ptr + row)
        threshold += 2 * row
        threshold_bits, threshold_id = tl.load(threshold), tl.load(threshold + 1)
        histogram = histograms + (2 * row + LEVEL) * NUM_BINS
        # Level 0: a gap of 28 temperatures weighs less than 2^-40 and falls into the last bin.
        low = ((temperature * 28.0).to(tl.int32, bitcast=True) >> 16) - (NUM_BINS - 1)
        begin_bits = tl.load(state + 2).to(tl.int32)
        begin = part * part_size
        for first in tl.range(begin, begin + part_size, BLOCK, num_stages=3):
            id = first + tl.arange(0, BLOCK)
            bits, kept = load_gap_bits(
                logits + row * row_stride, id, max_logit, vocab, threshold_bits, threshold_id
            )
            if LEVEL == 0:
                digit = tl.minimum(tl.maximum((bits >> 16) - low, 1), NUM_BINS - 1)
                digit = tl.where(bits == 0, 0, digit)
            else:
                digit = (bits - begin_bits) >> 4
                kept &= (digit >= 0) & (digit < NUM_BINS)
            weight = to_fixed(tl.where(kept, token_weight(bits, temperature), 0.0))
            tl.atomic_add(histogram + digit, weight, mask=weight > 0, sem="relaxed")
        if _is_last_to_arrive(state + 3 + LEVEL):
            target = tl.load(state + LEVEL)
            found, left = _find_bin(histogram, target, NUM_BINS, BINS_PER_LINE)
            tl.store(state + 1, left)
            if LEVEL == 1:
                tl.store(state + 2, (begin_bits + (found << 4)).to(tl.int64))
            elif found != 1:
                tl.store(state + 2, tl.where(found == 0, 0, (found + low) << 16).to(tl.int64))
            else:  # bin 1 has too many bits for two more digits, and hardly ever a token
                pivot, end = bisect_threshold(
                    logits + row * row_stride, max_logit, temperature, vocab,
                    threshold_bits, threshold_id, target, True, BLOCK,
                )  # fmt: skip
                tl.store(threshold, pivot)
                tl.store(threshold + 1, end)
                tl.store(state, 0)


@jit
def _find_bin(histogram, target, NUM_BINS: tl.constexpr, BINS_PER_LINE: tl.constexpr):
    """(the bin in which the cumulative weight reaches `target`, what is left of it there)."""
    # The line of bins that reaches it, then the bin of that line.
    i, j = tl.arange(0, NUM_BINS // BINS_PER_LINE), tl.arange(0, BINS_PER_LINE)
    lines = tl.load(histogram + i[:, None] * BINS_PER_LINE + j[None, :], cache_modifier=".cg")
    reached = tl.cumsum(tl.sum(lines, 1), 0)
    line = tl.minimum(tl.sum((reached < target).to(tl.int32), 0), NUM_BINS // BINS_PER_LINE - 1)
    left = target - tl.max(tl.where(reached < target, reached, 0), 0)
    reached = tl.cumsum(tl.load(histogram + line * BINS_PER_LINE + j, cache_modifier=".cg"), 0)
    found = tl.minimum(tl.sum((reached < left).to(tl.int32), 0), BINS_PER_LINE - 1)
    left -= tl.max(tl.where(reached < left, reached, 0), 0)
    return found + line * BINS_PER_LINE, left


@jit
def _is_last_to_arrive(counter):
    """Whether all other CTAs of the row have arrived: what they wrote can be read."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel") == tl.num_programs(1) - 1


@jit
def _last_digit(
    logits, slots, floats, max_logit_ptr, threshold, counts, state,
    vocab, row_stride, floats_stride, rows_per_request, part_size,
    MAX_PARTS: tl.constexpr, LAST_BINS: tl.constexpr, STATE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per part of a row: counts its tokens by gap; the last one sets the threshold."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    state += row * STATE_SIZE
    if tl.load(state) > 0:
        temperature = tl.load(floats + tl.load(slots + row // rows_per_request) * floats_stride)
        max_logit = tl.load(max_logit_ptr + row)
        threshold += 2 * row
        threshold_bits, threshold_id = tl.load(threshold), tl.load(threshold + 1)
        logits += row * row_stride
        num_parts = tl.num_programs(1)
        counts += row * num_parts * LAST_BINS
        begin_bits, begin = tl.load(state + 2).to(tl.int32), part * part_size
        for first in tl.range(begin, begin + part_size, BLOCK, num_stages=3):
            id = first + tl.arange(0, BLOCK)
            bits, kept = load_gap_bits(logits, id, max_logit, vocab, threshold_bits, threshold_id)
            kept &= (bits >= begin_bits) & (bits < begin_bits + LAST_BINS)
            bin = counts + part * LAST_BINS + bits - begin_bits
            tl.atomic_add(bin, 1, mask=kept, sem="relaxed")
        if _is_last_to_arrive(state + 5):
            i, j = tl.arange(0, MAX_PARTS)[:, None], tl.arange(0, LAST_BINS)
            count = tl.load(
                counts + i * LAST_BINS + j[None, :], mask=i < num_parts, other=0,
                cache_modifier=".cg",
            )  # fmt: skip
            weight = to_fixed(token_weight(begin_bits + j, temperature))
            target = tl.load(state + 1)
            reached = tl.cumsum(weight * tl.sum(count, 0), 0)
            digit = tl.sum((reached < target).to(tl.int32), 0)
            target -= tl.max(tl.where(reached < target, reached, 0), 0)
            each = tl.sum(tl.where(j == digit, weight, 0), 0)
            ties = ((target + each - 1) // each).to(tl.int32)  # that are kept, the lowest ids
            pivot = begin_bits + digit
            # The part in which the last of them is, and its id there.
            by_part = tl.cumsum(tl.sum(tl.where(j[None, :] == digit, count, 0), 1), 0)
            home = tl.sum((by_part < ties).to(tl.int32), 0)
            ties -= tl.max(tl.where(by_part < ties, by_part, 0), 0)
            end = tl.full((), 0, tl.int32)
            for first in tl.range(home * part_size, home * part_size + part_size, BLOCK):
                id = first + tl.arange(0, BLOCK)
                bits, kept = load_gap_bits(
                    logits, id, max_logit, vocab, threshold_bits, threshold_id
                )
                tied = (kept & (bits == pivot)).to(tl.int32)
                rank = tl.cumsum(tied, 0)
                end = tl.maximum(end, tl.max(tl.where((tied > 0) & (rank <= ties), id, 0), 0))
                ties -= tl.sum(tied, 0)
            tl.store(threshold, pivot)
            tl.store(threshold + 1, end)
