"""Launches the prefill attention for Hopper (`prefill_sm90.cu`), compiled by NVRTC.

The design is FlashAttention-3's (Shah et al. 2024, arXiv 2407.08608, section 3). A tile has 128
rows, 64 for each of two consumer warpgroups; a row is a token with one of the query heads that
share a K/V head. A producer warp loads Q and blocks of K and V by TMA into SMEM pipelines; the
consumers multiply them with wgmma. Tensor cores and softmax overlap in two ways:

- The warpgroups take turns (named barriers): while one computes its softmax, the other has the
  tensor cores.
- Within a warpgroup Q Kᵀ of a block is issued before P V of the block before it, so that P V runs
  during the softmax.

Triton 3.6 does neither for this loop, and issues loads from the warps that compute.

CTAs are persistent: they take tiles from `TileMap.next_work`, so the next tile's Q, K and V are
loaded while a tile ends. Blocks are computed from the last to the first, and only those that the
diagonal, the window or the end of the request crosses are masked.

Paged K/V: a box of a TMA load lies within a page, so that a block is loaded with BLOCK_N /
gcd(BLOCK_N, page size) boxes, one for each lane of the producer warp. K/V outside the request may
be NaN, which survives a weight of 0: V's rows there are zeroed in shared memory.

A row's result depends on its request alone, not on the others in the batch. With `fixed_order` it
has the bits of `fixed_order.py` (`prefill_fixed_order_sm90.cuh`): blocks are computed from the
first to the last, a block in two steps of the softmax, and segments are folded in registers. The
warpgroups take no turns then.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.kernels.attention.decode import CAUSAL, LOG2E, MaskSpec
from forerun.kernels.attention.paged_kv import PagedKV
from forerun.kernels.attention.tile_map import TileMap
from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import GpuInfo, gpu_of

SOURCE = Path(__file__).with_name("prefill_sm90.cu")
BLOCK_M = 128  # rows of a tile: tokens times query heads, 64 for each consumer warpgroup
BLOCK_N = 128  # positions of a K/V block
KV_STAGES = 2  # blocks of K and of V in shared memory
NUM_THREADS = 128 + 2 * BLOCK_M  # the producer's warpgroup and the consumers'
TILE_BYTES = 48  # `Tile`
NO_WINDOW = 1 << 30  # positions
HEAD_DIMS = (64, 128)
ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "f16"}  # q and K/V, as PTX names them


def box_rows(page_size: int) -> int:
    """K/V rows that a TMA load fetches: the most that never cross a page nor a block."""
    return math.gcd(page_size, BLOCK_N)


def why_unfit(
    gpu: GpuInfo, q_dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, page_size: int
) -> str | None:
    """Why this kernel cannot be used; None: it can."""
    if gpu.amd or gpu.interpreted or gpu.capability != 90:
        return "it is for Hopper (sm_90)"
    return why_unfit_on_hopper(q_dtype, kv_dtype, head_dim, page_size)


def why_unfit_on_hopper(
    q_dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, page_size: int
) -> str | None:
    """The same where the GPU is known to be a Hopper."""
    if not nvrtc.available():
        return "NVRTC is not installed"
    if q_dtype not in ELEMENTS or kv_dtype != q_dtype:
        return f"it computes in bfloat16 or float16, not {q_dtype} over K/V in {kv_dtype}"
    if head_dim not in HEAD_DIMS:
        return f"the head dim is {head_dim}, not one of {HEAD_DIMS}"
    if box_rows(page_size) % 8:
        return f"a page of {page_size} tokens does not consist of whole swizzle atoms of 8"
    return None


def smem_bytes(head_dim: int) -> int:
    """Dynamic shared memory per CTA: Q, K and V, their mbarriers, and alignment to 1,024 bytes."""
    q = BLOCK_M * head_dim * 2 + TILE_BYTES + 16
    return q + 2 * KV_STAGES * (BLOCK_N * head_dim * 2 + 16) + 1024


def cuda_source(head_dim: int, dtype: torch.dtype, fixed_order: bool) -> str:
    """`prefill_sm90.cu` with its configuration as macros in front, ready to compile."""
    element = ELEMENTS[dtype]
    macros: dict[str, int | str] = {
        "HEAD_DIM": head_dim,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "KV_STAGES": KV_STAGES,
        "FIXED_ORDER": int(fixed_order),
        "CONVERT": f'"cvt.rn.{element}x2.f32"',
        "ELEMENTS": f'".f32.{element}.{element}"',
        **_wgmma_macros(head_dim),
    }
    return nvrtc.with_macros(SOURCE, macros)


def _wgmma_macros(head_dim: int) -> dict[str, str]:
    """The operands of wgmma m64nNk16 as asm text: N / 2 accumulators per thread, then A and B.

    A of the first product is in shared memory, that of the second in four registers.
    """
    s, o = BLOCK_N // 2, head_dim // 2
    return {
        "S_SHAPE": f'"m64n{BLOCK_N}k16"',
        "S_REGISTERS": f'"{nvrtc.asm_operands(0, s)}"',
        "S_A": f'"%{s}"',
        "S_B": f'"%{s + 1}"',
        "S_OUTPUTS": nvrtc.asm_accumulators("s", s, "=f"),
        "S_ACCUMULATORS": nvrtc.asm_accumulators("s", s),
        "O_SHAPE": f'"m64n{head_dim}k16"',
        "O_REGISTERS": f'"{nvrtc.asm_operands(0, o)}"',
        "O_A": f'"{nvrtc.asm_operands(o, 4)}"',
        "O_B": f'"%{o + 4}"',
        "O_ACCUMULATORS": nvrtc.asm_accumulators("o", o),
    }


def launch(
    q: Tensor,
    kv: PagedKV,
    tile_map: TileMap,
    mask: MaskSpec,
    scale: float,
    fixed_order: bool = False,
) -> Tensor:
    """`prefill_attention`, or with `fixed_order` `fixed_order_prefill`: [T, Hq, D], contiguous."""
    device, head_dim, heads = q.device, q.shape[2], kv.num_kv_heads
    group, rows = q.shape[1] // heads, box_rows(kv.page_size)
    assert group * tile_map.tokens_per_tile <= BLOCK_M, "a tile has no room for its heads"
    out = torch.empty(q.shape, dtype=q.dtype, device=device)
    num_work = tile_map.entries.shape[0] * heads
    nvrtc.launch(
        _load_kernel(device, head_dim, q.dtype, fixed_order),
        min(num_work, gpu_of(device).num_sms),
        NUM_THREADS,
        (
            nvrtc.tma_descriptor(nvrtc.aligned_for_tma(q), (tile_map.tokens_per_tile, group, 64)),
            _kv_descriptor(kv.k, rows), _kv_descriptor(kv.v, rows),
            out, kv.page_table, kv.start, tile_map.entries, tile_map.next_work,
            scale * LOG2E, kv.page_table.stride(0), kv.page_size, rows,
            heads, group, tile_map.tokens_per_tile, num_work,
            int(mask.mask == CAUSAL), NO_WINDOW if mask.window is None else mask.window,
        ),
        device,
    )  # fmt: skip
    return out


def _kv_descriptor(pool: Tensor, rows: int) -> Any:
    """Describes a pool [pages, P, Hkv, D] as the matrix [slots, Hkv * D]."""
    return nvrtc.tma_descriptor(pool.view(-1, pool.shape[2] * pool.shape[3]), (rows, 64))


_load_kernel = nvrtc.loader(
    "prefill_sm90_kernel",
    cuda_source,
    lambda head_dim, dtype, fixed_order: smem_bytes(head_dim),
)
