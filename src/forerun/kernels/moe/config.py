"""Which MoE kernels serve how many tokens, and their tile sizes, by GPU.

A tile is up to BLOCK_M (token, choice) pairs of one expert. Up to `MAX_DECODE_TOKENS` tokens the
time is that of reading the touched experts once: tiles are short, and narrow enough along N that
one token's k experts fill the GPU. With more tokens the tiles are those of a compute-bound GEMM.
On Hopper up to `MAX_DECODE_TOKENS` tokens have kernels of their own: one for the experts
(`choose_moe_sm90`) and one for the router (`choose_router_sm90`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import GpuInfo

MAX_DECODE_TOKENS = 128  # tiles are listed by the routing kernel; beyond, by `align.py`
DECODE_BLOCK_M = 16  # pairs of a tile for them on NVIDIA
FP8_WIDE_SMEM = 148 << 10  # bytes of shared memory that the widest tiles of `choose_moe_fp8` need
ROUTER_SLICES = 8  # at most; the router's K is split into so many parts


@dataclass(frozen=True)
class GroupedGemmConfig:
    """Blocks in elements; `block_n` counts output columns (gate/up reads twice as many rows)."""

    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 4


@dataclass(frozen=True)
class RouterTile:
    """Tokens, experts and columns of a tile of the router's logits."""

    block_m: int
    block_n: int
    block_k: int  # divides 128
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True)
class MoeConfig:
    block_m: int  # pairs per tile
    gate_up: GroupedGemmConfig
    down: GroupedGemmConfig
    tma: bool = False  # reads weights and the rows between the GEMMs by TMA


@dataclass(frozen=True)
class Fp8MoeConfig:
    """A configuration of `experts_fp8.py`, whose tiles of columns are those of a `MoeConfig`."""

    tiles: MoeConfig
    quantize_x: bool  # W8A8: FP8 tensor cores; else W8A16


@dataclass(frozen=True)
class Sm90MoeConfig:
    """The kernel for Hopper (`experts_sm90.py`), with tiles of `DECODE_BLOCK_M` pairs."""

    block_k: int  # columns of a pipeline stage: a multiple of 64 that divides H and I
    num_stages: int  # of the SMEM pipeline
    ctas_per_sm: int  # as many have to fit, in registers and shared memory
    dynamic: bool = False  # CTAs claim work tiles one by one instead of taking fixed ones


# The fastest of those in benchmarks/results/2026-11-kernels.md: up to 4 tokens, and for more.
SM90_FEW_TOKENS = Sm90MoeConfig(block_k=128, num_stages=6, ctas_per_sm=1)
SM90_MAX_FEW_TOKENS = 4
SM90_DECODE = Sm90MoeConfig(block_k=64, num_stages=10, ctas_per_sm=2, dynamic=True)


# The same for weights in e4m3; a stage is a group of columns.
SM90_FP8_ONE_TOKEN = Sm90MoeConfig(block_k=128, num_stages=10, ctas_per_sm=1)
SM90_FP8_DECODE = Sm90MoeConfig(block_k=128, num_stages=6, ctas_per_sm=2, dynamic=True)


@dataclass(frozen=True)
class Sm90Mxfp4Config:
    """The kernel for Hopper of experts in MXFP4 (`experts_mxfp4_sm90.py`)."""

    block_m: int  # most pairs of an expert's tile: 8 or 16
    block_n: int  # rows of W of a work tile: 64 or 96
    num_stages: int  # of the SMEM pipeline


# The fastest of those in benchmarks/results/2026-11-kernels.md: up to 8 tokens, and for more.
SM90_MXFP4_FEW_TOKENS = Sm90Mxfp4Config(block_m=8, block_n=96, num_stages=4)
SM90_MXFP4_FEW_TOKENS_NARROW = Sm90Mxfp4Config(block_m=8, block_n=64, num_stages=6)
SM90_MXFP4_DECODE = Sm90Mxfp4Config(block_m=DECODE_BLOCK_M, block_n=64, num_stages=5)


@dataclass(frozen=True)
class Sm90RouterConfig:
    """The router's kernel for Hopper (`router_sm90.py`), a cluster of `ROUTER_SLICES` CTAs."""

    slice: int  # columns of a CTA
    tiles_per_warp: int  # of 8 experts; 8 warps have all


# The weight is held in registers, at most so many of a thread's 255. Long slices have more loads in
# flight, and ragged ones predicates.
SM90_ROUTER_REGISTERS, SM90_ROUTER_LONG_OR_RAGGED_REGISTERS = 128, 96
SM90_ROUTER_LONG_SLICE = 512
SM90_ROUTER_MAX_GROUPS = 32  # of experts, one to a lane
SM90_ROUTER_TILE = 16  # tokens of one mma.sync


def choose_moe_sm90(
    num_tokens: int, hidden: int, width: int, dtype: torch.dtype, gpu: GpuInfo
) -> Sm90MoeConfig | None:
    """The configuration for experts of this size; None: the Triton kernels serve them."""
    if not _hopper_with_nvrtc(gpu) or dtype != torch.bfloat16 or num_tokens > MAX_DECODE_TOKENS:
        return None
    if hidden % 64 or width % 64:
        return None
    if num_tokens <= SM90_MAX_FEW_TOKENS and hidden % 128 == 0 and width % 128 == 0:
        return SM90_FEW_TOKENS
    return SM90_DECODE


def choose_moe_fp8_sm90(
    num_tokens: int, hidden: int, width: int, dtype: torch.dtype, gpu: GpuInfo
) -> Sm90MoeConfig | None:
    """The same for weights in e4m3, whose columns are interleaved for it."""
    if choose_moe_sm90(num_tokens, hidden, width, dtype, gpu) is None:
        return None
    if hidden % 128 or width % 128:
        return None
    return SM90_FP8_ONE_TOKEN if num_tokens == 1 else SM90_FP8_DECODE


def choose_moe_mxfp4_sm90(
    num_tokens: int, hidden: int, width: int, dtype: torch.dtype, gpu: GpuInfo
) -> Sm90Mxfp4Config | None:
    """The same for weights in MXFP4."""
    if choose_moe_sm90(num_tokens, hidden, width, dtype, gpu) is None:
        return None
    if num_tokens > SM90_MXFP4_FEW_TOKENS.block_m:
        return SM90_MXFP4_DECODE
    wide = SM90_MXFP4_FEW_TOKENS
    return (
        SM90_MXFP4_FEW_TOKENS_NARROW if hidden % wide.block_n or 2 * width % wide.block_n else wide
    )


def choose_router_sm90(
    num_tokens: int,
    hidden: int,
    num_experts: int,
    top_k: int,
    num_groups: int,
    dtype: torch.dtype,
    gpu: GpuInfo,
) -> Sm90RouterConfig | None:
    """The configuration for a router of this size; None: the Triton kernels serve it.

    Which of them it is does not depend on the number of tokens up to `MAX_DECODE_TOKENS`. In a
    fixed order the kernel also serves more, in blocks of so many.
    """
    if not _hopper_with_nvrtc(gpu) or dtype != torch.bfloat16 or num_tokens > MAX_DECODE_TOKENS:
        return None
    config = Sm90RouterConfig(router_slice(hidden), -(-num_experts // 64))
    registers = config.tiles_per_warp * config.slice // 8  # 32 lanes hold 8 experts a tile
    even = hidden == ROUTER_SLICES * config.slice and config.slice <= SM90_ROUTER_LONG_SLICE
    if registers > (SM90_ROUTER_REGISTERS if even else SM90_ROUTER_LONG_OR_RAGGED_REGISTERS):
        return None
    if hidden % 8 or num_groups > SM90_ROUTER_MAX_GROUPS:
        return None
    smem = router_sm90_smem_bytes(MAX_DECODE_TOKENS, num_experts, top_k, config.slice)
    if smem > gpu.smem_bytes - 1024:
        return None
    return config


def router_sm90_smem_bytes(num_tokens: int, num_experts: int, top_k: int, slice: int) -> int:
    """Dynamic shared memory per CTA.

    Partials [slices, tokens of a CTA, E] float32 with E padded to tiles of 8, the tokens of an
    expert [E, 128] bits, choices [T, k] int32. One or two tokens are one CTA's, up to 16 are dealt
    out to 8 CTAs one by one, and more in runs of 4. These also have x in shared memory: tiles of 16
    tokens, [slice + 32] bfloat16 each.
    """
    if num_tokens <= SM90_ROUTER_TILE:
        tokens_per_cta = num_tokens if num_tokens <= 2 else -(-num_tokens // 8)
        x_bytes = 0
    else:
        tokens_per_cta = -(-num_tokens // 32) * 4
        x_bytes = -(-num_tokens // SM90_ROUTER_TILE) * SM90_ROUTER_TILE * (slice + 32) * 2
    partials = ROUTER_SLICES * tokens_per_cta * -(-num_experts // 8) * 8 * 4
    lists = num_experts * MAX_DECODE_TOKENS // 8 + num_tokens * top_k * 4
    return partials + x_bytes + lists


def packs_in_fixed_order(gpu: GpuInfo) -> bool:
    """Whether quantized experts are kept so in a fixed order; elsewhere they are dequantized."""
    return _hopper_with_nvrtc(gpu)


def experts_need_blocks(hidden: int, width: int, plain: bool, gpu: GpuInfo) -> bool:
    """Whether in a fixed order more than `MAX_DECODE_TOKENS` tokens go in blocks of so many.

    On Hopper; but `plain` experts (bfloat16, SiLU) of a size that its kernel serves need none. On
    other GPUs one tiling serves any number.
    """
    if not _hopper_with_nvrtc(gpu):
        return False
    return not plain or choose_moe_sm90(1, hidden, width, torch.bfloat16, gpu) is None


def _hopper_with_nvrtc(gpu: GpuInfo) -> bool:
    return gpu.capability == 90 and not (gpu.amd or gpu.interpreted) and nvrtc.available()


def choose_moe(
    num_tokens: int, gpu: GpuInfo, itemsize: int = 2, fixed_order: bool = False
) -> MoeConfig:
    """The tiling for this many tokens; it changes after 128 and 1024 (AMD: 64 and 128) of them.

    Args:
        itemsize: bytes of an element; wider ones take fewer stages.
        fixed_order: a token has the same sums among any number. On Hopper tiles of pairs are those
            of its kernel up to 128 tokens, and beyond, Triton's multiply by the same instruction
            (wgmma) in the same order along K. Elsewhere, where a small tile may be multiplied by
            another instruction, there is one tiling.
    """
    if fixed_order and not _hopper_with_nvrtc(gpu):
        num_tokens = MAX_DECODE_TOKENS + 1
    if gpu.amd:
        return _choose_amd(num_tokens, gpu)
    if num_tokens <= MAX_DECODE_TOKENS:
        block_m, block_n, block_k, warps = DECODE_BLOCK_M, 32, 128, 4
    elif num_tokens <= 1024:
        block_m, block_n, block_k, warps = 64, 64, 64, 4
    else:
        block_m, block_n, block_k, warps = 128, 128, 64, 8
        if gpu.smem_bytes < 4 * (block_m + 2 * block_n) * block_k * itemsize:
            block_n = 64
    stage_bytes = (block_m + 2 * block_n) * block_k * itemsize  # of either GEMM
    stages = max(2, min(4, gpu.smem_bytes // stage_bytes))
    gate_up = GroupedGemmConfig(block_n, block_k, warps, stages)
    down = GroupedGemmConfig(2 * block_n, block_k, warps, stages)
    tma = num_tokens > 1024 and gpu.capability == 90 and not gpu.interpreted and itemsize == 2
    return MoeConfig(block_m, gate_up, down, tma)


def choose_moe_fp8(num_tokens: int, gpu: GpuInfo, scale_kind: int = 0) -> Fp8MoeConfig:
    """The same for weights in e4m3, with tiles of the same height.

    `scale_kind`: that of `Fp8Matrices`.
    """
    plain = choose_moe(num_tokens, gpu)
    if num_tokens <= MAX_DECODE_TOKENS and not gpu.amd:
        gate_up, down = GroupedGemmConfig(32, 128), GroupedGemmConfig(64, 128)
        return Fp8MoeConfig(replace(plain, gate_up=gate_up, down=down), quantize_x=False)
    if gpu.amd or gpu.capability < 90:
        return Fp8MoeConfig(plain, quantize_x=False)
    narrow, wide = (GroupedGemmConfig(n, 128, num_warps=8, num_stages=3) for n in (64, 128))
    large = gpu.smem_bytes >= FP8_WIDE_SMEM
    if num_tokens <= 1024:
        gate_up, down = replace(narrow, num_warps=4), wide
    elif scale_kind == 0:
        down = replace(wide, num_stages=4) if num_tokens > 4096 and large else narrow
        gate_up = narrow
    else:  # products beside the accumulators: with scales of rows and groups they spill if wide
        gate_up, down = wide if scale_kind == 2 and large else narrow, wide
    return Fp8MoeConfig(replace(plain, gate_up=gate_up, down=down), quantize_x=True)


def _choose_amd(num_tokens: int, gpu: GpuInfo) -> MoeConfig:
    """Chooses for 64 KiB of LDS; RDNA's waves of 32 hold less in registers."""
    decode, rdna = num_tokens <= MAX_DECODE_TOKENS, gpu.warp_size == 32
    block_m = 64 if not decode else 16 if num_tokens <= 64 else 32
    columns = 32 if decode or rdna else 64
    block_k = 128 if decode and not rdna else 64 if not rdna else 32
    gate_up = GroupedGemmConfig(columns, block_k, num_stages=2)
    return MoeConfig(block_m, gate_up, GroupedGemmConfig(2 * columns, block_k, num_stages=2))


def max_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """The most tiles that so many pairs make, whichever experts they go to."""
    touched = min(num_pairs, num_experts)
    return (num_pairs + touched * (block_m - 1)) // block_m


def router_slice(hidden_size: int) -> int:
    """Columns of the router's weight per split-K part; a multiple of 128."""
    return -(-hidden_size // (128 * ROUTER_SLICES)) * 128


def choose_router_tile(
    num_tokens: int, num_experts: int, gpu: GpuInfo, itemsize: int = 2, fixed_order: bool = False
) -> RouterTile:
    """The tile of the logits. Many tokens take large ones, where these fit into shared memory and
    tensor cores multiply them (float32 is exact).

    `fixed_order`: as of `choose_moe`; any number of tokens has the same tile.
    """
    if fixed_order or num_tokens <= MAX_DECODE_TOKENS:
        return RouterTile(16, 32, 128)
    large = RouterTile(128, 128, 64, num_warps=8)
    stage_bytes = (large.block_m + large.block_n) * large.block_k * itemsize
    fits = large.num_stages * stage_bytes <= gpu.smem_bytes and itemsize == 2 and not gpu.amd
    if num_tokens > 1024 and num_experts % large.block_n == 0 and fits:
        return large
    return RouterTile(64, 32, 128)
