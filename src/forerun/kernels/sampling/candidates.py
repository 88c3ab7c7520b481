# mypy: allow-untyped-defs, allow-incomplete-defs
"""Rows whose token can be found among a few candidates: one CTA per row, candidates in registers.

Serves top-k up to MAX_TOP_K_GROUPS, and top-p if the weight is concentrated in few tokens. The k-th
largest group maximum bounds the k-th largest logit, so a few groups of logits contain all
candidates, which are gathered, filtered and sampled from in registers. A greedy row takes the first
largest logit of the group that has the maximum, and a row of invalid logits yields INVALID. All
other rows are PENDING: they are sampled from the whole row, up to a threshold. For larger top-k it
is found here by bisection (slow), for top-p in `thresholds.py`.
"""

from __future__ import annotations

from forerun.kernels.runtime.jit import jit, jit_no_specialize, tl
from forerun.kernels.sampling.noise import keyed_noise
from forerun.kernels.sampling.thresholds import (
    bisect_threshold,
    sum_below,
    to_fixed,
    token_weight,
)

GROUP_SIZE = 128  # logits that share a maximum
MAX_CANDIDATES = 512  # kept in registers
MAX_TOP_K_GROUPS = 256  # group maxima that bound the candidates of top-k, at most
TOP_P_GROUPS = 128  # group maxima that bound the candidates of top-p alone
PENDING = -2  # token of a row that is to be sampled from the whole row


@jit
def load_params(slots, floats, ints, row, rows_per_request, floats_stride, ints_stride):
    """(temperature, top_p, min_p, key, top_k) of a row's request: the columns of params.py."""
    slot = tl.load(slots + row // rows_per_request)
    floats += slot * floats_stride
    ints += slot * ints_stride
    temperature, top_p, min_p = tl.load(floats), tl.load(floats + 1), tl.load(floats + 2)
    return temperature, top_p.to(tl.float64), min_p, tl.load(ints), tl.load(ints + 1)


@jit
def is_valid(max_logit):
    """Group maxima are +inf if the group has a NaN or +inf; a row of -inf alone has no token."""
    return (max_logit > float("-inf")) & (max_logit < float("inf"))


@jit_no_specialize("num_parts")
def sample_candidates(
    logits, group_max, max_logit_ptr, scratch, threshold, out, positions, slots, floats, ints,
    part_weights, state, histograms, counts,
    vocab, row_stride, floats_stride, ints_stride, num_groups, rows_per_request, num_parts,
    INVALID: tl.constexpr, PENDING: tl.constexpr,
    GROUP_SIZE: tl.constexpr, GROUPS_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr, MAX_TOP_K_GROUPS: tl.constexpr, TOP_P_GROUPS: tl.constexpr,
    TOP_P: tl.constexpr, MAX_PARTS: tl.constexpr, NUM_BINS: tl.constexpr,
    STATE_SIZE: tl.constexpr, LAST_BINS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out: the token, INVALID or PENDING; threshold: (bits, id) of the last token kept."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    temperature, top_p, min_p, key, top_k = load_params(
        slots, floats, ints, row, rows_per_request, floats_stride, ints_stride
    )
    group = tl.arange(0, GROUPS_BLOCK)
    maxima = tl.load(
        group_max + row * num_groups + group, mask=group < num_groups, other=float("-inf")
    )
    max_logit = tl.max(maxima, 0)
    token = tl.full((), PENDING, tl.int32)
    threshold_bits, threshold_id = tl.full((), 0x7FFFFFFF, tl.int32), vocab
    target = tl.full((), 0, tl.int64)  # of top-p: the weight to be reached
    if is_valid(max_logit) == 0:
        token = tl.full((), INVALID, tl.int32)
    elif temperature <= 0:
        first = tl.min(tl.where(maxima == max_logit, group, num_groups - 1), 0)
        id = first * GROUP_SIZE + tl.arange(0, GROUP_SIZE)
        x = tl.load(logits + id, mask=id < vocab, other=float("-inf")).to(tl.float32)
        token = tl.min(tl.where(x == max_logit, id, vocab - 1), 0)
    else:
        has_k, has_p = (top_k > 0) & (top_k < vocab), top_p < 1.0
        if TOP_P:  # noqa: SIM102 - decided when compiled
            if has_p & (has_k == 0):
                part = tl.arange(0, MAX_PARTS)
                weights = tl.load(
                    part_weights + row * num_parts + part, mask=part < num_parts, other=0
                )
                target = _top_p_target(top_p, tl.sum(weights, 0))
        if (has_k & (top_k <= MAX_TOP_K_GROUPS)) | (target > 0):
            scratch += row * (GROUPS_BLOCK + 2 * MAX_CANDIDATES)
            wanted = tl.where(has_k, top_k, TOP_P_GROUPS).to(tl.int32)
            group_bits = tl.abs(max_logit - maxima).to(tl.int32, bitcast=True)
            inside = group < num_groups
            bound = upper_bound(group_bits, inside.to(tl.int32), wanted)
            count = gather_candidates(
                logits, scratch, max_logit, group_bits, inside, bound, vocab,
                GROUP_SIZE, GROUPS_BLOCK, BLOCK, MAX_CANDIDATES,
            )  # fmt: skip
            if count <= MAX_CANDIDATES:
                bits_ptr = scratch + GROUPS_BLOCK
                token = filter_and_sample(
                    bits_ptr, bits_ptr + MAX_CANDIDATES, count, temperature, top_k, top_p, min_p,
                    key, tl.load(positions + row), target, vocab, has_k, has_p,
                    PENDING, MAX_CANDIDATES,
                )  # fmt: skip
        if (token == PENDING) & has_k:
            threshold_bits, threshold_id = bisect_threshold(
                logits, max_logit, temperature, vocab, threshold_bits, threshold_id, top_k,
                False, BLOCK,
            )  # fmt: skip
            if has_p:
                total = sum_below(
                    logits, max_logit, temperature, vocab, threshold_bits, threshold_id,
                    tl.full((), 0x7FFFFFFF, tl.int32), True, BLOCK,
                )  # fmt: skip
                target = _top_p_target(top_p, total)
    tl.store(out + row, token.to(tl.int64))
    tl.store(max_logit_ptr + row, max_logit)
    tl.store(threshold + 2 * row, threshold_bits)
    tl.store(threshold + 2 * row + 1, threshold_id)
    if TOP_P:
        target = tl.where(token == PENDING, target, 0)
        tl.store(state + row * STATE_SIZE, target)
        if target > 0:
            _reset_scratch(
                state + row * STATE_SIZE, histograms + row * 2 * NUM_BINS,
                counts + row * num_parts * LAST_BINS, num_parts * LAST_BINS, NUM_BINS,
            )  # fmt: skip


@jit
def _reset_scratch(state, histograms, counts, num_counts, NUM_BINS: tl.constexpr):
    """Zeroes what the radix select of a row adds to."""
    i = tl.arange(0, NUM_BINS)
    tl.store(state + 3 + i, 0, mask=i < 3)
    tl.store(histograms + i, 0)
    tl.store(histograms + NUM_BINS + i, 0)
    for first in range(0, num_counts, NUM_BINS):
        tl.store(counts + first + i, 0, mask=first + i < num_counts)


@jit
def filter_and_sample(
    candidates, id_ptr, count, temperature, top_k, top_p, min_p, key, position, target, vocab,
    has_k, has_p, PENDING: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Filters the candidates (gap bits, ids; of equal bits the lower id is first) and samples one;
    PENDING if they weigh less than the target.
    """
    j = tl.arange(0, MAX_CANDIDATES)
    token = tl.full((), PENDING, tl.int32)
    inside = j < count
    bits = tl.load(candidates + j, mask=inside, other=0x7FFFFFFF)
    ids = tl.load(id_ptr + j, mask=inside, other=vocab - 1)
    weight = tl.where(inside, token_weight(bits, temperature), 0.0)
    kept, enough = inside, count > 0
    rank, weight_before = rank_candidates(candidates, bits, j, count, temperature, MAX_CANDIDATES)
    if has_k:
        kept &= rank < top_k
    if has_p:
        total = tl.sum(to_fixed(tl.where(kept, weight, 0.0)), 0)
        needed = tl.where(has_k, _top_p_target(top_p, total), target)
        enough &= total >= needed
        kept &= weight_before < needed
    if enough:
        kept &= weight >= min_p
        noise = keyed_noise(key, position, ids)
        score = tl.where(kept, weight / noise, float("inf"))
        token = tl.min(tl.where(score == tl.min(score, 0), ids, vocab - 1), 0)
    return token


@jit
def gather_candidates(
    logits, scratch, max_logit, group_bits, inside, bound, vocab,
    GROUP_SIZE: tl.constexpr, GROUPS_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Writes gap bits up to `bound` and their ids, ascending, after the groups in `scratch`.

    Returns how many there are; with more than MAX_CANDIDATES not all were written.
    """
    group = tl.arange(0, GROUPS_BLOCK)
    chosen = inside & (group_bits <= bound)
    tl.store(scratch + tl.cumsum(chosen.to(tl.int32), 0) - 1, group, mask=chosen)
    num_chosen = tl.sum(chosen.to(tl.int32), 0)
    tl.debug_barrier()
    count = tl.full((), 0, tl.int32)
    j = tl.arange(0, BLOCK)
    for first in range(0, num_chosen, BLOCK // GROUP_SIZE):
        if count <= MAX_CANDIDATES:
            index = first + j // GROUP_SIZE
            group_index = tl.load(scratch + index, mask=index < num_chosen, other=0)
            id = group_index * GROUP_SIZE + j % GROUP_SIZE
            real = (index < num_chosen) & (id < vocab)
            x = tl.load(logits + id, mask=real, other=float("-inf")).to(tl.float32)
            bits = tl.abs(max_logit - x).to(tl.int32, bitcast=True)
            found = real & (bits <= bound)
            place = count + tl.cumsum(found.to(tl.int32), 0) - 1
            fits = found & (place < MAX_CANDIDATES)
            tl.store(scratch + GROUPS_BLOCK + place, bits, mask=fits)
            tl.store(scratch + GROUPS_BLOCK + MAX_CANDIDATES + place, id, mask=fits)
            count += tl.sum(found.to(tl.int32), 0)
    tl.debug_barrier()
    return count


@jit
def _top_p_target(top_p, total):
    """The weight that top-p asks for, of `total`."""
    return tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)


@jit
def upper_bound(bits, value, target):
    """An x >= the smallest with sum(value where bits <= x) >= target, from the upper 16 bits."""
    pivot = tl.full((), 0, tl.int32)
    for i in range(16):
        trial = pivot + (1 << (30 - i))
        below = tl.sum(tl.where(bits < trial, value, 0), 0)
        pivot = tl.where(below < target, trial, pivot)
    return pivot | 0x7FFF


@jit
def rank_candidates(candidates, bits, place, count, temperature, MAX_CANDIDATES: tl.constexpr):
    """(how many candidates, what weight) come before each, in the order of (bits, place)."""
    some = tl.arange(0, 8)[None, :]
    number = tl.zeros((MAX_CANDIDATES, 8), tl.int32)
    weight = tl.zeros((MAX_CANDIDATES, 8), tl.int64)
    for first in range(0, count, 8):
        at = first + some
        other = tl.load(candidates + at, mask=at < count, other=0x7FFFFFFF)
        earlier = (other < bits[:, None]) | ((other == bits[:, None]) & (at < place[:, None]))
        earlier &= at < count
        number += earlier.to(tl.int32)
        weight += tl.where(earlier, to_fixed(token_weight(other, temperature)), 0)
    return tl.sum(number, 1), tl.sum(weight, 1)
