# mypy: allow-untyped-defs, allow-incomplete-defs
"""A token for every row: temperature, top-k, top-p, min-p, and the race of keyed noise.

The rules are those of `forerun.sampling` (filters.py, noise.py), number for number: gaps to the
largest logit, order by (bits of the gap, id), integer masses, the same hash. The launches:

    _scan          reads all logits once and leaves the largest of every 128.
    sum_of_part    with top-p: the mass of a row's parts.
    _choose        with top-k or top-p, one program a row. Greedy: found in the one block that holds
                   the maximum. Top-k up to `FEW`, and top-p where the mass lies in few tokens: the
                   k-th largest block maximum bounds the k-th largest logit, so a few blocks hold
                   all candidates; these are filtered and raced in registers. Other top-k: by
                   bisection over the whole row (slow).
    find_edges     with top-p: the edge of what is kept where it is not among few (nucleus.py).
    _race          the race over whole rows, for those that are not done.
    _finish        the best of a row's parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.elementwise.rms_norm import vector_warps
from forerun.kernels.runtime.jit import jit, jit_no_specialize, tl, triton
from forerun.kernels.runtime.pdl import pdl_options
from forerun.kernels.sampling.noise import keyed_noise
from forerun.kernels.sampling.nucleus import (
    BINS,
    BLOCK,
    LAST,
    STATE,
    Nucleus,
    cut_row,
    find_edges,
    mass_of,
    padded_parts,
    split_rows,
    sum_of_part,
    sum_row,
    weight_of,
)

# Columns of a request's rules, float32 and int64; `_rules` and others here know the numbers.
TEMPERATURE, TOP_P, MIN_P, FLOATS = 0, 1, 2, 3
KEY, TOP_K, MIN_POSITION, STOP_IDS = 0, 1, 2, 3  # stop ids to the end

GROUP = 128  # logits that share a maximum
KEEP = 512  # candidates that it keeps in registers
FEW = 256  # block maxima that bound the candidates of top-k, at most
FEW_MASS = 128  # those that bound them where there is top-p alone


def mask_stop_tokens(logits: Tensor, positions: Tensor, slots: Tensor, ints: Tensor) -> None:
    """In place: -inf at the requests' stop ids in rows [R] below their `MIN_POSITION`.

    Arguments as in `sample_rows`. Triton only.
    """
    count = ints.shape[1] - STOP_IDS
    _mask_stop_tokens[(len(logits),)](
        logits, positions, slots, ints, logits.stride(0), ints.stride(0),
        len(logits) // len(slots), count,
        BLOCK=triton.next_power_of_2(count), num_warps=1, **pdl_options(logits),
    )  # fmt: skip


def sample_rows(
    logits: Tensor,
    positions: Tensor,
    slots: Tensor,
    floats: Tensor,
    ints: Tensor,
    top_k: bool = True,
    top_p: bool = True,
) -> Tensor:
    """Draws a token at every row. Triton only; the twin is `forerun.sampling.sampler.sample`.

    Args:
        logits: [R, V], any float dtype and row stride.
        positions: [R] integers, of the tokens to be drawn.
        slots: [B] int64, the requests' rows in the tables; R / B rows of logits each, in order.
        floats: [S, 3] float32: temperature, top-p, min-p. Temperature 0 is greedy, from 1 top-p
            is off.
        ints: [S, 3 + n] int64: key, top-k (below 1: off), position from which stop ids may come,
            stop ids. The key is `seed_key` of the request's seed.
        top_k, top_p: whether any row may use these.

    Returns:
        [R] int64.
    """
    rows, vocab = logits.shape
    groups, device = triton.cdiv(vocab, GROUP), logits.device
    padded, width = triton.next_power_of_2(groups), rows // len(slots)
    (parts, span), room = split_rows(logits), padded_parts(logits)
    warps, options = vector_warps(BLOCK, logits), pdl_options(logits)
    rules = (slots, floats, ints)
    strides = (logits.stride(0), floats.stride(0), ints.stride(0))

    def scratch(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=device)

    tops = scratch(groups, torch.float32)
    _scan[(rows, parts)](
        logits, tops, vocab, logits.stride(0), groups, span,
        GROUP=GROUP, BLOCK=BLOCK, num_warps=warps, **options,
    )  # fmt: skip
    out = torch.empty(rows, dtype=torch.int64, device=device)
    largest, edge = scratch(1, torch.float32), scratch(2, torch.int32)
    nucleus = Nucleus.of(logits, parts) if top_p else None
    if nucleus is not None:
        sum_of_part[(rows, parts)](
            logits, tops, *rules, nucleus.sums, vocab, *strides, groups, width, span,
            GROUPS=padded, BLOCK=BLOCK, num_warps=warps, **options,
        )  # fmt: skip
    if top_k or top_p:
        held = scratch(padded + 2 * KEEP, torch.int32)
        _choose[(rows,)](
            logits, tops, largest, held, edge, out, positions, *rules,
            *((None,) * 4 if nucleus is None
              else (nucleus.sums, nucleus.state, nucleus.masses, nucleus.counts)),
            vocab, *strides, groups, width, parts,
            GROUP=GROUP, GROUPS=padded, BLOCK=BLOCK, KEEP=KEEP, FEW=FEW, FEW_MASS=FEW_MASS,
            NUCLEUS=top_p, PARTS=room, BINS=BINS, STATE=STATE, LAST=LAST,
            num_warps=warps, **options,
        )  # fmt: skip
    if nucleus is not None:
        find_edges(logits, slots, floats, largest, edge, nucleus)
    best, ids = scratch(parts, torch.float32), scratch(parts, torch.int32)
    _race[(rows, parts)](
        logits, tops, edge, out, positions, *rules, best, ids,
        vocab, *strides, groups, width, span,
        FILTERED=top_k or top_p, GROUPS=padded, BLOCK=BLOCK, num_warps=warps, **options,
    )  # fmt: skip
    _finish[(rows,)](
        best, ids, out, parts, vocab, FILTERED=top_k or top_p,
        BLOCK=room, num_warps=1, **options,
    )  # fmt: skip
    return out


@jit
def _mask_stop_tokens(
    logits, positions, slots, ints, row_stride, ints_row, width, count,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    ints += tl.load(slots + row // width) * ints_row
    i = tl.arange(0, BLOCK)
    held = (i < count) & (tl.load(positions + row) < tl.load(ints + 2))
    ids = tl.load(ints + 3 + i, mask=held, other=0)
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
def _rules(slots, floats, ints, row, width, floats_row, ints_row):
    """(temperature, top-p, min-p, key, top-k) of a row's request."""
    slot = tl.load(slots + row // width)
    floats += slot * floats_row
    ints += slot * ints_row
    heat, share, least = tl.load(floats), tl.load(floats + 1), tl.load(floats + 2)
    return heat, share.to(tl.float64), least, tl.load(ints), tl.load(ints + 1)


@jit_no_specialize("parts")
def _choose(
    logits, tops, largest, held, edge_ptr, out, positions, slots, floats, ints,
    sums, state, masses, counts,
    vocab, row_stride, floats_row, ints_row, groups, width, parts,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr,
    FEW: tl.constexpr, FEW_MASS: tl.constexpr, NUCLEUS: tl.constexpr, PARTS: tl.constexpr,
    BINS: tl.constexpr, STATE: tl.constexpr, LAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out: the token, or -1 where the whole row has to race; edge: (bits, id) of the last kept."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    heat, share, least, key, few = _rules(slots, floats, ints, row, width, floats_row, ints_row)
    group = tl.arange(0, GROUPS)
    top = tl.load(tops + row * groups + group, mask=group < groups, other=float("-inf"))
    most = tl.max(top, 0)
    j = tl.arange(0, KEEP)
    token = tl.full((), -1, tl.int32)
    edge, last = tl.full((), 0x7FFFFFFF, tl.int32), vocab
    target = tl.full((), 0, tl.int64)  # mass that is left to be found
    if heat <= 0:
        first = tl.min(tl.where(top == most, group, groups - 1), 0)
        at = first * GROUP + tl.arange(0, GROUP)
        x = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        token = tl.min(tl.where(x == most, at, vocab - 1), 0)
    else:
        has_k, has_p = (few > 0) & (few < vocab), share < 1.0
        if NUCLEUS:  # noqa: SIM102 - decided when compiled
            if has_p & (has_k == 0):
                part = tl.arange(0, PARTS)
                mass = tl.load(sums + row * parts + part, mask=part < parts, other=0)
                target = _target(share, tl.sum(mass, 0))
        if (has_k & (few <= FEW)) | (target > 0):
            held += row * (GROUPS + 2 * KEEP)
            wanted = tl.where(has_k, few, FEW_MASS).to(tl.int32)
            least_gap = tl.abs(most - top).to(tl.int32, bitcast=True)
            real = group < groups
            bound = _bound(least_gap, real.to(tl.int32), wanted)
            count = _gather(
                logits, held, most, least_gap, real, bound, vocab, GROUP, GROUPS, BLOCK, KEEP
            )
            if count <= KEEP:
                inside = j < count
                bits = tl.load(held + GROUPS + j, mask=inside, other=0x7FFFFFFF)
                ids = tl.load(held + GROUPS + KEEP + j, mask=inside, other=vocab - 1)
                weight = tl.where(inside, weight_of(bits, heat), 0.0)
                kept, enough = inside, count > 0
                before, mass_before = _before(held + GROUPS, bits, j, count, heat, KEEP)
                if has_k:
                    kept &= before < few
                if has_p:
                    have = tl.sum(mass_of(tl.where(kept, weight, 0.0)), 0)
                    among = tl.where(has_k, _target(share, have), target)
                    enough &= have >= among
                    kept &= mass_before < among
                if enough:
                    kept &= weight >= least
                    noise = keyed_noise(key, tl.load(positions + row), ids)
                    score = tl.where(kept, weight / noise, float("inf"))
                    token = tl.min(tl.where(score == tl.min(score, 0), ids, vocab - 1), 0)
        if (token < 0) & has_k:
            edge, last = cut_row(logits, most, heat, vocab, edge, last, few, False, BLOCK)
            if has_p:
                all_bits = tl.full((), 0x7FFFFFFF, tl.int32)
                mass = sum_row(logits, most, heat, vocab, edge, last, all_bits, True, BLOCK)
                target = _target(share, mass)
    tl.store(out + row, token.to(tl.int64))
    tl.store(largest + row, most)
    tl.store(edge_ptr + 2 * row, edge)
    tl.store(edge_ptr + 2 * row + 1, last)
    if NUCLEUS:  # nucleus.py's scratch
        target = tl.where(token < 0, target, 0)
        tl.store(state + row * STATE, target)
        if target > 0:
            i = tl.arange(0, BINS)
            tl.store(state + row * STATE + 3 + i, 0, mask=i < 3)
            tl.store(masses + row * 2 * BINS + i, 0)
            tl.store(masses + row * 2 * BINS + BINS + i, 0)
            for first in range(0, parts * LAST, BINS):
                tl.store(counts + row * parts * LAST + first + i, 0, mask=first + i < parts * LAST)


@jit
def _gather(
    logits, held, most, bits, real, bound, vocab,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Gap bits up to `bound` and their ids into `held`, ids ascending; returns how many (or more
    than KEEP, then they are not all there)."""
    group = tl.arange(0, GROUPS)
    chosen = real & (bits <= bound)
    tl.store(held + tl.cumsum(chosen.to(tl.int32), 0) - 1, group, mask=chosen)
    blocks = tl.sum(chosen.to(tl.int32), 0)
    tl.debug_barrier()
    count = tl.full((), 0, tl.int32)
    j = tl.arange(0, BLOCK)
    for first in range(0, blocks, BLOCK // GROUP):
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
def _target(share, total):
    return tl.maximum(tl.ceil(share * total.to(tl.float64)).to(tl.int64), 1)


@jit
def _bound(bits, value, target):
    """At least the x such that the values of all bits <= x reach `target`, by 16 of their bits."""
    pivot = tl.full((), 0, tl.int32)
    for i in range(16):
        trial = pivot + (1 << (30 - i))
        below = tl.sum(tl.where(bits < trial, value, 0), 0)
        pivot = tl.where(below < target, trial, pivot)
    return pivot | 0x7FFF


@jit
def _before(held, bits, place, count, heat, KEEP: tl.constexpr):
    """(how many candidates, what mass) come before each in order of (bits, place)."""
    some = tl.arange(0, 8)[None, :]
    number = tl.zeros((KEEP, 8), tl.int32)
    mass = tl.zeros((KEEP, 8), tl.int64)
    for first in range(0, count, 8):
        at = first + some
        other = tl.load(held + at, mask=at < count, other=0x7FFFFFFF)
        earlier = (other < bits[:, None]) | ((other == bits[:, None]) & (at < place[:, None]))
        earlier &= at < count
        number += earlier.to(tl.int32)
        mass += tl.where(earlier, mass_of(weight_of(other, heat)), 0)
    return tl.sum(number, 1), tl.sum(mass, 1)


@jit
def _race(
    logits, tops, edge_ptr, out, positions, slots, floats, ints, best_ptr, id_ptr,
    vocab, row_stride, floats_row, ints_row, groups, width, span,
    FILTERED: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """FILTERED: `_choose` was here."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    todo = True
    if FILTERED:
        todo = tl.load(out + row) < 0
    if todo:
        logits += row * row_stride
        heat, _, least, key, _ = _rules(slots, floats, ints, row, width, floats_row, ints_row)
        position = tl.load(positions + row)
        group = tl.arange(0, GROUPS)
        top = tl.load(tops + row * groups + group, mask=group < groups, other=float("-inf"))
        most = tl.max(top, 0)
        best = tl.full((BLOCK,), float("inf"), tl.float32)
        ids = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
        for first in tl.range(part * span, part * span + span, BLOCK, num_stages=3):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
            gap = tl.abs(most - x)
            bits, kept = gap.to(tl.int32, bitcast=True), at < vocab
            if FILTERED:
                edge, last = tl.load(edge_ptr + 2 * row), tl.load(edge_ptr + 2 * row + 1)
                kept &= (bits < edge) | ((bits == edge) & (at <= last))
            weight = weight_of(bits, heat)
            score = weight / keyed_noise(key, position, at)
            if FILTERED:
                kept &= weight >= least
            else:  # greedy rows: the gap itself
                kept &= weight >= tl.where(heat > 0, least, -1.0)
                score = tl.where(heat > 0, score, gap)
            score = tl.where(kept, score, float("inf"))
            ids = tl.where(score < best, at, ids)
            best = tl.minimum(score, best)
        top = tl.min(best, 0)
        index = row * tl.num_programs(1) + part
        tl.store(best_ptr + index, top)
        tl.store(id_ptr + index, tl.min(tl.where(best == top, ids, 0x7FFFFFFF), 0))


@jit_no_specialize("parts")
def _finish(
    best_ptr, id_ptr, out, parts, vocab,
    FILTERED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    todo = True
    if FILTERED:
        todo = tl.load(out + row) < 0
    if todo:
        i = tl.arange(0, BLOCK)
        best = tl.load(best_ptr + row * parts + i, mask=i < parts, other=float("inf"))
        ids = tl.load(id_ptr + row * parts + i, mask=i < parts, other=0x7FFFFFFF)
        token = tl.min(tl.where(best == tl.min(best, 0), ids, 0x7FFFFFFF), 0)
        tl.store(out + row, tl.minimum(token, vocab - 1).to(tl.int64))
