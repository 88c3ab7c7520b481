"""Which MoE kernels serve how many tokens, and their tile sizes, by GPU.

A tile is up to BLOCK_M (token, choice) pairs of one expert. Up to `MAX_DECODE_TOKENS` tokens the
time is that of reading the touched experts once: tiles are short, and narrow enough along N that
one token's k experts fill the GPU. With more tokens the tiles are those of a compute-bound GEMM.
On Hopper up to `MAX_DECODE_TOKENS` tokens have a kernel of their own (`choose_moe_sm90`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import GpuInfo

MAX_DECODE_TOKENS = 128  # tiles are listed by the routing kernel; beyond, by `align.py`
DECODE_BLOCK_M = 16  # pairs of a tile for them on NVIDIA
ROUTER_SLICES = 8  # at most; the router's K is split into so many parts


@dataclass(frozen=True)
class GroupedGemmConfig:
    """Blocks in elements; `block_n` counts output columns (gate/up reads twice as many rows)."""

    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 4


@dataclass(frozen=True)
class MoeConfig:
    block_m: int  # pairs per tile
    gate_up: GroupedGemmConfig
    down: GroupedGemmConfig


@dataclass(frozen=True)
class Sm90MoeConfig:
    """The kernel for Hopper (`experts_sm90.py`), with tiles of `DECODE_BLOCK_M` pairs."""

    block_k: int  # columns of a pipeline stage: a multiple of 64 that divides H and I
    num_stages: int  # of the SMEM pipeline
    ctas_per_sm: int  # as many have to fit, in registers and shared memory


# The fastest of those in docs/kernels-lab-notes.md: up to 4 tokens, and for more.
SM90_FEW_TOKENS = Sm90MoeConfig(block_k=128, num_stages=8, ctas_per_sm=1)
SM90_MAX_FEW_TOKENS = 4
SM90_DECODE = Sm90MoeConfig(block_k=64, num_stages=10, ctas_per_sm=2)


def choose_moe_sm90(
    num_tokens: int, hidden: int, width: int, dtype: torch.dtype, gpu: GpuInfo
) -> Sm90MoeConfig | None:
    """The configuration for experts of this size; None: the Triton kernels serve them."""
    hopper = gpu.capability == 90 and not (gpu.amd or gpu.interpreted) and nvrtc.available()
    if not hopper or dtype != torch.bfloat16 or num_tokens > MAX_DECODE_TOKENS:
        return None
    if hidden % 64 or width % 64:
        return None
    if num_tokens <= SM90_MAX_FEW_TOKENS and hidden % 128 == 0 and width % 128 == 0:
        return SM90_FEW_TOKENS
    return SM90_DECODE


def choose_moe(num_tokens: int, gpu: GpuInfo, itemsize: int = 2) -> MoeConfig:
    """The tiling for this many tokens; it changes after 128 and 1024 (AMD: 64 and 128) of them.

    `itemsize`: bytes of an element; wider ones take fewer stages.
    """
    if gpu.amd:
        return _choose_amd(num_tokens, gpu)
    if num_tokens <= MAX_DECODE_TOKENS:
        block_m, block_n, block_k, warps = DECODE_BLOCK_M, 32, 128, 4
    elif num_tokens <= 1024:
        block_m, block_n, block_k, warps = 64, 64, 64, 4
    else:
        block_m, block_n, block_k, warps = 128, 64, 64, 8
    stage_bytes = (block_m + 2 * block_n) * block_k * itemsize  # of either GEMM
    stages = max(2, min(4, gpu.smem_bytes // stage_bytes))
    gate_up = GroupedGemmConfig(block_n, block_k, warps, stages)
    return MoeConfig(block_m, gate_up, GroupedGemmConfig(2 * block_n, block_k, warps, stages))


def _choose_amd(num_tokens: int, gpu: GpuInfo) -> MoeConfig:
    """For 64 KiB of LDS; RDNA's waves of 32 hold less in registers."""
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
