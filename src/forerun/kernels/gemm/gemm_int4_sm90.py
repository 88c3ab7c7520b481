"""Launches the GEMM with 4-bit weights for Hopper (`gemm_int4_sm90.cu`), compiled by NVRTC.

A CTA computes a tile of 48 to 192 rows of W for up to 128 tokens (or 64), so that W is read and
converted once. A producer thread loads W and x by TMA, one box each, into a multi-stage SMEM
pipeline of one to four groups of K per stage; no kernel of the step writes W, so it does
not wait for the preceding kernel (PDL). Each consumer warp takes 16 or 32 rows: it converts them to
bfloat16 in registers, q - zero, which is exact, and multiplies by mma.sync with W as the left
operand, so that 8 tokens are enough for an instruction. The sums of 64 columns are multiplied by
the scales in float32.

Where N is small, a cluster of CTAs divides K and adds up its accumulators through distributed
shared memory. How K is divided depends on N and K alone. So a token's result does not depend on the
number of tokens, up to 128, nor on other tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from forerun.kernels.gemm.int4 import BLOCK_BYTES, BLOCK_ROWS, GROUP, PackedInt4
from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import GpuInfo

SOURCE = Path(__file__).with_name("gemm_int4_sm90.cu")
MAX_M = 128
MAX_SMEM_BYTES = 227 << 10  # per CTA
MAX_STAGES = 16  # more do not help


@dataclass(frozen=True, order=True)
class Int4GemmConfig:
    """Tiling of the kernel; not of tokens, so that results do not depend on their number."""

    row_blocks: int  # blocks of 16 rows of W per warp
    row_warps: int  # along N
    k_warps: int = 1  # along K; each takes an equal part of a stage's chunks of 64 columns
    cluster_k: int = 1  # CTAs along K
    stage_groups: int = 1  # groups of 128 columns of a stage: 1 or 2
    max_tokens: int = MAX_M  # of a tile: 64 or 128; results do not depend on it

    @property
    def rows(self) -> int:
        """Of a tile; with SiLU-mul, half of them gate, half up."""
        return BLOCK_ROWS * self.row_blocks * self.row_warps


# The best of a sweep on one H200, for tiles of so many rows; the last serves every shape.
CONFIGS = (
    Int4GemmConfig(1, 3, k_warps=4, stage_groups=4, max_tokens=64),
    Int4GemmConfig(1, 4, k_warps=2, stage_groups=2),
    Int4GemmConfig(1, 4, k_warps=2, cluster_k=2, stage_groups=2),
    Int4GemmConfig(1, 6, k_warps=2, cluster_k=2, stage_groups=2),
    Int4GemmConfig(1, 12, stage_groups=2),
    Int4GemmConfig(1, 4),
)


@cache
def choose_config(
    n: int, k: int, silu_mul: bool, gpu: GpuInfo, dtype: torch.dtype
) -> Int4GemmConfig | None:
    """Of a weight [n, k]: the tiling with which the busiest SM reads least; None: not for us."""
    if gpu.capability != 90 or gpu.amd or gpu.interpreted or dtype != torch.bfloat16:
        return None
    if not nvrtc.available() or n % (BLOCK_ROWS * (1 + silu_mul)):
        return None
    options = [config for config in CONFIGS if _serves(config, k, silu_mul)]
    return min(options, key=lambda config: _cost(config, n, k, gpu.num_sms))


def _serves(config: Int4GemmConfig, k: int, silu_mul: bool) -> bool:
    """Whether K divides into whole stages for every CTA, and rows into gate and up."""
    units, rest = divmod(k // GROUP, config.stage_groups)
    return rest == 0 and units >= config.cluster_k and config.row_warps % (1 + silu_mul) == 0


def _cost(config: Int4GemmConfig, n: int, k: int, num_sms: int) -> float:
    """What an SM reads at most, W and x (as 16 rows), and a little for the sum of a cluster."""
    waves = -(-(-(-n // config.rows) * config.cluster_k) // num_sms)
    cluster = 512 if config.cluster_k > 1 else 0
    return waves * (config.rows + 16) * (k / config.cluster_k + 64 + cluster)


def tokens_per_tile(config: Int4GemmConfig, m: int) -> int:
    """The number of tokens that M is rounded up to, at most: 8, 16, 32, 64 or 128."""
    return min(max(8, 1 << (m - 1).bit_length()), config.max_tokens)


def _stage_bytes(config: Int4GemmConfig, tokens: int) -> int:
    """A group of both operands, and two mbarriers."""
    w = config.rows // BLOCK_ROWS * BLOCK_BYTES
    return config.stage_groups * (w + tokens * GROUP * 2) + 16


def num_stages(config: Int4GemmConfig, tokens: int) -> int:
    """Stages of the SMEM pipeline: as many as fit, up to `MAX_STAGES`."""
    room = MAX_SMEM_BYTES - 1024
    return min(room // _stage_bytes(config, tokens), MAX_STAGES)


def smem_bytes(config: Int4GemmConfig, tokens: int) -> int:
    """Dynamic shared memory per CTA, with the alignment to 1,024 bytes.

    The sums of the epilogue overlay the pipeline.
    """
    return 1024 + num_stages(config, tokens) * _stage_bytes(config, tokens)


def cuda_source(config: Int4GemmConfig, tokens: int, silu_mul: bool, bias: bool) -> str:
    """`gemm_int4_sm90.cu` with its configuration as macros in front, ready to compile."""
    macros: dict[str, int | str] = {
        "TOKENS": tokens,
        "ROW_BLOCKS": config.row_blocks,
        "ROW_WARPS": config.row_warps,
        "K_WARPS": config.k_warps,
        "STAGE_GROUPS": config.stage_groups,
        "CLUSTER_K": config.cluster_k,
        "NUM_STAGES": num_stages(config, tokens),
        "SILU_MUL": int(silu_mul),
        "BIAS": int(bias),
    }
    return nvrtc.with_macros(SOURCE, macros)


def launch(
    config: Int4GemmConfig, x: Tensor, weight: PackedInt4, out: Tensor, silu_mul: bool = False
) -> None:
    """x [M, K] bfloat16, M <= 128 -> out [M, N], with `silu_mul` [M, N / 2]."""
    (m, k), (weight_rows, _), blocks = x.shape, weight.shape, config.rows // BLOCK_ROWS
    tokens, n = tokens_per_tile(config, m), weight_rows // (1 + silu_mul)
    assert m <= MAX_M and weight.packed.is_contiguous() and k == weight.shape[1]
    assert n % BLOCK_ROWS == 0 and blocks % (1 + silu_mul) == 0
    units, rest = divmod(k // GROUP, config.stage_groups)
    assert rest == 0 and units >= config.cluster_k
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:  # TMA needs 16-byte alignment
        x = x.clone(memory_format=torch.contiguous_format)
    chunks = x.as_strided((k // 64, m, 64), (64, x.stride(0), 1))
    tiles_n, tiles_m = -(-weight_rows // config.rows), -(-m // tokens)
    nvrtc.launch(
        _load_kernel(config, tokens, silu_mul, weight.bias is not None, x.device),
        tiles_n * tiles_m * config.cluster_k,
        32 * (config.row_warps * config.k_warps + 1),
        (
            nvrtc.tma_descriptor(chunks, (2 * config.stage_groups, min(m, tokens), 64)),
            nvrtc.tma_descriptor(
                weight.packed.view(torch.int64),
                (blocks // (1 + silu_mul), config.stage_groups, BLOCK_BYTES // 8),
            ),
            out, weight.bias, m, n, k, tiles_n,
        ),
        x.device,
    )  # fmt: skip


@cache
def _load_kernel(
    config: Int4GemmConfig, tokens: int, silu_mul: bool, bias: bool, device: torch.device
) -> nvrtc.CudaKernel:
    source, smem = cuda_source(config, tokens, silu_mul, bias), smem_bytes(config, tokens)
    return nvrtc.load_kernel(source, "gemm_int4_sm90_kernel", nvrtc.SM90A, smem, device)
