"""Launches absorbed MLA attention for Hopper (`mla_sm90.cu`), compiled by NVRTC.

The schedule is that of FlashMLA ("A Deep-Dive Into the New Flash MLA Kernel", DeepSeek, 2025). A
CTA has 64 query rows and takes blocks of 64 positions in pairs: q and both blocks, 72 KB each, stay
in shared memory. The [64, 512] accumulators fill the registers of two consumer warpgroups, 256
columns each, so neither could keep a second tile. Instead each warpgroup computes the scores of one
block of the pair, and its half of the output for both blocks. They exchange weights (where a
block's rope values were) and row maxima through shared memory: while one computes a softmax, the
tensor cores work for the other. A producer thread loads a block in 9 chunks of 64 columns, each
with an mbarrier, and loads the next block's chunks as soon as those of the last one have been read.

Where a request has an even number of tiles, two of them form a cluster: each CTA loads half of the
chunks and multicasts them to both. Otherwise a CTA reads 72 KB in about 2,200 cycles, which is what
the L2 cache delivers when all SMs read at once.

Triton's warpgroups cannot compute different blocks, and it has no multicast.
benchmarks/results/2026-11-kernels.md has the measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from forerun.kernels.attention.tiles import SM90_LATENT_PAGE as PAGE
from forerun.kernels.attention.tiles import SM90_LATENT_ROWS as TILE_ROWS
from forerun.kernels.attention.tiles import SM90_PREFILL_ROWS
from forerun.kernels.runtime import nvrtc

SOURCE = Path(__file__).with_name("mla_sm90.cu")
NUM_THREADS = 384
UNLIMITED = (1 << 31) - 1  # window
# q and two blocks of 64 rows of 576 values, row maxima and sums, 31 mbarriers, and the alignment to
# 1,024 bytes.
SMEM_BYTES = 3 * 64 * 576 * 2 + 4 * 64 * 4 + 31 * 8 + 1024


@dataclass(frozen=True)
class MlaArguments:
    """Operands of one launch: T tokens with H heads, B requests."""

    q: Tensor  # [T, H, 576] bfloat16, any strides
    pool: Tensor  # [pages, 64, 576] bfloat16
    page_table: Tensor  # [B, n] int32
    start: Tensor  # [B] int32, position of each request's first query token
    out: Tensor  # [T, H, 512] bfloat16; num_splits > 1: [T, H * 4, num_splits, 128] float32
    scale: float  # of the scores, times log2(e)
    q_len: int = 0  # tokens of every request; 0: as in the tile map
    num_splits: int = 1
    lse: Tensor | None = None  # num_splits > 1: [T, H * 4, num_splits] float32, log2
    causal: bool = True  # else all tokens of a request see each other
    window: int | None = None
    # [T, 1] int64, instead of causal: bit j: sees token j of its request
    tree: Tensor | None = None
    tile_map: Tensor | None = None  # `TileMap.entries` of `SM90_PREFILL_ROWS` rows; no splits


def cuda_source(cluster_size: int) -> str:
    """`mla_sm90.cu` with the macro it needs in front, ready to compile.

    Args:
        cluster_size: row tiles that share latent blocks by multicast, 1 or 2.
    """
    return nvrtc.with_macros(SOURCE, {"CLUSTER_SIZE": cluster_size})


def launch(args: MlaArguments) -> None:
    """Runs the attention, or its splits."""
    heads, num_requests = args.q.shape[1], args.start.shape[0]
    if args.tile_map is None:
        row_tiles = -(-heads * args.q_len // TILE_ROWS)
        num_ctas = num_requests * args.num_splits * row_tiles
    else:
        row_tiles = SM90_PREFILL_ROWS // TILE_ROWS
        num_ctas = args.tile_map.shape[0] * row_tiles
        assert args.num_splits == 1 and args.tree is None
    assert args.pool.shape[1] == PAGE and args.pool.stride(2) == 1
    q = args.q.contiguous()  # rows (token, head) at one stride
    window = UNLIMITED if args.window is None or args.tree is not None else args.window
    nvrtc.launch(
        _load_kernel(q.device, 2 if row_tiles % 2 == 0 else 1),
        num_ctas,
        NUM_THREADS,
        (
            nvrtc.tma_descriptor(q.flatten(0, 1), (TILE_ROWS, 64)),
            nvrtc.tma_descriptor(args.pool, (1, PAGE, 64)),
            args.out, args.lse, args.page_table, args.start, args.tile_map, args.tree, args.scale,
            heads, args.q_len, int(args.causal and args.tree is None), window,
            args.page_table.stride(0), row_tiles, args.num_splits,
        ),
        q.device,
    )  # fmt: skip


_load_kernel = nvrtc.loader("mla_sm90_kernel", cuda_source, SMEM_BYTES)
