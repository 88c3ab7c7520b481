"""Launches the split-KV attention for Hopper (`decode_sm90.cu`), compiled by NVRTC.

For verify steps, where a tile has more than 16 rows (tokens times the query heads that share a K/V
head) and every SM has one CTA. Reading K/V should take all of the time. Two warpgroups take
alternate blocks of 64 positions, each with a softmax of its own, and add up their outputs at the
end. Each has two stages of shared memory and requests its next block by TMA as soon as it has read
one, K before the softmax, V after the second product. In Triton one warpgroup computes all blocks:
for 64 rows that takes about three quarters of the time that an SM's share of the bandwidth takes to
load them, and is hidden in part.

The first blocks are requested before the preceding kernel has ended (PDL); more than three delay
what that kernel reads, and q after it, since an SM gets its data in the order of the requests. The
CTA leaves registers (8 warps of 168) for two CTAs of `combine_splits`, which wait on the SM for its
end: with a ninth warp, for loads, there was no room, since an SM's registers are divided among four
groups of warps.

Splits and partial results are those of `decode.py`, and `combine_splits` adds them up.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from forerun.kernels.attention.paged_kv import PagedKV
from forerun.kernels.runtime import nvrtc

SOURCE = Path(__file__).with_name("decode_sm90.cu")
HEAD_DIM, PAGE, TILE_ROWS = 128, 64, 64
STAGES = 4  # blocks of K and V in shared memory
EARLY_STAGES = 3  # requested before the preceding kernel has finished
KV_POLICY = "EVICT_FIRST"  # K/V is read once a step
NUM_THREADS = 256
UNLIMITED = (1 << 31) - 1  # window
TILE_BYTES = 64 * HEAD_DIM * 2


@dataclass(frozen=True)
class DecodeArguments:
    """Operands of one launch: B requests with `q_len` tokens each."""

    q: Tensor  # [B * q_len, Hq, 128] bfloat16, any strides
    kv: PagedKV  # bfloat16, pages of 64
    partial: Tensor  # [B * q_len, Hq, num_splits, 128] float32
    lse: Tensor  # [B * q_len, Hq, num_splits] float32, log2
    q_len: int
    scale: float  # of the scores, times log2(e)
    causal: bool = True  # else all tokens of a request see each other
    window: int | None = None
    tree: Tensor | None = None  # [B * q_len, 1] int64, instead of causal: bit j: sees token j


def why_unfit(
    q_dtype: torch.dtype, kv_dtype: torch.dtype, dim: int, page: int, group: int
) -> str | None:
    """Why this kernel cannot be used on a Hopper GPU; None: it can."""
    if not nvrtc.available():
        return "it needs NVRTC"
    if q_dtype != torch.bfloat16 or kv_dtype != torch.bfloat16:
        return f"it takes bfloat16, not {q_dtype} over {kv_dtype}"
    if dim != HEAD_DIM:
        return f"the head dim is {dim}, not {HEAD_DIM}"
    if page != PAGE:
        return f"pages have {page} positions, not {PAGE}"
    if TILE_ROWS % group:
        return f"{group} query heads share a K/V head, which does not divide {TILE_ROWS}"
    return None


def smem_bytes() -> int:
    """Dynamic shared memory per CTA: Q, the stages, their mbarriers, alignment to 1,024 bytes."""
    return (1 + 2 * STAGES) * TILE_BYTES + (2 * STAGES + 1) * 8 + 1024


def cuda_source() -> str:
    """`decode_sm90.cu` with its configuration as macros in front, ready to compile."""
    macros: dict[str, int | str] = {
        "STAGES": STAGES,
        "EARLY_STAGES": EARLY_STAGES,
        "KV_POLICY": KV_POLICY,
    }
    return nvrtc.with_macros(SOURCE, macros)


def launch(args: DecodeArguments) -> None:
    """Computes the splits' partial results."""
    kv, heads, num_splits = args.kv, args.q.shape[1], args.lse.shape[2]
    q = nvrtc.aligned_for_tma(args.q)
    group = heads // kv.num_kv_heads
    row_tiles = -(-group * args.q_len // TILE_ROWS)
    causal = args.causal and args.tree is None
    unlimited = args.window is None or args.tree is not None
    nvrtc.launch(
        _load_kernel(q.device),
        kv.num_kv_heads * row_tiles * num_splits * kv.start.shape[0],
        NUM_THREADS,
        (
            nvrtc.tma_descriptor(q, (TILE_ROWS // group, group, 64)),
            nvrtc.tma_descriptor(kv.k.flatten(2), (1, PAGE, 64)),
            nvrtc.tma_descriptor(kv.v.flatten(2), (1, PAGE, 64)),
            args.partial, args.lse, kv.page_table, kv.start, args.tree, args.scale,
            kv.num_kv_heads, group, args.q_len, row_tiles, num_splits, int(causal),
            UNLIMITED if unlimited else args.window, kv.page_table.stride(0),
        ),
        q.device,
    )  # fmt: skip


_load_kernel = nvrtc.loader("decode_sm90_kernel", cuda_source, smem_bytes)
