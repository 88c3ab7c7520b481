# mypy: allow-untyped-defs, allow-incomplete-defs
"""The router on a GPU: logits, top-k experts and weights, and the experts' tiles.

On Hopper, up to `MAX_DECODE_TOKENS` tokens have one kernel for all (`router_sm90.py`), if their
weight fits (`choose_router_sm90`). Otherwise there are two:

1. `_router_logits`: x Wᵀ in float32, K split into slices: with few tokens one CTA per tile of
   experts could not read the weight quickly enough.
2. `_top_k`: sums the slices in order, scores, chooses and weights. Up to `MAX_DECODE_TOKENS`
   tokens it also sorts the pairs into a list per expert and cuts the lists into tiles. Up to 16
   tokens are one CTA's, which counts in registers. Otherwise every pair takes the next place in its
   expert's list by an atomic add, and the CTA that finishes last makes the tiles; the order within
   a list then varies, and the results of the GEMMs do not depend on it. The lists of shared experts
   hold all tokens, in order. For more tokens, `align.py` makes the tiles.

Nothing is read on the host.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.gemm.gemm_triton import prefetch_weight
from forerun.kernels.moe.align import align
from forerun.kernels.moe.config import (
    DECODE_BLOCK_M,
    MAX_DECODE_TOKENS,
    choose_moe,
    choose_router_sm90,
    choose_router_tile,
    max_tiles,
    router_slice,
)
from forerun.kernels.moe.router_sm90 import route_sm90
from forerun.kernels.moe.routing import (
    NORM_EPS,
    ExpertTiles,
    Routed,
    Routing,
    route_ref,
)
from forerun.kernels.runtime.gpu import gpu_of, next_power_of_2
from forerun.kernels.runtime.jit import jit, jit_no_specialize, tl, use_triton
from forerun.kernels.runtime.pairs import sum_pairs
from forerun.kernels.runtime.pdl import pdl_options

TOKENS, MANY_TOKENS = 4, 8  # per CTA of `_top_k`; up to `MAX_DECODE_TOKENS` one to a warp
ONE_CTA_TOKENS, ONE_CTA_SCORES = 16, 4096  # most tokens, and tokens times experts, of one CTA
WARPS = 4  # of the other CTAs of `_top_k`


def new_counts(routing: Routing, device: torch.device) -> Tensor:
    """int32 zeros: pairs per expert [E] and CTAs done [1]; the experts' progress, one per tile + 2.

    Every routing, and the experts after it, leave them zero. Two layers with the same counts must
    not run at once.
    """
    pairs = MAX_DECODE_TOKENS * (routing.top_k + routing.num_shared)
    tiles = max_tiles(pairs, routing.num_experts + routing.num_shared, DECODE_BLOCK_M)
    return torch.zeros(routing.num_experts + 3 + tiles, dtype=torch.int32, device=device)


def route(
    x: Tensor,
    weight: Tensor,
    correction_bias: Tensor | None,
    routing: Routing,
    counts: Tensor,
    bias: Tensor | None = None,
) -> Routed:
    """The experts of tokens x [T, H].

    Args:
        weight: [E, H] of x's dtype.
        correction_bias: [E] float32.
        counts: of `new_counts`.
        bias: [E] of x's dtype, of the logits (gpt-oss).
    """
    if not use_triton(x):
        if routing.float32_logits:
            logits = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        else:
            logits = F.linear(x, weight, bias)
        return route_ref(logits, correction_bias, routing)
    (tokens, hidden), groups = x.shape, routing.groups[0]
    few = min(tokens, MAX_DECODE_TOKENS) if routing.fixed_order else tokens
    sm90 = choose_router_sm90(
        few, hidden, routing.num_experts, routing.top_k, groups, x.dtype, gpu_of(x.device)
    )
    if sm90 is not None:
        return route_sm90(x, weight, correction_bias, routing, counts, sm90, bias)
    partials = router_partials(x, weight, routing.fixed_order)
    if bias is not None:
        partials[0] += bias
    rounded_like = None if routing.float32_logits else weight
    return top_k(partials, correction_bias, routing, counts, rounded_like)


def router_partials(x: Tensor, weight: Tensor, fixed_order: bool = False) -> Tensor:
    """Split-K partials of x [T, H] weightᵀ, float32 [S, T, E]; S depends on H alone.

    `fixed_order`: of any number of tokens by the same instructions.
    """
    (tokens, hidden), experts = x.shape, weight.shape[0]
    width = router_slice(hidden)
    slices = -(-hidden // width)
    tile = choose_router_tile(tokens, experts, gpu_of(x.device), x.itemsize, fixed_order)
    assert x.is_contiguous() and weight.is_contiguous() and hidden % 8 == 0
    partials = torch.empty(slices, tokens, experts, dtype=torch.float32, device=x.device)
    _router_logits[(-(-experts // tile.block_n), -(-tokens // tile.block_m), slices)](
        x, weight, partials, tokens, experts, hidden // 8,
        SLICE=width, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        EVEN_K=hidden % tile.block_k == 0, PREFETCH=hidden % 64 == 0,
        NUM_THREADS=32 * tile.num_warps,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **pdl_options(x),
    )  # fmt: skip
    return partials


def top_k(
    partials: Tensor,
    correction_bias: Tensor | None,
    routing: Routing,
    counts: Tensor,
    rounded_like: Tensor | None = None,
) -> Routed:
    """Split-K partials of the logits [S, T, E] -> experts, weights and tiles.

    `rounded_like`: logits are rounded to this tensor's dtype first.
    """
    slices, tokens, num_experts = partials.shape
    device, (num_groups, kept) = partials.device, routing.groups
    shared = routing.num_shared_choices(tokens)
    k, all_experts = routing.top_k + shared, num_experts + shared
    config = choose_moe(tokens, gpu_of(device), fixed_order=routing.fixed_order)
    block_m, in_kernel = config.block_m, tokens <= MAX_DECODE_TOKENS
    weights = torch.empty(tokens, k, dtype=torch.float32, device=device)
    experts = torch.empty(tokens, k, dtype=torch.int32, device=device)
    pairs = tiles = None
    if in_kernel:  # a list of up to `tokens` pairs per expert
        pairs = torch.empty(all_experts * tokens, dtype=torch.int32, device=device)
        most = max_tiles(tokens * k, all_experts, block_m)
        tiles = torch.empty(3, most, dtype=torch.int32, device=device)
    columns = next_power_of_2(num_groups) * next_power_of_2(num_experts // num_groups)
    tokens_per_cta, warps = tokens_of_top_k(tokens, columns)
    _top_k[(-(-tokens // tokens_per_cta),)](
        partials, correction_bias, rounded_like, weights, experts, counts, pairs, tiles,
        tokens, 0 if tiles is None else tiles.shape[1], routing.routed_scaling_factor, NORM_EPS,
        SLICES=slices, NUM_EXPERTS=num_experts, NUM_GROUPS=num_groups, KEPT_GROUPS=kept,
        GROUPS_BLOCK=next_power_of_2(num_groups),
        GROUP_BLOCK=next_power_of_2(num_experts // num_groups),
        EXPERTS_BLOCK=next_power_of_2(num_experts), TOP_K=routing.top_k, NUM_SHARED=shared,
        CHOICES_BLOCK=next_power_of_2(k), SIGMOID=routing.scoring == "sigmoid",
        TOP2=routing.group_score == "top2", NORM=routing.norm_topk_prob,
        ALIGN=in_kernel, ONE_CTA=tokens <= tokens_per_cta, BLOCK_M=block_m, TOKENS=tokens_per_cta,
        num_warps=warps, **pdl_options(weights),
    )  # fmt: skip
    if pairs is None or tiles is None:
        made = align(experts, all_experts, block_m)
    else:
        made = ExpertTiles(pairs, tiles, block_m, counts[num_experts + 1 :])
    return Routed(weights, experts, made, shared, fixed_order=routing.fixed_order)


def tokens_of_top_k(tokens: int, columns: int) -> tuple[int, int]:
    """Tokens of a CTA of `_top_k`, and its warps. `columns`: experts, padded."""
    if tokens > MAX_DECODE_TOKENS:
        return MANY_TOKENS, WARPS
    most = min(ONE_CTA_TOKENS, ONE_CTA_SCORES // columns)
    if tokens <= TOKENS or tokens > most:
        return TOKENS, WARPS
    block = next_power_of_2(tokens)
    return block, block


@jit_no_specialize("T")
def _router_logits(
    x,  # [T, K]
    w,  # [E, K]
    partials,  # [slices, T, E] float32
    T,
    E,
    k_vectors,  # K / 8
    SLICE: tl.constexpr,  # columns of a slice, a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    NUM_THREADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One CTA per tile of experts, tile of tokens and slice."""
    K = k_vectors * 8  # so that the compiler knows of the 8
    tile_n, tile_m, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = part * SLICE
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH:
            count = tl.minimum(K - first, SLICE)
            prefetch_weight(w, tile_n, first, count, E, K, BLOCK_N, False, NUM_THREADS)
        tl.extra.cuda.gdc_wait()
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = first + tl.arange(0, BLOCK_K)
    m_mask = m[:, None] < T
    x_tile = x + m[:, None].to(tl.int64) * K + k[None, :]
    w_tile = w + tl.minimum(n, E - 1)[:, None] * K + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in range(tl.cdiv(tl.minimum(K - first, SLICE), BLOCK_K)):
        offset = i * BLOCK_K
        if EVEN_K:
            xs = tl.load(x_tile + offset, mask=m_mask, other=0.0)
            ws = tl.load(w_tile + offset)
        else:
            k_mask = (k + offset)[None, :] < K
            xs = tl.load(x_tile + offset, mask=m_mask & k_mask, other=0.0)
            ws = tl.load(w_tile + offset, mask=k_mask, other=0.0)
        acc = tl.dot(xs, tl.trans(ws), acc, input_precision="ieee")
    address = partials + (part * T + m[:, None]).to(tl.int64) * E + n[None, :]
    tl.store(address, acc, mask=m_mask & (n[None, :] < E))


@jit_no_specialize("T", "max_tiles")
def _top_k(
    partials,  # [SLICES, T, E] float32
    correction_bias,  # [E] float32 or None
    rounded_like,  # anything of the dtype that logits are rounded to, or None
    weights_out,  # [T, k + shared] float32
    experts_out,  # [T, k + shared] int32
    counts,  # int32, E + 1 of which are zero before and after
    pairs,  # [E + shared, T] int32, with ALIGN
    tiles,  # [3, max_tiles] int32, with ALIGN
    T,
    max_tiles,
    factor,
    norm_eps,
    SLICES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    CHOICES_BLOCK: tl.constexpr,
    SIGMOID: tl.constexpr,
    TOP2: tl.constexpr,
    NORM: tl.constexpr,
    ALIGN: tl.constexpr,
    ONE_CTA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One CTA per TOKENS tokens. ONE_CTA: there are no more."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    GROUP_SIZE: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    COLUMNS: tl.constexpr = GROUPS_BLOCK * GROUP_BLOCK
    CHOICES: tl.constexpr = TOP_K + NUM_SHARED
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    # Groups are padded to a power of two each, so columns are in the order of expert ids.
    column = tl.arange(0, COLUMNS)
    group, member = column // GROUP_BLOCK, column % GROUP_BLOCK
    valid = (group < NUM_GROUPS) & (member < GROUP_SIZE)
    expert = tl.where(valid, group * GROUP_SIZE + member, 0)
    mask = (t < T)[:, None] & valid[None, :]
    address = partials + t[:, None].to(tl.int64) * NUM_EXPERTS + expert[None, :]
    logits = tl.load(address, mask=mask, other=0.0)
    for part in tl.static_range(1, SLICES):
        stride = (part * T).to(tl.int64) * NUM_EXPERTS
        logits += tl.load(address + stride, mask=mask, other=0.0)
    if rounded_like is not None:
        logits = logits.to(rounded_like.dtype.element_ty).to(tl.float32)
    if SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        logits = tl.where(valid[None, :], logits, float("-inf"))
        scores = tl.exp(logits - tl.max(logits, 1)[:, None])
        scores = scores / sum_pairs(tl.reshape(scores, (TOKENS, 1, COLUMNS)), TOKENS, 1, COLUMNS)
    choice = scores
    if correction_bias is not None:
        choice += tl.load(correction_bias + expert, mask=valid, other=0.0)[None, :]
    # A token with NaN still gets k different experts; its weights are NaN.
    choice = tl.where(choice == choice, choice, -1e30)
    choice = tl.where(valid[None, :], choice, float("-inf"))
    if NUM_GROUPS > 1:
        choice = _best_groups(choice, TOKENS, GROUPS_BLOCK, GROUP_BLOCK, KEPT_GROUPS, TOP2)

    rank = tl.arange(0, CHOICES_BLOCK)[None, :]
    weights = tl.zeros((TOKENS, CHOICES_BLOCK), tl.float32)
    experts = tl.zeros((TOKENS, CHOICES_BLOCK), tl.int32)
    ranks = tl.full((TOKENS, COLUMNS), -1, tl.int32)  # by expert: which choice it is
    for i in tl.static_range(TOP_K):
        best, chosen = tl.max(choice, 1, return_indices=True)  # the lowest of equals
        hit = column[None, :] == chosen[:, None]
        if correction_bias is not None:
            weight = tl.sum(tl.where(hit, scores, 0.0), 1)
        else:
            weight = tl.where(best == -1e30, float("nan"), best)
        weights = tl.where(rank == i, weight[:, None], weights)
        id = chosen // GROUP_BLOCK * GROUP_SIZE + chosen % GROUP_BLOCK
        experts = tl.where(rank == i, id[:, None], experts)
        ranks = tl.where(hit, i, ranks)
        choice = tl.where(hit, float("-inf"), choice)
    if NORM:
        total = sum_pairs(tl.reshape(weights, (TOKENS, 1, CHOICES_BLOCK)), TOKENS, 1, CHOICES_BLOCK)
        weights = weights / (total + norm_eps)
    weights *= factor
    if NUM_SHARED > 0:
        weights = tl.where(rank < TOP_K, weights, 1.0)
        experts = tl.where(rank < TOP_K, experts, NUM_EXPERTS + rank - TOP_K)
    pair = t[:, None] * CHOICES + rank
    mask = (t < T)[:, None] & (rank < CHOICES)
    tl.store(weights_out + pair, weights, mask=mask)
    tl.store(experts_out + pair, experts, mask=mask)
    if ALIGN and NUM_SHARED > 0:
        tl.store(pairs + experts * T + t[:, None], pair, mask=mask & (rank >= TOP_K))
    if ALIGN and ONE_CTA:
        chosen_by = ((ranks >= 0) & (t < T)[:, None]).to(tl.int32)
        place = tl.cumsum(chosen_by, 0) - chosen_by
        address = pairs + expert[None, :] * T + place
        tl.store(address, t[:, None] * CHOICES + ranks, mask=chosen_by > 0)
        used = _make_tiles(tl.sum(chosen_by, 0), expert, tiles, T, max_tiles, BLOCK_M)
        _make_further_tiles(used, tiles, T, max_tiles, NUM_EXPERTS, NUM_SHARED, BLOCK_M, COLUMNS)
    elif ALIGN:
        routed = mask & (rank < TOP_K)
        place = tl.atomic_add(counts + experts, 1, mask=routed, sem="relaxed")
        tl.store(pairs + experts * T + place, pair, mask=routed)
        tl.debug_barrier()  # all pairs are counted before the CTA signals
        done = tl.atomic_add(counts + NUM_EXPERTS, 1, sem="acq_rel")
        if done == tl.num_programs(0) - 1:
            each = tl.arange(0, EXPERTS_BLOCK)
            inside = each < NUM_EXPERTS
            # L1 is bypassed.
            count = tl.load(counts + each, mask=inside, other=0, cache_modifier=".cg")
            used = _make_tiles(count, each, tiles, T, max_tiles, BLOCK_M)
            _make_further_tiles(
                used, tiles, T, max_tiles, NUM_EXPERTS, NUM_SHARED, BLOCK_M, EXPERTS_BLOCK
            )
            tl.debug_barrier()  # the counts have been read by all threads
            tl.store(counts + each, 0, mask=inside)
            tl.store(counts + NUM_EXPERTS, 0)


@jit
def _best_groups(
    choice, TOKENS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr,
    TOP2: tl.constexpr,
):  # fmt: skip
    """`choice` [TOKENS, GROUPS * SIZE] with -inf in all but each token's best groups."""
    grouped = tl.reshape(choice, (TOKENS, GROUPS, SIZE))
    best = tl.max(grouped, 2)
    if TOP2:
        first = tl.argmax(grouped, 2)[:, :, None]
        member = tl.arange(0, SIZE)[None, None, :]
        best += tl.max(tl.where(member == first, float("-inf"), grouped), 2)
    group = tl.arange(0, GROUPS)[None, :]
    kept = tl.zeros((TOKENS, GROUPS), tl.int32)
    for _ in tl.static_range(KEPT):
        hit = group == tl.argmax(best, 1)[:, None]
        kept = tl.where(hit, 1, kept)
        best = tl.where(hit, float("-inf"), best)
    grouped = tl.where(kept[:, :, None] == 1, grouped, float("-inf"))
    return tl.reshape(grouped, (TOKENS, GROUPS * SIZE))


@jit
def _make_tiles(count, expert, tiles, T, max_tiles, BLOCK_M: tl.constexpr):
    """Cuts the lists of routed experts, in order of their ids, into tiles; returns how many."""
    num_tiles = tl.cdiv(count, BLOCK_M)
    before = tl.cumsum(num_tiles, 0) - num_tiles
    for i in range(tl.max(num_tiles, 0)):
        mask = i < num_tiles
        tile = tiles + before + i
        tl.store(tile, expert, mask=mask)
        tl.store(tile + max_tiles, expert * T + i * BLOCK_M, mask=mask)
        rows = tl.minimum(count - i * BLOCK_M, BLOCK_M)
        tl.store(tile + 2 * max_tiles, rows, mask=mask)
    return tl.sum(num_tiles, 0)


@jit
def _make_further_tiles(
    used, tiles, T, max_tiles, NUM_EXPERTS: tl.constexpr, NUM_SHARED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The tiles after those of the routed experts: the shared experts', then empty ones."""
    each = tl.arange(0, BLOCK)
    if NUM_SHARED > 0:
        per_expert = tl.cdiv(T, BLOCK_M)
        for first in range(0, NUM_SHARED * per_expert, BLOCK):
            i = first + each
            mask = i < NUM_SHARED * per_expert
            expert, start = NUM_EXPERTS + i // per_expert, i % per_expert * BLOCK_M
            tile = tiles + used + i
            tl.store(tile, expert, mask=mask)
            tl.store(tile + max_tiles, expert * T + start, mask=mask)
            tl.store(tile + 2 * max_tiles, tl.minimum(T - start, BLOCK_M), mask=mask)
        used += NUM_SHARED * per_expert
    for first in range(0, max_tiles - used, BLOCK):
        rest = used + first + each
        tl.store(tiles + 2 * max_tiles + rest, 0, mask=rest < max_tiles)
