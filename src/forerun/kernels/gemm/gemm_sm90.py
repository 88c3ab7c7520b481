"""Launches the warp-specialized TMA GEMM for Hopper (`gemm_sm90.cu`), compiled by NVRTC.

The kernel is persistent: every CTA computes tiles until there are none left. One producer warp
loads W and another loads x by TMA into a multi-stage SMEM pipeline; one or two consumer warpgroups
run wgmma on 64 tokens each. Every stage has two mbarriers: `full` when both operands have arrived,
`empty` when they have been consumed. No kernel of the step writes W, so its producer does not wait
for the preceding kernel (PDL): the pipeline is full of W when x is ready.

If M is larger than a tile, two CTAs along M can form a cluster: each loads half of the W tile and
multicasts it to both. Triton 3.6 has neither multicast TMA on Hopper nor the control over the
epilogue that the rest of the gain comes from (benchmarks/results/2026-11-kernels.md).

With SiLU-mul, half of a tile's W rows are gate and half are up, so that both accumulators of a
pair are in the same thread.

Sums are accumulated in float32 in a fixed order and rounded once. A token's result depends neither
on other tokens nor on its position in a tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from forerun.kernels.gemm.arguments import GemmArguments
from forerun.kernels.gemm.config import BLOCK_K_SM90 as BLOCK_K
from forerun.kernels.gemm.config import Sm90GemmConfig
from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import gpu_of

SOURCE = Path(__file__).with_name("gemm_sm90.cu")
MAX_DEFERRED_NORM_M = 512  # tokens whose 1 / rms fit into shared memory
EPILOGUE_STRIDE = 40  # floats per staged row of 32 columns, padded to avoid bank conflicts
MAX_SMEM_BYTES = 227 << 10  # per CTA
MAX_STAGES = 14  # more do not help


@dataclass(frozen=True)
class Sm90Variant:
    """The epilogue that a kernel is compiled with."""

    silu_mul: bool = False
    partials: bool = False  # write float32 split-K partials
    argmax: bool = False  # write each tile's maximum and its index
    deferred_norm_in: bool = False  # multiply by 1 / rms of x's deferred RMSNorm
    residual: bool = False
    deferred_norm_out: bool = False  # begin a deferred RMSNorm of the output
    bias: bool = False

    @classmethod
    def of(cls, args: GemmArguments) -> Sm90Variant:
        return cls(
            args.silu_mul,
            args.partials is not None,
            args.tile_argmax is not None,
            args.sum_of_squares is not None,
            args.residual is not None,
            args.norm_out is not None,
            args.bias is not None,
        )


def num_stages(config: Sm90GemmConfig, variant: Sm90Variant) -> int:
    """Stages of the SMEM pipeline: as many as fit, up to `MAX_STAGES`."""
    room = MAX_SMEM_BYTES - config.free_smem - _other_smem_bytes(config, variant)
    return min(room // _stage_bytes(config), MAX_STAGES)


def smem_bytes(config: Sm90GemmConfig, variant: Sm90Variant) -> int:
    """Dynamic shared memory per CTA."""
    stages = num_stages(config, variant) * _stage_bytes(config)
    return stages + _other_smem_bytes(config, variant)


def _stage_bytes(config: Sm90GemmConfig) -> int:
    """A block of both operands in bfloat16, and two mbarriers."""
    return (config.block_m + config.block_n) * BLOCK_K * 2 + 16


def _other_smem_bytes(config: Sm90GemmConfig, variant: Sm90Variant) -> int:
    """Epilogue staging, 1 / rms per token, its mbarrier, and the alignment to 1,024 bytes."""
    staging = 0 if variant.argmax else config.block_m * EPILOGUE_STRIDE * 4
    return staging + 4 * MAX_DEFERRED_NORM_M * variant.deferred_norm_in + 8 + 1024


def cuda_source(config: Sm90GemmConfig, variant: Sm90Variant) -> str:
    """`gemm_sm90.cu` with its configuration as macros in front, ready to compile."""
    macros: dict[str, int | str] = {
        "BLOCK_N": config.block_n,
        "CONSUMER_WARPGROUPS": config.consumer_warpgroups,
        "CLUSTER_M": config.cluster_m,
        "GROUP_M": config.group_m,
        "NUM_STAGES": num_stages(config, variant),
        "MAX_DEFERRED_NORM_M": MAX_DEFERRED_NORM_M,
        "EPILOGUE_STRIDE": EPILOGUE_STRIDE,
        "K_SLICES": config.k_slices,
        "SILU_MUL": int(variant.silu_mul),
        "SPLIT_K_PARTIALS": int(variant.partials),
        "ARGMAX": int(variant.argmax),
        "DEFERRED_NORM_IN": int(variant.deferred_norm_in),
        "RESIDUAL": int(variant.residual),
        "DEFERRED_NORM_OUT": int(variant.deferred_norm_out),
        "BIAS": int(variant.bias),
        **_wgmma_macros(config.block_n),
    }
    return nvrtc.with_macros(SOURCE, macros)


def _wgmma_macros(block_n: int) -> dict[str, str]:
    """The operands of wgmma m64nNk16 as asm text: N / 2 accumulators per thread, then x and W."""
    count = block_n // 2
    return {
        "WGMMA_SHAPE": f'"m64n{block_n}k16"',
        "WGMMA_ACC": f'"{nvrtc.asm_operands(0, count)}"',
        "WGMMA_X": f'"%{count}"',
        "WGMMA_W": f'"%{count + 1}"',
        "WGMMA_ACC_OPERANDS": nvrtc.asm_accumulators("acc", count),
    }


def launch(config: Sm90GemmConfig, args: GemmArguments) -> None:
    """Runs one GEMM. `config.split_k` is used only if `args.partials` is the output."""
    x, weight, variant = args.x, args.weight, Sm90Variant.of(args)
    if config.split_k > 1 and not variant.partials:
        config = replace(config, split_k=1)
    split_k = config.split_k
    (m, k), weight_rows = x.shape, weight.shape[0]
    n, tile_n = weight_rows // (1 + args.silu_mul), config.block_n // (1 + args.silu_mul)
    assert weight.is_contiguous() and weight.data_ptr() % 16 == 0
    read = args.bias, args.residual, args.norm_weight
    assert all(each is None or each.dtype == torch.bfloat16 for each in read)
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:  # TMA needs 16-byte alignment
        x = x.clone(memory_format=torch.contiguous_format)
    assert args.sum_of_squares is None or m <= MAX_DEFERRED_NORM_M
    assert n % 4 == 0 and k % (BLOCK_K * split_k * config.k_slices) == 0
    assert tile_n % (8 * config.cluster_m) == 0 and num_stages(config, variant) > 1
    cluster_tiles_m = -(-m // (config.block_m * config.cluster_m))
    work_tiles = cluster_tiles_m * -(-weight_rows // config.block_n) * split_k
    num_clusters = min(gpu_of(x.device).num_sms // config.cluster_m, work_tiles)
    out = next(t for t in (args.out, args.tile_max, args.partials) if t is not None)
    nvrtc.launch(
        _load_kernel(x.device, config, variant),
        num_clusters * config.cluster_m,
        128 * (1 + config.consumer_warpgroups),
        (
            nvrtc.tma_descriptor(x, (min(m, config.block_m), BLOCK_K)),
            nvrtc.tma_descriptor(weight, (tile_n // config.cluster_m, BLOCK_K)),
            out, args.tile_argmax, args.bias, args.residual, args.norm_weight, args.norm_out,
            args.sum_of_squares_out, args.sum_of_squares, args.norm_tiles, args.eps,
            m, n, k, work_tiles, cluster_tiles_m, split_k, k // (BLOCK_K * split_k),
        ),
        x.device,
    )  # fmt: skip


_load_kernel = nvrtc.loader("gemm_sm90_kernel", cuda_source, smem_bytes)
