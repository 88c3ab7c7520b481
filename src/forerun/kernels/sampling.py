# mypy: allow-untyped-defs, allow-incomplete-defs
"""A token for every row: temperature, top-k, top-p, min-p, and the race of keyed noise.

The rules are those of `forerun.sampling` (filters.py, noise.py), number for number: gaps to the
largest logit, order by (bits of the gap, id), integer masses, the same hash. Four launches:

    1. _scan    reads all logits once and leaves the largest of every 128.
    2. _choose  one program a row. Greedy: found in the one block that holds the maximum. Top-k up
                to `FEW`, and top-p where the mass lies in few tokens: the k-th largest block
                maximum bounds the k-th largest logit, so a few blocks hold all candidates; these
                are filtered and raced in registers. Else the edge of what is kept is found by
                bisection over the whole row (slow, for flat distributions), or there is none.
    3. _race    the race over whole rows, for those that are not done.
    4. _finish  the best of a row's parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.argmax import split_rows
from forerun.kernels.dispatch import jit, tl, triton
from forerun.kernels.noise import keyed_noise
from forerun.kernels.norm import vector_warps
from forerun.kernels.pdl import pdl_options

GROUP = 128  # logits that share a maximum
BLOCK = 2048  # columns a program reads at once
MANY = 4096  # the same where one program has a row for itself
KEEP = 2048  # candidates that it keeps in registers
FEW = 256  # block maxima that bound the candidates, at most


def hold_stops(logits: Tensor, positions: Tensor, stop_ids: Tensor, min_position: Tensor) -> None:
    """In place: -inf at the stop ids [B, N] in rows [R] whose position is below `min_position` [B].

    Rows of a request follow one another, R / B each. Triton only.
    """
    batch, count = stop_ids.shape
    _hold_stops[(len(logits),)](
        logits, positions, stop_ids, min_position,
        logits.stride(0), stop_ids.stride(0), min_position.stride(0), len(logits) // batch, count,
        BLOCK=triton.next_power_of_2(count), num_warps=1, **pdl_options(logits),
    )  # fmt: skip


def sample_rows(
    logits: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    key: Tensor,
) -> Tensor:
    """Draws a token at every row. Triton only; the twin is `forerun.sampling.sampler.sample`.

    Args:
        logits: [R, V], any float dtype and row stride.
        positions: [R] integers, of the tokens to be drawn.
        temperature, top_p, min_p: [B] float32; temperature 0 is greedy, from 1 top-p is off.
        top_k: [B] int64; below 1 is off.
        key: [B] int64, `seed_key` of the request's seed.

    Returns:
        [R] int64; rows of a request follow one another, R / B each.
    """
    rows, vocab = logits.shape
    groups, device = triton.cdiv(vocab, GROUP), logits.device
    parts, span = split_rows(logits)
    warps, options = vector_warps(BLOCK, logits), pdl_options(logits)

    def scratch(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=device)

    tops, largest = scratch(groups, torch.float32), scratch(1, torch.float32)
    _scan[(rows, parts)](
        logits, tops, vocab, logits.stride(0), groups, span,
        GROUP=GROUP, BLOCK=BLOCK, num_warps=warps, **options,
    )  # fmt: skip
    padded = triton.next_power_of_2(groups)
    held, edge = scratch(padded + 2 * KEEP, torch.int32), scratch(2, torch.int32)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    width = rows // len(key)
    _choose[(rows,)](
        logits, tops, largest, held, edge, out, positions,
        temperature, top_k, top_p, min_p, key,
        temperature.stride(0), top_k.stride(0), top_p.stride(0), min_p.stride(0), key.stride(0),
        vocab, logits.stride(0), groups, width,
        GROUP=GROUP, GROUPS=padded, BLOCK=MANY, KEEP=KEEP, FEW=FEW,
        num_warps=vector_warps(MANY, logits), **options,
    )  # fmt: skip
    best, ids = scratch(parts, torch.float32), scratch(parts, torch.int32)
    _race[(rows, parts)](
        logits, largest, edge, out, positions, temperature, min_p, key, best, ids,
        temperature.stride(0), min_p.stride(0), key.stride(0),
        vocab, logits.stride(0), width, span, BLOCK=BLOCK, num_warps=warps, **options,
    )  # fmt: skip
    _finish[(rows,)](
        best, ids, out, parts, vocab,
        BLOCK=triton.next_power_of_2(parts), num_warps=1, **options,
    )  # fmt: skip
    return out


@jit
def _hold_stops(
    logits, positions, stop_ids, min_position, row_stride, stops_row, position_row, width, count,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    request = row // width
    i = tl.arange(0, BLOCK)
    early = tl.load(positions + row) < tl.load(min_position + request * position_row)
    held = (i < count) & early
    ids = tl.load(stop_ids + request * stops_row + i, mask=held, other=0)
    tl.store(logits + row * row_stride + ids, float("-inf"), mask=held)


@jit
def _scan(
    logits, tops, vocab, row_stride, groups, span,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, begin = tl.program_id(0).to(tl.int64), tl.program_id(1) * span
    logits += row * row_stride
    group = tl.arange(0, BLOCK // GROUP)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    for first in tl.range(0, span, BLOCK, num_stages=4):
        column = begin + first + at
        x = tl.load(logits + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        index = (begin + first) // GROUP + group
        tl.store(tops + row * groups + index, tl.max(x, 1), mask=index < groups)


@jit
def _choose(
    logits, tops, largest, held, edge_ptr, out, positions,
    temperature, top_k, top_p, min_p, key,
    temperature_row, top_k_row, top_p_row, min_p_row, key_row,
    vocab, row_stride, groups, width,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr,
    FEW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out: the token, or -1 where the whole row has to race; edge: (bits, id) of the last kept."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    request = row // width
    logits += row * row_stride
    heat = tl.load(temperature + request * temperature_row)
    few = tl.load(top_k + request * top_k_row)
    share = tl.load(top_p + request * top_p_row).to(tl.float64)
    least = tl.load(min_p + request * min_p_row)
    group = tl.arange(0, GROUPS)
    top = tl.load(tops + row * groups + group, mask=group < groups, other=float("-inf"))
    most = tl.max(top, 0)
    j = tl.arange(0, KEEP)
    token = tl.full((), -1, tl.int32)
    edge, last = tl.full((), 0x7FFFFFFF, tl.int32), vocab
    if heat <= 0:
        first = tl.min(tl.where(top == most, group, groups - 1), 0)
        at = first * GROUP + tl.arange(0, GROUP)
        x = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        token = tl.min(tl.where(x == most, at, vocab - 1), 0)
    else:
        has_k, has_p = (few > 0) & (few < vocab), share < 1.0
        if (has_k & (few <= FEW)) | (has_p & ((few <= 0) | (few >= vocab))):
            held += row * (GROUPS + 2 * KEEP)
            wanted = tl.where(has_k, few, FEW).to(tl.int32)
            least_gap = tl.abs(most - top).to(tl.int32, bitcast=True)
            real = group < groups
            bound = _pivot(least_gap, real.to(tl.int32), wanted)
            count = _gather(logits, held, most, least_gap, real, bound, vocab, GROUP, GROUPS, KEEP)
            if count <= KEEP:
                inside = j < count
                bits = tl.load(held + GROUPS + j, mask=inside, other=0x7FFFFFFF)
                ids = tl.load(held + GROUPS + KEEP + j, mask=inside, other=vocab - 1)
                weight = tl.where(inside, _weight(bits, heat), 0.0)
                kept, enough = inside, count > 0
                if has_k:
                    kept &= _first(bits, inside.to(tl.int32), few.to(tl.int32))
                if has_p:
                    mass = _mass(tl.where(kept, weight, 0.0))
                    have = tl.sum(mass, 0)
                    total = have
                    if (few <= 0) | (few >= vocab):
                        total = _sum(logits, most, heat, vocab, edge, last, edge, True, BLOCK)
                    target = _target(share, total)
                    enough &= have >= target
                    kept &= _first(bits, mass, target)
                if enough:
                    kept &= weight >= least
                    noise = keyed_noise(key, positions, row, request, key_row, ids)
                    score = tl.where(kept, weight / noise, float("inf"))
                    token = tl.min(tl.where(score == tl.min(score, 0), ids, vocab - 1), 0)
        if token < 0:
            if has_k:
                edge, last = _cut(logits, most, heat, vocab, edge, last, few, False, BLOCK)
            if has_p:
                total = _sum(
                    logits, most, heat, vocab, edge, last, tl.full((), 0x7FFFFFFF, tl.int32),
                    True, BLOCK,
                )  # fmt: skip
                target = _target(share, total)
                edge, last = _cut(logits, most, heat, vocab, edge, last, target, True, BLOCK)
    tl.store(out + row, token.to(tl.int64))
    tl.store(largest + row, most)
    tl.store(edge_ptr + 2 * row, edge)
    tl.store(edge_ptr + 2 * row + 1, last)


@jit
def _gather(
    logits, held, most, bits, real, bound, vocab,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Gap bits up to `bound` and their ids into `held`, ids ascending; returns how many (or more
    than KEEP, then they are not all there)."""
    group = tl.arange(0, GROUPS)
    chosen = real & (bits <= bound)
    tl.store(held + tl.cumsum(chosen.to(tl.int32), 0) - 1, group, mask=chosen)
    blocks = tl.sum(chosen.to(tl.int32), 0)
    tl.debug_barrier()
    count = tl.full((), 0, tl.int32)
    j = tl.arange(0, KEEP)
    for first in range(0, blocks, KEEP // GROUP):
        if count <= KEEP:
            index = first + j // GROUP
            block = tl.load(held + index, mask=index < blocks, other=0)
            at = block * GROUP + j % GROUP
            there = (index < blocks) & (at < vocab)
            x = tl.load(logits + at, mask=there, other=float("-inf")).to(tl.float32)
            gap = tl.abs(most - x).to(tl.int32, bitcast=True)
            found = there & (gap <= bound)
            place = count + tl.cumsum(found.to(tl.int32), 0) - 1
            fits = found & (place < KEEP)
            tl.store(held + GROUPS + place, gap, mask=fits)
            tl.store(held + GROUPS + KEEP + place, at, mask=fits)
            count += tl.sum(found.to(tl.int32), 0)
    tl.debug_barrier()
    return count


@jit
def _weight(bits, heat):
    """exp(-gap / temperature); 1 for the largest, whatever the temperature."""
    gap = bits.to(tl.float32, bitcast=True)
    return tl.where(bits == 0, 1.0, tl.exp(gap * (-1.0 / heat)))


@jit
def _mass(weight):
    """Fixed point, 2^40: sums do not depend on their order."""
    return (weight * 1099511627776.0).to(tl.int64)


@jit
def _target(share, total):
    return tl.maximum(tl.ceil(share * total.to(tl.float64)).to(tl.int64), 1)


@jit
def _pivot(bits, value, target):
    """The least x such that the values of all bits <= x reach `target`; else 2^31 - 1."""
    pivot = tl.full((), 0, tl.int32)
    for i in range(31):
        trial = pivot + (1 << (30 - i))
        below = tl.sum(tl.where(bits < trial, value, 0), 0)
        pivot = tl.where(below < target, trial, pivot)
    return pivot


@jit
def _first(bits, value, target):
    """Which stay: in order of (bits, place), while the values before reach less than `target`."""
    pivot = _pivot(bits, value, target)
    before = tl.sum(tl.where(bits < pivot, value, 0), 0)
    tied = tl.where(bits == pivot, value, 0)
    room = tl.cumsum(tied, 0) - tied < target - before
    return (bits < pivot) | ((bits == pivot) & room)


@jit
def _values(logits, first, most, heat, vocab, edge, last, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """(bits, ids, values) of BLOCK columns: 1 or the mass of what is up to (edge, last), else 0."""
    at = first + tl.arange(0, BLOCK)
    x = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    bits = tl.abs(most - x).to(tl.int32, bitcast=True)
    kept = (at < vocab) & ((bits < edge) | ((bits == edge) & (at <= last)))
    value = kept.to(tl.int64)
    if MASS:
        value = _mass(tl.where(kept, _weight(bits, heat), 0.0))
    return bits, at, value


@jit
def _sum(logits, most, heat, vocab, edge, last, limit, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Of the values up to (edge, last) whose bits are below `limit`."""
    total = tl.zeros((BLOCK,), tl.int64)
    for first in tl.range(0, vocab, BLOCK, num_stages=4):
        bits, _, value = _values(logits, first, most, heat, vocab, edge, last, MASS, BLOCK)
        total += tl.where(bits < limit, value, 0)
    return tl.sum(total, 0)


@jit
def _cut(logits, most, heat, vocab, edge, last, target, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """(bits, id) of the last token that stays: as `_first`, over the whole row."""
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
    room = target - _sum(logits, most, heat, vocab, edge, last, pivot, MASS, BLOCK)
    end = tl.full((), -1, tl.int32)
    for first in tl.range(0, vocab, BLOCK, num_stages=4):
        bits, at, value = _values(logits, first, most, heat, vocab, edge, last, MASS, BLOCK)
        tied = tl.where(bits == pivot, value, 0)
        stays = (bits == pivot) & (at < vocab) & (tl.cumsum(tied, 0) - tied < room)
        end = tl.maximum(end, tl.max(tl.where(stays, at, -1), 0))
        room -= tl.sum(tied, 0)
    return pivot, tl.where(pivot == edge, tl.minimum(end, last), end)


@jit
def _race(
    logits, largest, edge_ptr, out, positions, temperature, min_p, key, best_ptr, id_ptr,
    temperature_row, min_p_row, key_row, vocab, row_stride, width, span,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(out + row) < 0:
        request = row // width
        logits += row * row_stride
        heat = tl.load(temperature + request * temperature_row)
        least = tl.load(min_p + request * min_p_row)
        most = tl.load(largest + row)
        edge, last = tl.load(edge_ptr + 2 * row), tl.load(edge_ptr + 2 * row + 1)
        best = tl.full((BLOCK,), float("inf"), tl.float32)
        ids = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
        for first in tl.range(part * span, part * span + span, BLOCK, num_stages=3):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
            bits = tl.abs(most - x).to(tl.int32, bitcast=True)
            weight = _weight(bits, heat)
            kept = (at < vocab) & ((bits < edge) | ((bits == edge) & (at <= last)))
            noise = keyed_noise(key, positions, row, request, key_row, at)
            score = tl.where(kept & (weight >= least), weight / noise, float("inf"))
            ids = tl.where(score < best, at, ids)
            best = tl.minimum(score, best)
        top = tl.min(best, 0)
        index = row * tl.num_programs(1) + part
        tl.store(best_ptr + index, top)
        tl.store(id_ptr + index, tl.min(tl.where(best == top, ids, 0x7FFFFFFF), 0))


@jit
def _finish(best_ptr, id_ptr, out, parts, vocab, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if tl.load(out + row) < 0:
        i = tl.arange(0, BLOCK)
        best = tl.load(best_ptr + row * parts + i, mask=i < parts, other=float("inf"))
        ids = tl.load(id_ptr + row * parts + i, mask=i < parts, other=0x7FFFFFFF)
        token = tl.min(tl.where(best == tl.min(best, 0), ids, 0x7FFFFFFF), 0)
        tl.store(out + row, tl.minimum(token, vocab - 1).to(tl.int64))
