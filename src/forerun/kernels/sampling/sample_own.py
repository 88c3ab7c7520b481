# mypy: allow-untyped-defs, allow-incomplete-defs
"""Samples from vocab-parallel logits: a token needs few numbers of the other ranks.

A row needs the largest logit of all ranks, then one (score, id) per rank, the best of its tokens,
of which the best of all is the row's token; with top-k the `MAX_OWN_TOP_K` largest logits of every
rank, among which are those of all. The rules are those of `sample.py`, number for number.

    group_maxima        the largest of every 128 logits, the largest of which the ranks exchange.
    _own_candidates     with top-k: this rank's candidates.
    sample_parts        the best token of each part of the other rows.
    _own_best           over the parts of a row.
    choose              from what the ranks have exchanged.

What is exchanged is [R, 2, c] int32. A row without top-k has its score, as bits, and its id in
column 0. With top-k it has the gaps of c = MAX_OWN_TOP_K candidates, as bits, and their ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.core.tokens import INVALID_TOKEN
from forerun.kernels.runtime.gpu import vector_warps
from forerun.kernels.runtime.jit import jit, jit_no_specialize, tl, triton
from forerun.kernels.runtime.pdl import pdl_options
from forerun.kernels.sampling.candidates import (
    GROUP_SIZE,
    MAX_CANDIDATES,
    PENDING,
    filter_and_sample,
    gather_candidates,
    is_valid,
    load_params,
    rank_candidates,
    upper_bound,
)
from forerun.kernels.sampling.params import MAX_OWN_TOP_K, SamplingBatch
from forerun.kernels.sampling.sample import lowest_score, sample_parts
from forerun.kernels.sampling.thresholds import BLOCK, RowParts, bisect_threshold, load_gap_bits


def sample_own(
    logits: Tensor,
    group_max: Tensor,
    max_logit: Tensor,
    positions: Tensor,
    batch: SamplingBatch,
    first_id: int,
    top_k: bool,
) -> Tensor:
    """This rank's best tokens. Triton only.

    Args:
        logits: [R, n] of the n ids from `first_id` on, any float dtype and row stride.
        group_max: of `group_maxima`.
        max_logit: [R] float32, the largest logits of all ranks.
        positions: [R] integers, of the tokens to be sampled.
        batch: the B requests; R / B consecutive rows each.
        top_k: whether any request may use it.

    Returns:
        [R, 2, c] int32, c = MAX_OWN_TOP_K with `top_k`, else 1.
    """
    rows, vocab = logits.shape
    device, num_groups = logits.device, group_max.shape[1]
    parts, options = RowParts.of(logits), pdl_options(logits)
    warps, groups_block = vector_warps(BLOCK, logits), triton.next_power_of_2(num_groups)
    params = (batch.slots, batch.floats, batch.ints)
    strides = (logits.stride(0), batch.floats.stride(0), batch.ints.stride(0))
    rows_per_request = rows // len(batch.slots)
    columns = MAX_OWN_TOP_K if top_k else 1
    best = torch.empty(rows, 2, columns, dtype=torch.int32, device=device)
    todo = torch.empty(rows, dtype=torch.int64, device=device) if top_k else None
    if top_k:
        scratch = torch.empty(
            rows, groups_block + 2 * MAX_CANDIDATES, dtype=torch.int32, device=device
        )
        _own_candidates[(rows,)](
            logits, group_max, max_logit, scratch, todo, best, *params,
            vocab, first_id, *strides, num_groups, rows_per_request,
            PENDING=PENDING, COLUMNS=columns, GROUP_SIZE=GROUP_SIZE, GROUPS_BLOCK=groups_block,
            BLOCK=BLOCK, MAX_CANDIDATES=MAX_CANDIDATES, num_warps=warps, **options,
        )  # fmt: skip
    scores = torch.empty(rows, parts.num_parts, dtype=torch.float32, device=device)
    ids = torch.empty(rows, parts.num_parts, dtype=torch.int32, device=device)
    sample_parts[rows, parts.num_parts](
        logits, group_max, max_logit, None, todo, positions, *params, scores, ids,
        vocab, first_id, *strides, num_groups, rows_per_request, parts.part_size,
        INVALID=INVALID_TOKEN, PENDING=PENDING, GROUPS_BLOCK=groups_block, BLOCK=BLOCK,
        num_warps=warps, **options,
    )  # fmt: skip
    _own_best[(rows,)](
        scores, ids, todo, best, parts.num_parts, columns,
        PENDING=PENDING, BLOCK=parts.max_parts, num_warps=1, **options,
    )  # fmt: skip
    return best


def choose(
    best: Tensor,
    ranks: int,
    max_logit: Tensor,
    positions: Tensor,
    batch: SamplingBatch,
    vocab: int,
) -> Tensor:
    """The tokens, from every rank's best ones. Triton only.

    Args:
        best: [R, 2, ranks · c] int32, those of `sample_own`, by rank.
        max_logit, positions, batch: as of `sample_own`.
        vocab: tokens of all ranks.

    Returns:
        [R] int64; INVALID_TOKEN for rows that have a NaN or +inf, or are all -inf.
    """
    rows, count = len(best), best.shape[2]
    out = torch.empty(rows, dtype=torch.int64, device=best.device)
    _choose[(rows,)](
        best, max_logit, out, positions, batch.slots, batch.floats, batch.ints,
        count, count // ranks, vocab, batch.floats.stride(0), batch.ints.stride(0),
        rows // len(batch.slots),
        INVALID=INVALID_TOKEN, PENDING=PENDING, TOP_K=count > ranks,
        MAX_CANDIDATES=triton.next_power_of_2(count), num_warps=4, **pdl_options(best),
    )  # fmt: skip
    return out


@jit_no_specialize("first_id")
def _own_candidates(
    logits, group_max, max_logit_ptr, scratch, todo, best, slots, floats, ints,
    vocab, first_id, row_stride, floats_stride, ints_stride, num_groups, rows_per_request,
    PENDING: tl.constexpr, COLUMNS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr, BLOCK: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per row: with top-k its candidates, else it is marked as PENDING."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    temperature, _, _, _, top_k = load_params(
        slots, floats, ints, row, rows_per_request, floats_stride, ints_stride
    )
    has_k = (temperature > 0) & (top_k > 0)
    tl.store(todo + row, tl.where(has_k, 0, PENDING).to(tl.int64))
    max_logit = tl.load(max_logit_ptr + row)
    if has_k & is_valid(max_logit):
        logits += row * row_stride
        best += row * 2 * COLUMNS
        scratch += row * (GROUPS_BLOCK + 2 * MAX_CANDIDATES)
        k = tl.arange(0, COLUMNS)
        tl.store(best + k, 0x7F800000)  # an infinite gap: of no token
        tl.store(best + COLUMNS + k, first_id)
        tl.debug_barrier()
        group = tl.arange(0, GROUPS_BLOCK)
        inside = group < num_groups
        maxima = tl.load(group_max + row * num_groups + group, mask=inside, other=float("-inf"))
        group_bits = tl.abs(max_logit - maxima).to(tl.int32, bitcast=True)
        wanted = tl.minimum(top_k, COLUMNS).to(tl.int32)
        bound = upper_bound(group_bits, inside.to(tl.int32), wanted)
        bound = tl.minimum(bound, 0x7F7FFFFF)  # a token with an infinite gap is never sampled
        count = gather_candidates(
            logits, scratch, max_logit, group_bits, inside, bound, vocab,
            GROUP_SIZE, GROUPS_BLOCK, BLOCK, MAX_CANDIDATES,
        )  # fmt: skip
        if count <= MAX_CANDIDATES:
            scratch += GROUPS_BLOCK
            j = tl.arange(0, MAX_CANDIDATES)
            bits = tl.load(scratch + j, mask=j < count, other=0x7FFFFFFF)
            ids = tl.load(scratch + MAX_CANDIDATES + j, mask=j < count, other=0)
            place, _weight = rank_candidates(scratch, bits, j, count, temperature, MAX_CANDIDATES)
            kept = (j < count) & (place < COLUMNS)
            tl.store(best + place, bits, mask=kept)
            tl.store(best + COLUMNS + place, first_id + ids, mask=kept)
        else:  # many tokens of nearly the same logit
            _bisect_candidates(
                logits, max_logit, temperature, vocab, first_id, best, COLUMNS, BLOCK
            )


@jit
def _bisect_candidates(
    logits, max_logit, temperature, vocab, first_id, best, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The candidates of one row, in the order of their ids: slow."""
    last_bits, last_id = bisect_threshold(
        logits, max_logit, temperature, vocab, 0x7FFFFFFF, vocab, COLUMNS, False, BLOCK
    )
    count = tl.full((), 0, tl.int32)
    for first in tl.range(0, vocab, BLOCK):
        id = first + tl.arange(0, BLOCK)
        bits, kept = load_gap_bits(logits, id, max_logit, vocab, last_bits, last_id)
        place = count + tl.cumsum(kept.to(tl.int32), 0) - 1
        kept &= place < COLUMNS
        tl.store(best + place, bits, mask=kept)
        tl.store(best + COLUMNS + place, first_id + id, mask=kept)
        count += tl.sum(kept.to(tl.int32), 0)


@jit_no_specialize("num_parts")
def _own_best(
    score_ptr, id_ptr, todo, best, num_parts, columns,
    PENDING: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per row without top-k: the best of its parts."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    wanted = True
    if todo is not None:
        wanted = tl.load(todo + row) == PENDING
    if wanted:
        lowest, token = lowest_score(score_ptr, id_ptr, row, num_parts, BLOCK)
        best += row * 2 * columns
        tl.store(best, lowest.to(tl.int32, bitcast=True))
        tl.store(best + columns, token)


@jit
def _choose(
    best, max_logit_ptr, out, positions, slots, floats, ints,
    count, per_rank, vocab, floats_stride, ints_stride, rows_per_request,
    INVALID: tl.constexpr, PENDING: tl.constexpr, TOP_K: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    best += row * 2 * count
    temperature, top_p, min_p, key, top_k = load_params(
        slots, floats, ints, row, rows_per_request, floats_stride, ints_stride
    )
    token = tl.full((), INVALID, tl.int32)
    if is_valid(tl.load(max_logit_ptr + row)):
        j = tl.arange(0, MAX_CANDIDATES)
        first = (j < count) & (j % per_rank == 0)
        score = tl.load(best + j, mask=first, other=0x7F800000).to(tl.float32, bitcast=True)
        ids = tl.load(best + count + j, mask=first, other=vocab - 1)
        token = tl.min(tl.where(first & (score == tl.min(score, 0)), ids, vocab - 1), 0)
        if TOP_K:  # noqa: SIM102 - decided when compiled
            if (temperature > 0) & (top_k > 0):
                token = filter_and_sample(
                    best, best + count, count, temperature, top_k, top_p, min_p, key,
                    tl.load(positions + row), 0, vocab, True, top_p < 1.0,
                    PENDING, MAX_CANDIDATES,
                )  # fmt: skip
    tl.store(out + row, token.to(tl.int64))
