# mypy: allow-untyped-defs, allow-incomplete-defs
"""The experts' tiles of many tokens on a GPU, in three kernels (SGLang: moe_align_block_size).

The pairs, in order of their index, are cut into chunks of 64:

1. `_count_pairs`: pairs of each expert in each chunk;
2. `_sum_chunks`: of each expert, those in the chunks before, and in all;
3. `_place_pairs`: a pair's place in its expert's list is the number of the expert's pairs in the
   chunks before, and before it in its own. The CTAs share out the tiles, too.

Nothing is added atomically: the order within a list is that of the pairs, in every run. A chunk has
a CTA of its own, which holds its pairs in registers: fewer CTAs that loop over blocks of pairs have
too few warps per SM to hide the latency.

With expert parallelism, every rank routes all tokens, and `of_experts` keeps the tiles of its own
experts (in vLLM: expert_map).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from forerun.kernels.moe.config import max_tiles
from forerun.kernels.moe.routing import ExpertTiles, Routed, select_tiles_ref
from forerun.kernels.runtime.gpu import next_power_of_2
from forerun.kernels.runtime.jit import jit, jit_no_specialize, tl, use_triton
from forerun.kernels.runtime.pdl import pdl_options

CHUNK = 64  # pairs
SUMMED_EXPERTS, SUMMED_CHUNKS = 8, 256  # of a CTA of `_sum_chunks`: experts, and chunks at a time
LISTS = 128  # experts whose totals `_place_pairs` adds up at a time
TILES = 8  # that a CTA makes at a time
SELECTED_BLOCK, SELECTED_WARPS = 512, 4  # of `_select_tiles`; tiles that it reads at a time


def align(experts: Tensor, num_experts: int, block_m: int) -> ExpertTiles:
    """What `align_ref` returns for experts [T, k] int32, T >= 1, bit for bit."""
    assert experts.is_contiguous() and experts.dtype == torch.int32
    num_pairs, columns = experts.numel(), next_power_of_2(num_experts)
    chunks, most = -(-num_pairs // CHUNK), max_tiles(num_pairs, num_experts, block_m)
    counts, totals = experts.new_empty(chunks, num_experts), experts.new_empty(num_experts)
    pairs, tiles = experts.new_empty(num_pairs), experts.new_empty(3, most)
    count, total, place = options_of_align(columns)
    pdl = pdl_options(experts)
    _count_pairs[(chunks,)](experts, counts, num_pairs, num_experts, **count, **pdl)
    ctas = -(-num_experts // SUMMED_EXPERTS)
    _sum_chunks[(ctas,)](counts, totals, chunks, num_experts, **total, **pdl)
    _place_pairs[(chunks,)](
        experts, counts, totals, pairs, tiles, num_pairs, num_experts, most,
        BLOCK_M=block_m, **place, **pdl,
    )  # fmt: skip
    return ExpertTiles(pairs, tiles, block_m)


def of_experts(routed: Routed, part: range) -> Routed:
    """Returns the pairs of these experts only, which have ids from 0. No shared experts."""
    assert routed.num_shared == 0
    if routed.tiles is not None:
        return replace(routed, tiles=select_tiles(routed.tiles, part), is_part=True)
    inside = (routed.experts >= part.start) & (routed.experts < part.stop)
    ids = torch.where(inside, routed.experts - part.start, len(part))
    return replace(routed, experts=ids, is_part=True)


def select_tiles(tiles: ExpertTiles, part: range) -> ExpertTiles:
    """The tiles of these experts, under ids from 0 and in order; then tiles without pairs."""
    if not use_triton(tiles.tiles):
        return select_tiles_ref(tiles, part)
    selected = torch.empty_like(tiles.tiles)
    _select_tiles[(1,)](
        tiles.tiles, selected, selected.shape[1], part.start, len(part),
        BLOCK=SELECTED_BLOCK, num_warps=SELECTED_WARPS, **pdl_options(selected),
    )  # fmt: skip
    return replace(tiles, tiles=selected)


def options_of_align(columns: int) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Options of the three kernels. `columns`: experts, padded to a power of two."""
    count = {"num_warps": max(1, min(16, CHUNK * columns // 1024))}
    total = {"EXPERTS": SUMMED_EXPERTS, "CHUNKS": SUMMED_CHUNKS, "num_warps": 4}
    place = {"LISTS": LISTS, "TILES": TILES, "num_warps": 4}
    block = {"COLUMNS": columns, "BLOCK": CHUNK}
    return {**block, **count}, total, {**block, **place}


@jit_no_specialize("num_pairs", "num_experts")
def _count_pairs(
    experts,  # [num_pairs] int32
    counts,  # [chunks, num_experts] int32
    num_pairs,
    num_experts,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One CTA per chunk."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk, expert = tl.program_id(0), tl.arange(0, COLUMNS)
    pair = chunk * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(experts + pair, mask=pair < num_pairs, other=-1)
    count = tl.sum((chosen[:, None] == expert[None, :]).to(tl.int32), 0)
    tl.store(counts + chunk * num_experts + expert, count, mask=expert < num_experts)


@jit_no_specialize("chunks", "num_experts")
def _sum_chunks(
    counts,  # [chunks, num_experts] int32: becomes the sum over the chunks before
    totals,  # [num_experts] int32
    chunks,
    num_experts,
    EXPERTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One CTA per EXPERTS experts."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        mask = (chunk < chunks)[:, None] & (expert < num_experts)[None, :]
        address = counts + chunk[:, None] * num_experts + expert[None, :]
        count = tl.load(address, mask=mask, other=0)
        tl.store(address, total[None, :] + tl.cumsum(count, 0) - count, mask=mask)
        total += tl.sum(count, 0)
    tl.store(totals + expert, total, mask=expert < num_experts)


@jit_no_specialize("num_pairs", "num_experts", "max_tiles")
def _place_pairs(
    experts,  # [num_pairs] int32
    counts,  # [chunks, num_experts] int32, of `_sum_chunks`
    totals,  # [num_experts] int32
    pairs,  # [num_pairs] int32
    tiles,  # [3, max_tiles] int32
    num_pairs,
    num_experts,
    max_tiles,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    LISTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One CTA per chunk."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk, each = tl.program_id(0), tl.arange(0, BLOCK)
    pair = chunk * BLOCK + each
    inside = pair < num_pairs
    chosen = tl.load(experts + pair, mask=inside, other=-1)
    place = tl.load(counts + chunk * num_experts + chosen, mask=inside, other=0)
    earlier = (chosen[:, None] == chosen[None, :]) & (each[None, :] < each[:, None])
    place += tl.sum(earlier.to(tl.int32), 1)
    for first in range(0, num_experts, LISTS):
        expert = first + tl.arange(0, LISTS)
        total = tl.load(totals + expert, mask=expert < num_experts, other=0)
        place += _sum_rows(total[None, :], expert[None, :] < chosen[:, None])
    tl.store(pairs + place, pair, mask=inside)

    if chunk * TILES < max_tiles:
        expert = tl.arange(0, COLUMNS)
        count = tl.load(totals + expert, mask=expert < num_experts, other=0)
        start, num_tiles = tl.cumsum(count, 0) - count, tl.cdiv(count, BLOCK_M)
        first_tile = tl.cumsum(num_tiles, 0) - num_tiles
        # Tiles beyond those in use are the last expert's, without pairs.
        end_tile = tl.where(expert == num_experts - 1, max_tiles, first_tile + num_tiles)
        for begin in range(chunk * TILES, max_tiles, tl.num_programs(0) * TILES):
            tile = begin + tl.arange(0, TILES)
            of = (tile[:, None] >= first_tile[None, :]) & (tile[:, None] < end_tile[None, :])
            offset = (tile[:, None] - first_tile[None, :]) * BLOCK_M  # in the expert's list
            rows = tl.minimum(tl.maximum(count[None, :] - offset, 0), BLOCK_M)
            address, mask = tiles + tile, tile < max_tiles
            tl.store(address, _sum_rows(expert[None, :], of), mask=mask)
            tl.store(address + max_tiles, _sum_rows(start[None, :] + offset, of), mask=mask)
            tl.store(address + 2 * max_tiles, _sum_rows(rows, of), mask=mask)


@jit_no_specialize("max_tiles", "first_expert", "num_experts")
def _select_tiles(
    tiles,  # [3, max_tiles] int32, of all experts
    selected,  # [3, max_tiles] int32
    max_tiles,
    first_expert,
    num_experts,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One CTA."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    used = tl.zeros((), tl.int32)
    for begin in range(0, max_tiles, BLOCK):
        tile = begin + tl.arange(0, BLOCK)
        address, mask = tiles + tile, tile < max_tiles
        expert = tl.load(address, mask=mask, other=0) - first_expert
        first = tl.load(address + max_tiles, mask=mask, other=0)
        rows = tl.load(address + 2 * max_tiles, mask=mask, other=0)
        inside = (rows > 0) & (expert >= 0) & (expert < num_experts)
        place = selected + used + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(place, expert, mask=inside)
        tl.store(place + max_tiles, first, mask=inside)
        tl.store(place + 2 * max_tiles, rows, mask=inside)
        used += tl.sum(inside.to(tl.int32), 0)
    for begin in range(0, max_tiles, BLOCK):
        tile = begin + tl.arange(0, BLOCK)
        address, rest = selected + tile, (tile >= used) & (tile < max_tiles)
        for row in tl.static_range(3):
            tl.store(address + row * max_tiles, tl.zeros((BLOCK,), tl.int32), mask=rest)


@jit
def _sum_rows(values, mask):
    """The sums of each row's values whose mask is set."""
    return tl.sum(tl.where(mask, values, 0), 1)
