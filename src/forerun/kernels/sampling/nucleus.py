# mypy: allow-untyped-defs, allow-incomplete-defs
"""Top-p over whole rows, where no few tokens hold the mass: radix select, many programs a row.

`_choose` of sampling.py leaves a row's target mass; then

    1. _digit, level 1   the mass by the upper bits of the gap: 128 bins an octave, over the 32
                         octaves below the gap at which a mass is 0; exact 0 has a bin of its own.
    2. _digit, level 2   the same within the bin that reaches the target, by the next 12 bits.
    3. _edge             the last 4 bits, by counts: tokens of one gap have one mass. Then which of
                         the tied tokens are kept, lower ids first.

In each, the row's last program to come reads what all of them added up. Masses are integers
(`mass_of`), so that the order of addition changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.elementwise.rms_norm import vector_warps
from forerun.kernels.runtime.gpu import gpu_of
from forerun.kernels.runtime.jit import jit, tl, triton
from forerun.kernels.runtime.pdl import pdl_options

BLOCK = 2048  # columns a program of the sampler reads at once
BINS, LINE = 4096, 64
LAST = 16  # values of the last digit
STATE = 6  # int64 a row: target, what is left of it, first bits of the bin, programs come x 3


def split_rows(logits: Tensor) -> tuple[int, int]:
    """(parts, columns a part): enough programs to fill the device four times over."""
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    parts = max(1, min(blocks, triton.cdiv(4 * gpu_of(logits.device).num_sms, rows)))
    span = triton.cdiv(blocks, parts) * BLOCK
    return triton.cdiv(vocab, span), span


def padded_parts(logits: Tensor) -> int:
    """At least the parts of any number of rows, a power of two: kernels serve them all."""
    blocks = triton.cdiv(logits.shape[1], BLOCK)
    return int(triton.next_power_of_2(min(blocks, 4 * gpu_of(logits.device).num_sms)))


@dataclass(frozen=True)
class Nucleus:
    """Scratch of R rows in P parts."""

    sums: Tensor  # [R, P] int64, mass of the parts
    state: Tensor  # [R, STATE] int64; target 0: nothing to do
    masses: Tensor  # [R, 2, BINS] int64
    counts: Tensor  # [R, P, LAST] int32

    @classmethod
    def of(cls, logits: Tensor, parts: int) -> Nucleus:
        rows = logits.shape[0]

        def scratch(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(rows, *shape, dtype=dtype, device=logits.device)

        wide = torch.int64
        return cls(
            scratch(wide, parts),
            scratch(wide, STATE),
            scratch(wide, 2, BINS),
            scratch(torch.int32, parts, LAST),
        )


def find_edges(
    logits: Tensor, slots: Tensor, floats: Tensor, largest: Tensor, edge: Tensor, nucleus: Nucleus
) -> None:
    """Sets `edge` [R, 2] int32, (bits, id) of the last token kept, where there is a target.

    On entry `edge` is that of top-k. `largest` [R, 1] float32.
    """
    rows, vocab = logits.shape
    parts, span = split_rows(logits)
    options = {"num_warps": vector_warps(BLOCK, logits), **pdl_options(logits)}
    state, grid = nucleus.state, (rows, parts)
    for level in range(2):
        _digit[grid](
            logits, slots, floats, largest, edge, nucleus.masses, state,
            vocab, logits.stride(0), floats.stride(0), rows // len(slots), span,
            LEVEL=level, BINS=BINS, LINE=LINE, STATE=STATE, BLOCK=BLOCK, **options,
        )  # fmt: skip
    _edge[grid](
        logits, slots, floats, largest, edge, nucleus.counts, state,
        vocab, logits.stride(0), floats.stride(0), rows // len(slots), span,
        PARTS=padded_parts(logits), LAST=LAST, STATE=STATE, BLOCK=BLOCK, **options,
    )  # fmt: skip


@jit
def weight_of(bits, heat):
    """exp(-gap / temperature); 1 for the largest, whatever the temperature."""
    gap = bits.to(tl.float32, bitcast=True)
    return tl.where(bits == 0, 1.0, tl.exp(gap * (-1.0 / heat)))


@jit
def mass_of(weight):
    """Fixed point, 2^40: sums do not depend on their order."""
    return (weight * 1099511627776.0).to(tl.int64)


@jit
def kept_bits(logits, at, most, vocab, edge, last):
    """(bits of the gaps, which of them are kept: up to (edge, last)) of columns `at`."""
    x = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    bits = tl.abs(most - x).to(tl.int32, bitcast=True)
    return bits, (at < vocab) & ((bits < edge) | ((bits == edge) & (at <= last)))


@jit
def _values(logits, first, most, heat, vocab, edge, last, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """(bits, ids, values) of BLOCK columns: 1 or the mass of what is up to (edge, last), else 0."""
    at = first + tl.arange(0, BLOCK)
    bits, kept = kept_bits(logits, at, most, vocab, edge, last)
    value = kept.to(tl.int64)
    if MASS:
        value = mass_of(tl.where(kept, weight_of(bits, heat), 0.0))
    return bits, at, value


@jit
def sum_row(logits, most, heat, vocab, edge, last, limit, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Of the values up to (edge, last) whose bits are below `limit`."""
    total = tl.zeros((BLOCK,), tl.int64)
    for first in tl.range(0, vocab, BLOCK, num_stages=4):
        bits, _, value = _values(logits, first, most, heat, vocab, edge, last, MASS, BLOCK)
        total += tl.where(bits < limit, value, 0)
    return tl.sum(total, 0)


@jit
def cut_row(logits, most, heat, vocab, edge, last, target, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """(bits, id) of the last token that stays, by bisection in one program: slow."""
    pivot = tl.full((), 0, tl.int32)
    for i in range(16):  # two bits a time, 30 to 0
        step = 1 << tl.maximum(29 - 2 * i, 0)
        one = tl.zeros((BLOCK,), tl.int64)
        two, three = one, one
        for first in tl.range(0, vocab, BLOCK, num_stages=4):
            bits, _, value = _values(logits, first, most, heat, vocab, edge, last, MASS, BLOCK)
            beyond = bits - pivot
            one += tl.where(beyond < step, value, 0)
            two += tl.where(beyond < 2 * step, value, 0)
            three += tl.where(beyond < 3 * step, value, 0)
        reached = (tl.sum(one, 0) < target).to(tl.int32) + (tl.sum(two, 0) < target).to(tl.int32)
        pivot += step * (reached + (tl.sum(three, 0) < target).to(tl.int32))
    room = target - sum_row(logits, most, heat, vocab, edge, last, pivot, MASS, BLOCK)
    end = tl.full((), -1, tl.int32)
    for first in tl.range(0, vocab, BLOCK, num_stages=4):
        bits, at, value = _values(logits, first, most, heat, vocab, edge, last, MASS, BLOCK)
        tied = tl.where(bits == pivot, value, 0)
        stays = (bits == pivot) & (at < vocab) & (tl.cumsum(tied, 0) - tied < room)
        end = tl.maximum(end, tl.max(tl.where(stays, at, -1), 0))
        room -= tl.sum(tied, 0)
    return pivot, tl.where(pivot == edge, tl.minimum(end, last), end)


@jit
def sum_of_part(
    logits, tops, slots, floats, ints, sums,
    vocab, row_stride, floats_row, ints_row, groups, width, span,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The mass of a part, where a row has top-p alone."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row // width)
    heat, share = tl.load(floats + slot * floats_row), tl.load(floats + slot * floats_row + 1)
    few = tl.load(ints + slot * ints_row + 1)
    if (heat > 0) & (share < 1.0) & ((few <= 0) | (few >= vocab)):
        group = tl.arange(0, GROUPS)
        top = tl.load(tops + row * groups + group, mask=group < groups, other=float("-inf"))
        most = tl.max(top, 0)
        total = tl.zeros((BLOCK,), tl.int64)
        begin = part * span
        for first in tl.range(begin, begin + span, BLOCK, num_stages=3):
            at = first + tl.arange(0, BLOCK)
            bits, real = kept_bits(logits + row * row_stride, at, most, vocab, 0x7FFFFFFF, vocab)
            total += mass_of(tl.where(real, weight_of(bits, heat), 0.0))
        tl.store(sums + row * tl.num_programs(1) + part, tl.sum(total, 0))


@jit
def _digit(
    logits, slots, floats, largest, edge_ptr, masses, state,
    vocab, row_stride, floats_row, width, span,
    LEVEL: tl.constexpr, BINS: tl.constexpr, LINE: tl.constexpr, STATE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    state += row * STATE
    if tl.load(state) > 0:
        heat = tl.load(floats + tl.load(slots + row // width) * floats_row)
        most = tl.load(largest + row)
        edge, last = tl.load(edge_ptr + 2 * row), tl.load(edge_ptr + 2 * row + 1)
        masses += (2 * row + LEVEL) * BINS
        # Level 1: a gap of 28 temperatures, which weighs less than 2^-40, falls into the last bin.
        low = ((heat * 28.0).to(tl.int32, bitcast=True) >> 16) - (BINS - 1)
        begin_bits = tl.load(state + 2).to(tl.int32)
        begin = part * span
        for first in tl.range(begin, begin + span, BLOCK, num_stages=3):
            at = first + tl.arange(0, BLOCK)
            bits, kept = kept_bits(logits + row * row_stride, at, most, vocab, edge, last)
            if LEVEL == 0:
                digit = tl.minimum(tl.maximum((bits >> 16) - low, 1), BINS - 1)
                digit = tl.where(bits == 0, 0, digit)
            else:
                digit = (bits - begin_bits) >> 4
                kept &= (digit >= 0) & (digit < BINS)
            mass = mass_of(tl.where(kept, weight_of(bits, heat), 0.0))
            tl.atomic_add(masses + digit, mass, mask=mass > 0, sem="relaxed")
        if _is_last(state + 3 + LEVEL):
            target = tl.load(state + LEVEL)
            wanted = target
            # The line of bins that reaches it, then the bin of the line.
            i, j = tl.arange(0, BINS // LINE), tl.arange(0, LINE)
            lines = tl.load(masses + i[:, None] * LINE + j[None, :], cache_modifier=".cg")
            reached = tl.cumsum(tl.sum(lines, 1), 0)
            line = tl.minimum(tl.sum((reached < wanted).to(tl.int32), 0), BINS // LINE - 1)
            wanted -= tl.max(tl.where(reached < wanted, reached, 0), 0)
            reached = tl.cumsum(tl.load(masses + line * LINE + j, cache_modifier=".cg"), 0)
            found = tl.minimum(tl.sum((reached < wanted).to(tl.int32), 0), LINE - 1)
            tl.store(state + 1, wanted - tl.max(tl.where(reached < wanted, reached, 0), 0))
            found += line * LINE
            if LEVEL == 1:
                tl.store(state + 2, (begin_bits + (found << 4)).to(tl.int64))
            elif found != 1:
                tl.store(state + 2, tl.where(found == 0, 0, (found + low) << 16).to(tl.int64))
            else:  # bin 1 has too many bits for two more digits, and hardly ever a token
                row_logits = logits + row * row_stride
                pivot, end = cut_row(row_logits, most, heat, vocab, edge, last, target, True, BLOCK)
                tl.store(edge_ptr + 2 * row, pivot)
                tl.store(edge_ptr + 2 * row + 1, end)
                tl.store(state, 0)


@jit
def _is_last(counter):
    """Whether all other programs of the row were here; what they wrote can be read."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel") == tl.num_programs(1) - 1


@jit
def _edge(
    logits, slots, floats, largest, edge_ptr, counts, state,
    vocab, row_stride, floats_row, width, span,
    PARTS: tl.constexpr, LAST: tl.constexpr, STATE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    state += row * STATE
    if tl.load(state) > 0:
        heat = tl.load(floats + tl.load(slots + row // width) * floats_row)
        most = tl.load(largest + row)
        edge, last = tl.load(edge_ptr + 2 * row), tl.load(edge_ptr + 2 * row + 1)
        logits += row * row_stride
        parts = tl.num_programs(1)
        counts += row * parts * LAST
        begin_bits, begin = tl.load(state + 2).to(tl.int32), part * span
        for first in tl.range(begin, begin + span, BLOCK, num_stages=3):
            at = first + tl.arange(0, BLOCK)
            bits, kept = kept_bits(logits, at, most, vocab, edge, last)
            kept &= (bits >= begin_bits) & (bits < begin_bits + LAST)
            tl.atomic_add(counts + part * LAST + bits - begin_bits, 1, mask=kept, sem="relaxed")
        if _is_last(state + 5):
            i, j = tl.arange(0, PARTS)[:, None], tl.arange(0, LAST)
            place = counts + i * LAST + j[None, :]
            count = tl.load(place, mask=i < parts, other=0, cache_modifier=".cg")
            mass = mass_of(weight_of(begin_bits + j, heat))
            wanted = tl.load(state + 1)
            reached = tl.cumsum(mass * tl.sum(count, 0), 0)
            digit = tl.sum((reached < wanted).to(tl.int32), 0)
            wanted -= tl.max(tl.where(reached < wanted, reached, 0), 0)
            mine = tl.sum(tl.where(j == digit, mass, 0), 0)
            ties = ((wanted + mine - 1) // mine).to(tl.int32)  # that stay, the lowest ids
            pivot = begin_bits + digit
            by_part = tl.cumsum(tl.sum(tl.where(j[None, :] == digit, count, 0), 1), 0)
            home = tl.sum((by_part < ties).to(tl.int32), 0)
            ties -= tl.max(tl.where(by_part < ties, by_part, 0), 0)
            end = tl.full((), 0, tl.int32)
            for first in tl.range(home * span, home * span + span, BLOCK):
                at = first + tl.arange(0, BLOCK)
                bits, kept = kept_bits(logits, at, most, vocab, edge, last)
                tied = (kept & (bits == pivot)).to(tl.int32)
                rank = tl.cumsum(tied, 0)
                end = tl.maximum(end, tl.max(tl.where((tied > 0) & (rank <= ties), at, 0), 0))
                ties -= tl.sum(tied, 0)
            tl.store(edge_ptr + 2 * row, pivot)
            tl.store(edge_ptr + 2 * row + 1, end)
