"""Tile sizes of the MoE kernels, by number of tokens and GPU.

A tile is up to BLOCK_M (token, choice) pairs of one expert. Up to `MAX_DECODE_TOKENS` tokens the
time is that of reading the touched experts once: tiles are short, and narrow enough along N that
one token's k experts fill the GPU. With more tokens the tiles are those of a compute-bound GEMM.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.kernels.runtime.gpu import GpuInfo

MAX_DECODE_TOKENS = 128  # tiles are listed by the routing kernel; beyond, by PyTorch
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


def choose_moe(num_tokens: int, gpu: GpuInfo, itemsize: int = 2) -> MoeConfig:
    """The tiling for this many tokens; it changes after 128 and 1024 of them.

    `itemsize`: bytes of an element; wider ones take fewer stages.
    """
    if gpu.amd:
        return _choose_amd(num_tokens, gpu)
    if num_tokens <= MAX_DECODE_TOKENS:
        block_m, block_n, block_k, warps = 16, 32, 128, 4
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
