"""Launches the prefill attention for Hopper (`prefill_sm90.cu`), compiled by NVRTC.

The design is FlashAttention-3's (Shah et al. 2024, arXiv 2407.08608, section 3). A tile has 64 rows
per consumer warpgroup; a row is a token with one of the query heads that share a K/V head. A
producer warp loads Q and blocks of K and V by TMA into multi-stage SMEM pipelines; the consumers
multiply them with wgmma. Tensor cores and softmax overlap in two ways:

- The warpgroups take turns (named barriers): while one computes its softmax, another has the tensor
  cores.
- Within a warpgroup Q Kᵀ of a block is issued before P V of the block before it, so that P V runs
  during the softmax.

Triton 3.6 does neither for this loop, and issues loads from the warps that compute.

CTAs are persistent: they take tiles from `TileMap.next_work`, so the next tile's Q, K and V are
loaded while a tile ends. Blocks are computed from the last to the first, and only those that the
diagonal, the window or the end of the request crosses are masked.

Paged K/V: a box of a TMA load lies within a page, so that a block is loaded with BLOCK_N /
gcd(BLOCK_N, page size) boxes, one for each lane of the producer warp. K/V outside the request may
be NaN, which survives a weight of 0: V's rows there are zeroed in shared memory.

A row's result depends on its request alone (on its position in a tile and on `num_splits` too, in
rounding), not on the others in the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.kernels.attention.decode import CAUSAL, LOG2E, MaskSpec
from forerun.kernels.attention.paged_kv import PagedKV
from forerun.kernels.attention.tile_map import TileMap
from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import GpuInfo, gpu_of

ARCHITECTURE = "sm_90a"
SOURCE = Path(__file__).with_name("prefill_sm90.cu")
MAX_SMEM_BYTES = 227 << 10  # per CTA
TILE_BYTES = 48  # `Tile`, per stage of Q
NO_WINDOW = 1 << 30  # positions
HEAD_DIMS = (64, 128)
ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "f16"}  # q and K/V, as PTX names them


@dataclass(frozen=True)
class Sm90PrefillConfig:
    """The tile of a CTA and its pipelines."""

    block_n: int = 128  # K/V positions, a multiple of 16
    consumer_warpgroups: int = 2  # 64 rows each
    kv_stages: int = 2
    q_stages: int = 1
    persistent: bool = True

    @property
    def block_m(self) -> int:
        """Rows of a tile: tokens times query heads."""
        return 64 * self.consumer_warpgroups


@dataclass(frozen=True)
class Sm90PrefillVariant:
    """What else a kernel is compiled for."""

    head_dim: int
    dtype: torch.dtype
    split_kv: bool = False  # write float32 partial results


@dataclass(frozen=True, eq=False)
class PrefillArguments:
    """What a prefill attention reads and writes."""

    q: Tensor  # [T, Hq, D]
    kv: PagedKV
    tile_map: TileMap
    mask: MaskSpec
    scale: float
    out: Tensor  # [T, Hq, D] in q's dtype; with splits [T, Hq, S, D] float32
    lse: Tensor | None  # with splits [T, Hq, S] float32

    @property
    def group(self) -> int:
        """Query heads that share a K/V head."""
        return self.q.shape[1] // self.kv.num_kv_heads


def box_rows(page_size: int, block_n: int) -> int:
    """K/V rows that a TMA load fetches: the most that never cross a page nor a block."""
    return math.gcd(page_size, block_n)


def why_unfit(
    gpu: GpuInfo, q_dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, page_size: int
) -> str | None:
    """Why `Sm90PrefillConfig()` cannot be used; None: it can."""
    if gpu.amd or gpu.interpreted or gpu.capability != 90:
        return "it is for Hopper (sm_90)"
    if not nvrtc.available():
        return "NVRTC is not installed"
    if q_dtype not in ELEMENTS or kv_dtype != q_dtype:
        return f"it computes in bfloat16 or float16, not {q_dtype} over K/V in {kv_dtype}"
    if head_dim not in HEAD_DIMS:
        return f"the head dim is {head_dim}, not one of {HEAD_DIMS}"
    if box_rows(page_size, Sm90PrefillConfig().block_n) % 8:
        return f"a page of {page_size} tokens does not consist of whole swizzle atoms of 8"
    return None


def smem_bytes(config: Sm90PrefillConfig, head_dim: int) -> int:
    """Dynamic shared memory per CTA: Q, K and V, their mbarriers, and alignment to 1,024 bytes."""
    q_stage = config.block_m * head_dim * 2 + TILE_BYTES + 16
    kv_stage = 2 * (config.block_n * head_dim * 2 + 16)
    return config.q_stages * q_stage + config.kv_stages * kv_stage + 1024


def cuda_source(config: Sm90PrefillConfig, variant: Sm90PrefillVariant) -> str:
    """`prefill_sm90.cu` with its configuration as macros in front, ready to compile."""
    element = ELEMENTS[variant.dtype]
    macros = {
        "HEAD_DIM": variant.head_dim,
        "BLOCK_N": config.block_n,
        "CONSUMER_WARPGROUPS": config.consumer_warpgroups,
        "KV_STAGES": config.kv_stages,
        "Q_STAGES": config.q_stages,
        "PERSISTENT": int(config.persistent),
        "SPLIT_KV": int(variant.split_kv),
        "CONVERT": f'"cvt.rn.{element}x2.f32"',
        "ELEMENTS": f'".f32.{element}.{element}"',
        **_wgmma_macros(config.block_n, variant.head_dim),
    }
    defines = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    return f'{defines}#line 1 "{SOURCE.name}"\n{SOURCE.read_text(encoding="utf-8")}'


def _wgmma_macros(block_n: int, head_dim: int) -> dict[str, str]:
    """The operands of wgmma m64nNk16 as asm text: N / 2 accumulators per thread, then A and B.

    A of the first product is in shared memory, that of the second in four registers.
    """
    s, o = block_n // 2, head_dim // 2
    return {
        "S_SHAPE": f'"m64n{block_n}k16"',
        "S_REGISTERS": f'"{_operands(0, s)}"',
        "S_A": f'"%{s}"',
        "S_B": f'"%{s + 1}"',
        "S_OUTPUTS": ", ".join(f'"=f"(s[{i}])' for i in range(s)),
        "S_ACCUMULATORS": ", ".join(f'"+f"(s[{i}])' for i in range(s)),
        "O_SHAPE": f'"m64n{head_dim}k16"',
        "O_REGISTERS": f'"{_operands(0, o)}"',
        "O_A": f'"{_operands(o, 4)}"',
        "O_B": f'"%{o + 4}"',
        "O_ACCUMULATORS": ", ".join(f'"+f"(o[{i}])' for i in range(o)),
    }


def _operands(first: int, count: int) -> str:
    return ", ".join(f"%{i}" for i in range(first, first + count))


def launch(config: Sm90PrefillConfig, args: PrefillArguments) -> None:
    """Runs one attention."""
    q, kv, tiles = args.q, args.kv, args.tile_map
    device, head_dim = q.device, q.shape[2]
    tile_tokens, kv_box = tiles.tokens_per_tile, box_rows(kv.page_size, config.block_n)
    assert kv_box % 8 == 0 and config.block_n // kv_box <= 32
    num_work = tiles.entries.shape[0] * tiles.num_splits * kv.num_kv_heads
    gpu = gpu_of(device)
    nvrtc.launch(
        _load_kernel(config, Sm90PrefillVariant(head_dim, q.dtype, args.lse is not None), device),
        min(num_work, gpu.num_sms) if config.persistent else num_work,
        128 * (1 + config.consumer_warpgroups),
        (
            nvrtc.tma_descriptor(_aligned(q), (tile_tokens, args.group, 64)),
            _kv_descriptor(kv.k, kv_box),
            _kv_descriptor(kv.v, kv_box),
            args.out, args.lse, kv.page_table, kv.start, tiles.entries, tiles.next_work,
            args.scale * LOG2E, kv.page_table.stride(0), kv.page_size, kv_box,
            kv.num_kv_heads, args.group, tile_tokens, tiles.num_splits, num_work,
            int(args.mask.mask == CAUSAL),
            NO_WINDOW if args.mask.window is None else args.mask.window,
        ),
        device,
    )  # fmt: skip


def _aligned(q: Tensor) -> Tensor:
    """`q`, or a copy where TMA cannot read it: it needs rows aligned to 16 bytes."""
    fits = q.stride(2) == 1 and q.stride(1) % 8 == 0 and q.stride(0) % 8 == 0
    return q if fits and q.data_ptr() % 16 == 0 else q.clone(memory_format=torch.contiguous_format)


def _kv_descriptor(pool: Tensor, rows: int) -> Any:
    """Of a pool [pages, P, Hkv, D] as the matrix [slots, Hkv * D]."""
    return nvrtc.tma_descriptor(pool.view(-1, pool.shape[2] * pool.shape[3]), (rows, 64))


@cache
def _load_kernel(
    config: Sm90PrefillConfig, variant: Sm90PrefillVariant, device: torch.device
) -> nvrtc.CudaKernel:
    source, smem = cuda_source(config, variant), smem_bytes(config, variant.head_dim)
    return nvrtc.load_kernel(source, "prefill_sm90_kernel", ARCHITECTURE, smem, device)
