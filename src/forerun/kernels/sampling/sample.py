# mypy: allow-untyped-defs, allow-incomplete-defs
"""Samples a token from every row of logits: temperature, top-k, top-p, min-p and Gumbel-max.

The rules are those of `forerun.sampling` (filters.py, noise.py), number for number: gaps to the
largest logit, order by (gap bits, id), fixed-point weights, the same hash. Tokens are sampled by
the Gumbel-max trick in its exponential form: the lowest -weight / Exp(1). The launches:

    _group_max                 reads all logits once; the largest of every 128.
    sum_part_weights           with top-p: the weight of each part of a row.
    sample_candidates          with top-k or top-p: greedy rows, and rows whose token can be found
                               among a few candidates (candidates.py).
    find_top_p_thresholds      with top-p: the threshold of the other rows (thresholds.py).
    sample_parts               samples from each part of the rows that are not done.
    _reduce_parts              the best of a row's parts.

A row with a NaN or +inf, or of -inf alone, yields the `invalid` token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.core.tokens import INVALID_TOKEN
from forerun.kernels.runtime.gpu import vector_warps
from forerun.kernels.runtime.jit import jit, jit_no_specialize, tl, triton
from forerun.kernels.runtime.pdl import pdl_options
from forerun.kernels.sampling import candidates
from forerun.kernels.sampling.candidates import (
    GROUP_SIZE,
    MAX_CANDIDATES,
    PENDING,
    is_valid,
    load_params,
    sample_candidates,
)
from forerun.kernels.sampling.noise import keyed_noise
from forerun.kernels.sampling.params import STOP_IDS, SamplingBatch
from forerun.kernels.sampling.thresholds import (
    BLOCK,
    LAST_BINS,
    NUM_BINS,
    STATE_SIZE,
    RowParts,
    TopPScratch,
    find_top_p_thresholds,
    sum_part_weights,
    token_weight,
)


def mask_stop_tokens(
    logits: Tensor, positions: Tensor, batch: SamplingBatch, first_id: int = 0
) -> None:
    """Writes -inf at the requests' stop ids, in place, in rows below their `min_position`.

    Arguments as in `sample_tokens`; `first_id` is that of the first column. Triton only.
    """
    count = batch.ints.shape[1] - STOP_IDS
    _mask_stop_tokens[(len(logits),)](
        logits, positions, batch.slots, batch.ints, logits.stride(0), batch.ints.stride(0),
        len(logits) // len(batch.slots), count, first_id, logits.shape[1],
        BLOCK=triton.next_power_of_2(count), num_warps=1, **pdl_options(logits),
    )  # fmt: skip


def sample_tokens(
    logits: Tensor,
    positions: Tensor,
    batch: SamplingBatch,
    top_k: bool = True,
    top_p: bool = True,
    invalid: int = INVALID_TOKEN,
) -> Tensor:
    """Samples a token from every row. Triton only; the reference is `sampler.sample_ref`.

    Args:
        logits: [R, V], any float dtype and row stride.
        positions: [R] integers, of the tokens to be sampled.
        batch: the B requests; R / B consecutive rows each.
        top_k, top_p: whether any request may use these.
        invalid: the result for rows that have a NaN or +inf, or are all -inf.

    Returns:
        [R] int64.
    """
    rows, vocab = logits.shape
    num_groups, filtered = triton.cdiv(vocab, GROUP_SIZE), top_k or top_p
    groups_block, rows_per_request = triton.next_power_of_2(num_groups), rows // len(batch.slots)
    parts, options = RowParts.of(logits), pdl_options(logits)
    warps, grid = vector_warps(BLOCK, logits), (rows, parts.num_parts)
    params = (batch.slots, batch.floats, batch.ints)
    strides = (logits.stride(0), batch.floats.stride(0), batch.ints.stride(0))

    def scratch(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=logits.device)

    group_max = group_maxima(logits)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    max_logit, threshold = scratch(1, torch.float32), scratch(2, torch.int32)
    search = TopPScratch.of(logits, parts.num_parts) if top_p else None
    if search is not None:
        sum_part_weights[grid](
            logits, group_max, *params, search.part_weights,
            vocab, *strides, num_groups, rows_per_request, parts.part_size,
            GROUPS_BLOCK=groups_block, BLOCK=BLOCK, num_warps=warps, **options,
        )  # fmt: skip
    if filtered:
        sample_candidates[(rows,)](
            logits, group_max, max_logit, scratch(groups_block + 2 * MAX_CANDIDATES, torch.int32),
            threshold, out, positions, *params,
            *((None,) * 4 if search is None
              else (search.part_weights, search.state, search.histograms, search.counts)),
            vocab, *strides, num_groups, rows_per_request, parts.num_parts,
            INVALID=invalid, PENDING=PENDING,
            GROUP_SIZE=GROUP_SIZE, GROUPS_BLOCK=groups_block, BLOCK=BLOCK,
            MAX_CANDIDATES=MAX_CANDIDATES, MAX_TOP_K_GROUPS=candidates.MAX_TOP_K_GROUPS,
            TOP_P_GROUPS=candidates.TOP_P_GROUPS, TOP_P=top_p, MAX_PARTS=parts.max_parts,
            NUM_BINS=NUM_BINS, STATE_SIZE=STATE_SIZE, LAST_BINS=LAST_BINS,
            num_warps=warps, **options,
        )  # fmt: skip
    if search is not None:
        find_top_p_thresholds(logits, batch, max_logit, threshold, search, parts)
    scores = scratch(parts.num_parts, torch.float32)
    ids = scratch(parts.num_parts, torch.int32)
    sample_parts[grid](
        logits, group_max, None, *((threshold, out) if filtered else (None, None)), positions,
        *params, scores, ids, vocab, 0, *strides, num_groups, rows_per_request, parts.part_size,
        INVALID=invalid, PENDING=PENDING, GROUPS_BLOCK=groups_block, BLOCK=BLOCK,
        num_warps=warps, **options,
    )  # fmt: skip
    _reduce_parts[(rows,)](
        scores, ids, out, parts.num_parts, vocab,
        PENDING=PENDING, FILTERED=filtered, BLOCK=parts.max_parts, num_warps=1, **options,
    )  # fmt: skip
    return out


def group_maxima(logits: Tensor) -> Tensor:
    """[R, groups of `GROUP_SIZE` tokens] float32, the largest logit of each; +inf: one is NaN.

    logits [R, V], any float dtype and row stride. Triton only.
    """
    (rows, vocab), parts = logits.shape, RowParts.of(logits)
    num_groups = triton.cdiv(vocab, GROUP_SIZE)
    maxima = torch.empty(rows, num_groups, dtype=torch.float32, device=logits.device)
    _group_max[rows, parts.num_parts](
        logits, maxima, vocab, logits.stride(0), num_groups, parts.part_size,
        GROUP_SIZE=GROUP_SIZE, BLOCK=BLOCK, num_warps=vector_warps(BLOCK, logits),
        **pdl_options(logits),
    )  # fmt: skip
    return maxima


@jit_no_specialize("first_id")
def _mask_stop_tokens(
    logits, positions, slots, ints, row_stride, ints_stride, rows_per_request, count,
    first_id, vocab, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    ints += tl.load(slots + row // rows_per_request) * ints_stride
    i = tl.arange(0, BLOCK)
    masked = (i < count) & (tl.load(positions + row) < tl.load(ints + 2))
    ids = tl.load(ints + 3 + i, mask=masked, other=0) - first_id
    masked &= (ids >= 0) & (ids < vocab)
    tl.store(logits + row * row_stride + ids, float("-inf"), mask=masked)


@jit
def _group_max(
    logits, group_max, vocab, row_stride, num_groups, part_size,
    GROUP_SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per part of a row: the largest logit of each group, +inf where one is NaN."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, begin = tl.program_id(0).to(tl.int64), tl.program_id(1) * part_size
    logits += row * row_stride
    group = tl.arange(0, BLOCK // GROUP_SIZE)
    offset = group[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    for first in tl.range(0, part_size, BLOCK, num_stages=4):
        id = begin + first + offset
        x = tl.load(logits + id, mask=id < vocab, other=float("-inf")).to(tl.float32)
        x = tl.where(x == x, x, float("inf"))
        index = (begin + first) // GROUP_SIZE + group
        tl.store(group_max + row * num_groups + index, tl.max(x, 1), mask=index < num_groups)


@jit_no_specialize("first_id")
def sample_parts(
    logits, group_max, max_logit_ptr, threshold, out, positions, slots, floats, ints,
    score_ptr, id_ptr,
    vocab, first_id, row_stride, floats_stride, ints_stride, num_groups, rows_per_request,
    part_size, INVALID: tl.constexpr, PENDING: tl.constexpr, GROUPS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per part of a row: the best token, with its score.

    logits: of ids from `first_id` on. max_logit_ptr: of rows of which these are a part; None: they
    are whole. threshold: of `sample_candidates`, which has sampled greedy and invalid rows; None:
    no row filters. out: PENDING in rows to be sampled; None: all are.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    todo = True
    if out is not None:
        todo = tl.load(out + row) == PENDING
    if todo:
        logits += row * row_stride
        temperature, _, min_p, key, _ = load_params(
            slots, floats, ints, row, rows_per_request, floats_stride, ints_stride
        )
        position = tl.load(positions + row)
        if max_logit_ptr is None:
            group = tl.arange(0, GROUPS_BLOCK)
            maxima = tl.load(
                group_max + row * num_groups + group, mask=group < num_groups, other=float("-inf")
            )
            max_logit = tl.max(maxima, 0)
        else:
            max_logit = tl.load(max_logit_ptr + row)
        best = tl.full((BLOCK,), float("inf"), tl.float32)
        ids = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
        for first in tl.range(part * part_size, part * part_size + part_size, BLOCK, num_stages=3):
            id = first + tl.arange(0, BLOCK)
            x = tl.load(logits + id, mask=id < vocab, other=float("-inf")).to(tl.float32)
            gap = tl.abs(max_logit - x)
            bits, kept = gap.to(tl.int32, bitcast=True), id < vocab
            if threshold is not None:
                last_bits, last_id = tl.load(threshold + 2 * row), tl.load(threshold + 2 * row + 1)
                kept &= (bits < last_bits) | ((bits == last_bits) & (id <= last_id))
            weight = token_weight(bits, temperature)
            score = weight / keyed_noise(key, position, first_id + id)
            if threshold is not None:
                kept &= weight >= min_p
            else:  # greedy rows: the gap itself is the score
                kept &= weight >= tl.where(temperature > 0, min_p, -1.0)
                score = tl.where(temperature > 0, score, gap)
            score = tl.where(kept, score, float("inf"))
            ids = tl.where(score < best, id, ids)
            best = tl.minimum(score, best)
        score = tl.min(best, 0)
        token = tl.min(tl.where(best == score, ids, 0x7FFFFFFF), 0)
        if threshold is None:
            valid = is_valid(max_logit)
            score = tl.where(valid, score, float("-inf"))
            token = tl.where(valid, first_id + token, INVALID)
        index = row * tl.num_programs(1) + part
        tl.store(score_ptr + index, score)
        tl.store(id_ptr + index, token)


@jit
def lowest_score(score_ptr, id_ptr, row, num_parts, BLOCK: tl.constexpr):
    """(the lowest score of a row's parts, its token, the lowest id of equals)."""
    i = tl.arange(0, BLOCK)
    inside = i < num_parts
    scores = tl.load(score_ptr + row * num_parts + i, mask=inside, other=float("inf"))
    ids = tl.load(id_ptr + row * num_parts + i, mask=inside, other=0x7FFFFFFF)
    lowest = tl.min(scores, 0)
    return lowest, tl.min(tl.where(scores == lowest, ids, 0x7FFFFFFF), 0)


@jit_no_specialize("num_parts")
def _reduce_parts(
    score_ptr, id_ptr, out, num_parts, vocab,
    PENDING: tl.constexpr, FILTERED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per row: the best of its parts."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    todo = True
    if FILTERED:
        todo = tl.load(out + row) == PENDING
    if todo:
        _, token = lowest_score(score_ptr, id_ptr, row, num_parts, BLOCK)
        tl.store(out + row, tl.minimum(token, vocab - 1).to(tl.int64))
