"""Launches the GEMM of few tokens with an e4m3 weight for Hopper (`gemm_fp8_sm90.cu`), by NVRTC.

Pipeline and producers are those of `gemm_sm90.py`. Operands are swapped: 64 rows of W are the left
operand of wgmma, which may come from registers, and all tokens (up to 128) are its N. Consumers
load e4m3 values from shared memory, 16 bytes at a time, and convert them to bfloat16: three
instructions of integer arithmetic and a multiplication for two values. Scales are applied to the
sums, in float32: in the epilogue, or after every 128 columns of K.

So that 16 consecutive bytes of a row are what a thread of wgmma needs, columns are reordered within
every 128 of K, once, when the weight is prepared (`quantize_fp8.interleave`). x stays as it is.

A CTA computes 64, 128 or 192 rows of W, 64 per warpgroup; or 64 rows with two warpgroups that take
turns at the blocks of K. An element of the output is summed up in the same order whatever the
number of tokens: that depends on `k_groups` and `split_k`, which dispatch chooses by shape alone.
So results do not depend on the batch, up to 128 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from forerun.kernels.gemm.arguments import GemmArguments
from forerun.kernels.gemm.config import Sm90Fp8GemmConfig, m_bucket
from forerun.kernels.gemm.gemm_sm90 import MAX_SMEM_BYTES, Sm90Variant
from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import gpu_of

SOURCE = Path(__file__).with_name("gemm_fp8_sm90.cu")
BLOCK_K = 128
MAX_M = 128
MAX_STAGES = 16
FEW_TOKENS = 8  # with wgmma's smallest N: tiles of x are half as large


@dataclass(frozen=True)
class Fp8Variant:
    """What a kernel is compiled with, besides its configuration."""

    block_m: int  # tokens
    epilogue: Sm90Variant
    grouped: bool = False  # scales of 128 columns each


def num_stages(config: Sm90Fp8GemmConfig, variant: Fp8Variant) -> int:
    """Stages of the SMEM pipeline: as many as fit, up to `MAX_STAGES`.

    A stage is always read by the same K group. Else a group, which knows the parity of a stage's
    phase only, could wait for a block whose predecessor another group has not yet read.
    """
    room = MAX_SMEM_BYTES - _other_smem_bytes(config, variant)
    stages = min(room // _stage_bytes(config, variant), MAX_STAGES)
    return stages - stages % config.k_groups


def smem_bytes(config: Sm90Fp8GemmConfig, variant: Fp8Variant) -> int:
    """Dynamic shared memory per CTA."""
    stages = num_stages(config, variant) * _stage_bytes(config, variant)
    return stages + _other_smem_bytes(config, variant)


def _stage_bytes(config: Sm90Fp8GemmConfig, variant: Fp8Variant) -> int:
    """A block of W, one of x in bfloat16, and two mbarriers."""
    return (config.block_n + 2 * variant.block_m) * BLOCK_K + 16


def _other_smem_bytes(config: Sm90Fp8GemmConfig, variant: Fp8Variant) -> int:
    """The epilogue's buffer, 1 / rms per token, its mbarrier, and the alignment to 1,024 bytes."""
    columns = config.block_n // (1 + variant.epilogue.silu_mul)
    staging = variant.block_m * (columns + 4)
    exchange = variant.block_m * config.block_n if config.k_groups > 1 else 0
    return 4 * max(staging, exchange) + 4 * variant.block_m + 8 + 1024


def cuda_source(config: Sm90Fp8GemmConfig, variant: Fp8Variant) -> str:
    """`gemm_fp8_sm90.cu` with its configuration as macros in front, ready to compile."""
    epilogue, count = variant.epilogue, variant.block_m // 2
    assert not epilogue.argmax
    macros: dict[str, int | str] = {
        "BLOCK_M": variant.block_m,
        "ROW_GROUPS": config.row_groups,
        "K_GROUPS": config.k_groups,
        "NUM_STAGES": num_stages(config, variant),
        "GROUPED": int(variant.grouped),
        "SILU_MUL": int(epilogue.silu_mul),
        "SPLIT_K_PARTIALS": int(epilogue.partials),
        "DEFERRED_NORM_IN": int(epilogue.deferred_norm_in),
        "RESIDUAL": int(epilogue.residual),
        "DEFERRED_NORM_OUT": int(epilogue.deferred_norm_out),
        "BIAS": int(epilogue.bias),
        "WGMMA_SHAPE": f'"m64n{variant.block_m}k16"',
        "WGMMA_ACC": f'"{nvrtc.asm_operands(0, count)}"',
        "WGMMA_W": f'"{nvrtc.asm_operands(count, 4)}"',
        "WGMMA_X": f'"%{count + 4}"',
        "WGMMA_ACC_OPERANDS": nvrtc.asm_accumulators("acc", count),
    }
    return nvrtc.with_macros(SOURCE, macros)


def launch(config: Sm90Fp8GemmConfig, args: GemmArguments) -> None:
    """Runs one GEMM; `args.weight` as `interleave` returns it. `config.split_k` is used only if
    `args.partials` is the output.
    """
    x, weight, scales = args.x, args.weight, args.scales
    assert scales is not None and scales.is_contiguous()
    (m, k), weight_rows = x.shape, weight.shape[0]
    block_m = FEW_TOKENS if m <= FEW_TOKENS else m_bucket(m)
    variant = Fp8Variant(block_m, Sm90Variant.of(args), grouped=args.group > 0)
    if config.split_k > 1 and not variant.epilogue.partials:
        config = replace(config, split_k=1)
    n = weight_rows // (1 + args.silu_mul)
    tile_n = config.block_n // (1 + args.silu_mul)
    assert weight.is_contiguous() and weight.data_ptr() % 16 == 0
    read = args.bias, args.residual, args.norm_weight
    assert all(each is None or each.dtype == torch.bfloat16 for each in read)
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:  # TMA needs 16-byte alignment
        x = x.clone(memory_format=torch.contiguous_format)
    assert m <= MAX_M and args.group in (0, BLOCK_K)
    # A K group keeps a stage until it has the next one.
    assert num_stages(config, variant) > config.k_groups
    assert n % 4 == 0 and k % (BLOCK_K * config.split_k) == 0
    work_tiles = -(-n // tile_n) * config.split_k
    out = args.out if args.partials is None else args.partials
    nvrtc.launch(
        _load_kernel(x.device, config, variant),
        min(gpu_of(x.device).num_sms, work_tiles),
        128 * (1 + config.row_groups * config.k_groups),
        (
            nvrtc.tma_descriptor(x, (min(m, variant.block_m), 64)),
            nvrtc.tma_descriptor(weight.view(torch.bfloat16), (tile_n, 64)),  # 128 bytes
            out, scales, args.bias, args.residual, args.norm_weight, args.norm_out,
            args.sum_of_squares_out, args.sum_of_squares, args.norm_tiles, args.eps,
            m, n, k, work_tiles, config.split_k, k // (BLOCK_K * config.split_k),
        ),
        x.device,
    )  # fmt: skip


_load_kernel = nvrtc.loader("gemm_fp8_sm90_kernel", cuda_source, smem_bytes)
