"""Launches attention in a fixed order for Hopper (`fixed_order_sm90.cu`), compiled by NVRTC.

It gives the bits of `fixed_order.py`, whose kernels serve what this one does not (trees, windows,
prompts, other head sizes): every product, sum and exponential is the instruction that Triton
chooses there, in the same order. A tile has two warpgroups, which take alternate segments. Each
folds half of the columns of both, from first to last, and gets the other's half through shared
memory. So a CTA takes two segments at a time where Triton's takes one. The CTAs that divide a
context are a cluster: they leave their results in global memory (L2) and fold them there, each for
some of the rows, instead of a second kernel.

Loads are those of `decode_sm90.py`, and so is what is read before the preceding kernel has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from forerun.kernels.attention.decode_sm90 import (
    NUM_THREADS,
    PAGE,
    TILE_BYTES,
    TILE_ROWS,
)
from forerun.kernels.attention.paged_kv import PagedKV
from forerun.kernels.runtime import nvrtc

SOURCE = Path(__file__).with_name("fixed_order_sm90.cu")
STAGES = 4  # blocks of K and V in shared memory
EARLY_STAGES = 3  # requested before the preceding kernel has finished
MAX_CTAS = 8  # of a cluster
EXCHANGE_BYTES = 4 * 9 * 128 * 16  # twice what two warpgroups leave for each other
# Q, the stages, what is exchanged, mbarriers, alignment to 1,024 bytes.
SMEM_BYTES = (1 + 2 * STAGES) * TILE_BYTES + EXCHANGE_BYTES + (2 * STAGES + 1) * 8 + 1024


@dataclass(frozen=True)
class FixedOrderArguments:
    """Operands of one launch: B requests, whose contexts `ctas` CTAs divide."""

    q: Tensor  # [T, Hq, 128] bfloat16, any strides
    kv: PagedKV  # bfloat16, pages of 64
    out: Tensor  # [T, Hq, 128] bfloat16
    partial: Tensor  # of several CTAs [T, Hq, segments, 128] float32
    stats: Tensor  # and [T, Hq, segments, 2] float32
    q_len: int  # tokens per request, or with `kv.rows` at most
    scale: float  # of the scores, times log2(e)
    ctas: int
    segments: int  # that a context may have


def cuda_source(ctas: int) -> str:
    """`fixed_order_sm90.cu` with its configuration as macros in front, ready to compile."""
    macros = {"STAGES": STAGES, "EARLY_STAGES": EARLY_STAGES, "CLUSTER_SIZE": ctas}
    return nvrtc.with_macros(SOURCE, macros)


def row_tiles(group: int, q_len: int) -> int:
    """Tiles of a request's rows; `group`: query heads that share a K/V head."""
    return -(-group * q_len // TILE_ROWS)


def launch(args: FixedOrderArguments) -> None:
    """Fills `out`; with several CTAs by way of `partial` and `stats`."""
    kv, heads = args.kv, args.q.shape[1]
    q = nvrtc.aligned_for_tma(args.q)
    group = heads // kv.num_kv_heads
    tiles = row_tiles(group, args.q_len)
    nvrtc.launch(
        _load_kernel(q.device, args.ctas),
        kv.num_kv_heads * tiles * args.ctas * kv.start.shape[0],
        NUM_THREADS,
        (
            nvrtc.tma_descriptor(q, (TILE_ROWS // group, group, 64)),
            nvrtc.tma_descriptor(kv.k.flatten(2), (1, PAGE, 64)),
            nvrtc.tma_descriptor(kv.v.flatten(2), (1, PAGE, 64)),
            args.out, args.partial, args.stats, kv.page_table, kv.start,
            None if kv.rows is None else kv.rows.first, args.scale, kv.num_kv_heads, group,
            args.q_len, tiles, args.segments, kv.page_table.stride(0),
        ),
        q.device,
    )  # fmt: skip


_load_kernel = nvrtc.loader("fixed_order_sm90_kernel", cuda_source, SMEM_BYTES)
