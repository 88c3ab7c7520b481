# mypy: allow-untyped-defs, allow-incomplete-defs
"""The experts' tiles of many tokens on a GPU (in SGLang, vLLM: moe_align_block_size). Two kernels.

The pairs, in order of their index, are cut into chunks, one per CTA:

1. `_count_pairs`: pairs of each expert in each chunk;
2. `_place_pairs`: every CTA adds up the counts of the chunks before its own and of the experts
   before each expert, and writes its pairs to their places. The CTAs share out the tiles, too.

Nothing is added atomically: the order within a list is that of the pairs, in every run. Both
kernels compare a block of pairs with all experts; such a block [BLOCK, COLUMNS] is in registers.

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

MAX_CHUNKS = 128  # every CTA of `_place_pairs` reads the counts of all chunks
TILES = 8  # that a CTA makes at a time
SELECTED_BLOCK, SELECTED_WARPS = 512, 4  # of `_select_tiles`; tiles that it reads at a time


def align(experts: Tensor, num_experts: int, block_m: int) -> ExpertTiles:
    """What `align_ref` returns for experts [T, k] int32, T >= 1, bit for bit."""
    assert experts.is_contiguous() and experts.dtype == torch.int32
    num_pairs, columns = experts.numel(), next_power_of_2(num_experts)
    options, count_options = options_of_align(columns)
    block = options["BLOCK"]
    size = -(-num_pairs // (block * MAX_CHUNKS)) * block  # of a chunk
    chunks = -(-num_pairs // size)
    most = max_tiles(num_pairs, num_experts, block_m)
    counts = experts.new_empty(chunks, num_experts)
    pairs, tiles = experts.new_empty(num_pairs), experts.new_empty(3, most)
    pdl = pdl_options(experts)
    _count_pairs[(chunks,)](experts, counts, num_pairs, num_experts, size, **count_options, **pdl)
    _place_pairs[(chunks,)](
        experts, counts, pairs, tiles, num_pairs, num_experts, size, most,
        BLOCK_M=block_m, TILES=TILES, **options, **pdl,
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


def options_of_align(columns: int) -> tuple[dict[str, int], dict[str, int]]:
    """Options of `_place_pairs` and `_count_pairs`. `columns`: experts, padded to a power of two.

    In `_place_pairs` a thread has whole columns of a block where it can, so that the rank of a pair
    in its list needs no other thread. `_count_pairs` has 32 elements of a block per thread.
    """
    place = {"BLOCK": 32 if columns <= 256 else 16, "num_warps": max(1, min(8, columns // 32))}
    block = min(128, 16384 // columns)
    count = {"BLOCK": block, "num_warps": max(1, block * columns // 1024)}
    return {"COLUMNS": columns, **place}, {"COLUMNS": columns, **count}


@jit_no_specialize("num_pairs", "num_experts", "size")
def _count_pairs(
    experts,  # [num_pairs] int32
    counts,  # [chunks, num_experts] int32
    num_pairs,
    num_experts,
    size,  # pairs of a chunk
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One CTA per chunk."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk, expert = tl.program_id(0), tl.arange(0, COLUMNS)
    count = tl.zeros((BLOCK, COLUMNS), tl.int32)
    for first in range(0, size, BLOCK):
        i = first + tl.arange(0, BLOCK)
        pair = chunk * size + i
        chosen = tl.load(experts + pair, mask=(i < size) & (pair < num_pairs), other=-1)
        count += (chosen[:, None] == expert[None, :]).to(tl.int32)
    address = counts + chunk * num_experts + expert
    tl.store(address, tl.sum(count, 0), mask=expert < num_experts)


@jit_no_specialize("num_pairs", "num_experts", "size", "max_tiles")
def _place_pairs(
    experts,  # [num_pairs] int32
    counts,  # [chunks, num_experts] int32
    pairs,  # [num_pairs] int32
    tiles,  # [3, max_tiles] int32
    num_pairs,
    num_experts,
    size,  # pairs of a chunk, a multiple of BLOCK
    max_tiles,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One CTA per chunk."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    row, expert = tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    count = tl.zeros((COLUMNS,), tl.int32)  # in all chunks
    before = tl.zeros((COLUMNS,), tl.int32)  # in earlier ones
    for first in tl.range(0, chunks, BLOCK, num_stages=3):
        each = (first + row)[:, None]
        mask = (each < chunks) & (expert < num_experts)[None, :]
        part = tl.load(counts + each * num_experts + expert[None, :], mask=mask, other=0)
        count += tl.sum(part, 0)
        before += tl.sum(tl.where(each < chunk, part, 0), 0)
    start = tl.cumsum(count, 0) - count  # of each expert's list

    place = start + before - 1  # of the pair before the next one
    for first in tl.range(0, size, BLOCK, num_stages=3):
        pair = chunk * size + first + row
        chosen = tl.load(experts + pair, mask=pair < num_pairs, other=-1)
        hit = (chosen[:, None] == expert[None, :]).to(tl.int32)
        at = place[None, :] + tl.cumsum(hit, 0)
        tl.store(pairs + at, pair[:, None], mask=hit > 0)
        place += tl.sum(hit, 0)

    num_tiles = tl.cdiv(count, BLOCK_M)
    first_tile = tl.cumsum(num_tiles, 0) - num_tiles
    # Tiles beyond those in use are the last expert's, without pairs.
    end_tile = tl.where(expert == num_experts - 1, max_tiles, first_tile + num_tiles)
    for begin in range(chunk * TILES, max_tiles, chunks * TILES):
        tile = begin + tl.arange(0, TILES)
        of = (tile[:, None] >= first_tile[None, :]) & (tile[:, None] < end_tile[None, :])
        offset = (tile[:, None] - first_tile[None, :]) * BLOCK_M  # in the expert's list
        rows = tl.minimum(tl.maximum(count[None, :] - offset, 0), BLOCK_M)
        address, mask = tiles + tile, tile < max_tiles
        tl.store(address, _only(expert[None, :], of), mask=mask)
        tl.store(address + max_tiles, _only(start[None, :] + offset, of), mask=mask)
        tl.store(address + 2 * max_tiles, _only(rows, of), mask=mask)


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
def _only(values, mask):
    """Returns of each row the one value whose mask is set."""
    return tl.sum(tl.where(mask, values, 0), 1)
