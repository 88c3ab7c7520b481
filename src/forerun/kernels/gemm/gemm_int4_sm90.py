"""Launches the GEMM with 4-bit weights for Hopper (`gemm_int4_sm90.cu`), compiled by NVRTC.

A CTA computes a tile of 48 to 192 rows of W for up to 128 tokens (or 64), so that W is read and
converted once. A producer thread loads W and x by TMA into a multi-stage SMEM pipeline of one to
four groups of K per stage; no kernel of the step writes W, so it does not wait for the preceding
kernel (PDL). Consumer warps convert W to bfloat16 in registers, q - zero, which is exact, and
multiply with W as the left operand: by mma.sync, so that 16 rows and 8 tokens are enough, or from
32 tokens on by wgmma, which reads x once for 64 rows. The sums of 64 columns are multiplied by the
scales in float32. Both make the same sums, to the last bit.

Where N is small, CTAs divide K. They leave partials, if a norm is to add them up, or are a cluster
that adds up its accumulators through distributed shared memory. How K is divided depends on N and K
alone. So a token's result does not depend on the number of tokens, up to 128, nor on other tokens.

Up to 16 tokens, CTAs of two GEMMs share an SM: while one ends, the other loads W. But two CTAs of
the same GEMM must not, for others SMs would be idle. So there are two footprints, and GEMMs that
follow one another (qkv, o, gate_up, down) alternate between them: more than half of the SM's shared
memory, or more than half of its registers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
MIN_STAGES, MAX_STAGES = 2, 16  # more do not help


@dataclass(frozen=True)
class Footprint:
    """What a CTA takes of its SM."""

    smem_bytes: int
    registers: int = 0  # per thread, neither more nor less; 0: as the compiler likes
    idle_warps: bool = False  # up to a multiple of 4: as many on each quarter of the SM


WHOLE_SM = Footprint(MAX_SMEM_BYTES)
PLAIN_FOOTPRINT = Footprint(130 << 10, 56)
PARTIALS_FOOTPRINT = Footprint(92 << 10, 88, idle_warps=True)
MAX_SHARED_TOKENS = 16  # of a tile, with which CTAs share an SM
WGMMA_TOKENS = 32  # of a tile, from which on wgmma multiplies


@dataclass(frozen=True, order=True)
class Int4GemmConfig:
    """Tiling of the kernel; not of tokens, so that results do not depend on their number."""

    row_blocks: int  # blocks of 16 rows of W per warp
    row_warps: int  # along N
    k_warps: int = 1  # along K; each takes an equal part of a stage's chunks of 64 columns
    split_k: int = 1  # CTAs along K
    stage_groups: int = 1  # groups of 128 columns of a stage
    max_tokens: int = MAX_M  # of a tile: 64 or 128; results do not depend on it

    @property
    def rows(self) -> int:
        """Rows of a tile; with SiLU-mul, half of them gate, half up."""
        return BLOCK_ROWS * self.row_blocks * self.row_warps


# Tuned on one H200, one per number of rows of a tile; the last serves every shape.
CONFIGS = (
    Int4GemmConfig(1, 3, k_warps=4, stage_groups=4, max_tokens=64),
    Int4GemmConfig(1, 4, k_warps=2, stage_groups=2),
    Int4GemmConfig(1, 4, k_warps=2, split_k=2, stage_groups=2),
    Int4GemmConfig(1, 6, k_warps=2, split_k=2, stage_groups=2, max_tokens=64),
    Int4GemmConfig(1, 12, stage_groups=2),
    Int4GemmConfig(1, 4),
)
# The same of GEMMs that leave partials.
PARTIALS_CONFIGS = (
    Int4GemmConfig(1, 8, split_k=4, stage_groups=2),
    Int4GemmConfig(1, 8, split_k=2, stage_groups=2),
    Int4GemmConfig(1, 4, split_k=2),
)


@cache
def choose_config(
    n: int, k: int, silu_mul: bool, gpu: GpuInfo, dtype: torch.dtype, partials: bool = False
) -> Int4GemmConfig | None:
    """Chooses for a weight [n, k] what lets the busiest SM read least; None: not for us."""
    if gpu.capability != 90 or gpu.amd or gpu.interpreted or dtype != torch.bfloat16:
        return None
    if not nvrtc.available() or n % (BLOCK_ROWS * (1 + silu_mul)):
        return None
    configs = PARTIALS_CONFIGS if partials else CONFIGS
    options = [config for config in configs if _serves(config, k, silu_mul)]
    return min(options, key=lambda c: _cost(c, n, k, gpu.num_sms, partials), default=None)


def _serves(config: Int4GemmConfig, k: int, silu_mul: bool) -> bool:
    """Whether K divides into whole stages for every CTA, and rows into gate and up."""
    units, rest = divmod(k // GROUP, config.stage_groups)
    return rest == 0 and units >= config.split_k and config.row_warps % (1 + silu_mul) == 0


def _cost(config: Int4GemmConfig, n: int, k: int, num_sms: int, partials: bool) -> float:
    """What an SM reads at most, W and x (as 16 rows), and a little for the sum of a cluster."""
    waves = -(-(-(-n // config.rows) * config.split_k) // num_sms)
    cluster = 512 if config.split_k > 1 and not partials else 0
    return waves * (config.rows + 16) * (k / config.split_k + 64 + cluster)


def tile_config(config: Int4GemmConfig, tokens: int) -> Int4GemmConfig:
    """Tiles of so many tokens: with wgmma, 64 rows or a multiple. K is divided as before."""
    if tokens < WGMMA_TOKENS:
        return config
    return replace(config, row_warps=-(-config.row_warps // 4) * 4)


def tokens_per_tile(config: Int4GemmConfig, m: int) -> int:
    """The number of tokens that M is rounded up to, at most: 8, 16, 32, 64 or 128."""
    return min(max(8, 1 << (m - 1).bit_length()), config.max_tokens)


@dataclass(frozen=True)
class Int4Variant:
    """What a kernel is compiled with, besides its configuration."""

    tokens: int  # of a tile
    silu_mul: bool = False
    bias: bool = False
    partials: bool = False

    @property
    def wgmma(self) -> bool:
        """Else mma.sync, which takes fewer rows, with the same sums, to the last bit."""
        return self.tokens >= WGMMA_TOKENS

    @property
    def footprint(self) -> Footprint:
        """Resources of a CTA; results do not depend on it."""
        if self.tokens > MAX_SHARED_TOKENS:
            return WHOLE_SM
        return PARTIALS_FOOTPRINT if self.partials else PLAIN_FOOTPRINT


def _stage_bytes(config: Int4GemmConfig, variant: Int4Variant) -> int:
    """Groups of both operands, and two mbarriers."""
    w = config.rows // BLOCK_ROWS * BLOCK_BYTES
    return config.stage_groups * (w + variant.tokens * GROUP * 2) + 16


def num_stages(config: Int4GemmConfig, variant: Int4Variant) -> int:
    """Stages of the SMEM pipeline: as many as fit, up to `MAX_STAGES`."""
    stage, room = _stage_bytes(config, variant), variant.footprint.smem_bytes - 1024
    return min(max(room // stage, MIN_STAGES), MAX_STAGES)


def smem_bytes(config: Int4GemmConfig, variant: Int4Variant) -> int:
    """Dynamic shared memory per CTA: its footprint, or more if two stages need it.

    The sums of the epilogue overlay the pipeline.
    """
    needed = 1024 + num_stages(config, variant) * _stage_bytes(config, variant)
    return max(needed, variant.footprint.smem_bytes)


def num_threads(config: Int4GemmConfig, variant: Int4Variant) -> int:
    """Consumer warps, a producer warp, and idle ones."""
    warps = config.row_warps * config.k_warps + 1
    return 32 * (-(-warps // 4) * 4 if variant.footprint.idle_warps else warps)


def cuda_source(config: Int4GemmConfig, variant: Int4Variant) -> str:
    """`gemm_int4_sm90.cu` with its configuration as macros in front, ready to compile."""
    threads = num_threads(config, variant)
    scarce = variant.tokens == MAX_M and threads > 288  # registers
    tokens = min(variant.tokens, 32 if scarce else 64)
    sums = tokens // 2
    macros: dict[str, int | str] = {
        "TOKENS": variant.tokens,
        "ROW_BLOCKS": config.row_blocks,
        "ROW_WARPS": config.row_warps,
        "K_WARPS": config.k_warps,
        "STAGE_GROUPS": config.stage_groups,
        "SPLIT_K": config.split_k,
        "NUM_STAGES": num_stages(config, variant),
        "SILU_MUL": int(variant.silu_mul),
        "BIAS": int(variant.bias),
        "SPLIT_K_PARTIALS": int(variant.partials),
        "THREADS": threads,
        "WGMMA": int(variant.wgmma),
        "WGMMA_SHAPE": f'"m64n{tokens}k16"',
        "WGMMA_TOKENS": tokens,
        "WGMMA_BUFFERS": 1 if scarce else 2,
        "WGMMA_SUM": f'"{nvrtc.asm_operands(0, sums)}"',
        "WGMMA_W": f'"{nvrtc.asm_operands(sums, 4)}"',
        "WGMMA_X": f'"%{sums + 4}"',
        "WGMMA_ADDS": f'"%{sums + 5}"',
        "WGMMA_SUM_OPERANDS": nvrtc.asm_accumulators("sum", sums),
        "REGISTERS": variant.footprint.registers,
    }
    return nvrtc.with_macros(SOURCE, macros)


def launch(
    config: Int4GemmConfig, x: Tensor, weight: PackedInt4, out: Tensor, silu_mul: bool = False
) -> None:
    """x [M, K] bfloat16, M <= 128 -> out [M, N], with `silu_mul` [M, N / 2].

    If out is [S, M, N] float32: the partials of S = `config.split_k`, without the bias.
    """
    (m, k), (weight_rows, _), partials = x.shape, weight.shape, out.dim() == 3
    bias = None if partials else weight.bias
    tokens = tokens_per_tile(config, m)
    config = tile_config(config, tokens)
    variant = Int4Variant(tokens, silu_mul, bias is not None, partials)
    blocks = config.rows // BLOCK_ROWS
    n = weight_rows // (1 + silu_mul)
    assert m <= MAX_M and weight.packed.is_contiguous() and k == weight.shape[1]
    assert n % BLOCK_ROWS == 0 and blocks % (1 + silu_mul) == 0
    units, rest = divmod(k // GROUP, config.stage_groups)
    assert rest == 0 and units >= config.split_k
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:  # TMA needs 16-byte alignment
        x = x.clone(memory_format=torch.contiguous_format)
    chunks = x.as_strided((k // 64, m, 64), (64, x.stride(0), 1))
    box_chunks = 1 if variant.wgmma else 2 * config.stage_groups
    tiles_n, tiles_m = -(-weight_rows // config.rows), -(-m // variant.tokens)
    nvrtc.launch(
        _load_kernel(x.device, config, variant),
        tiles_n * tiles_m * config.split_k,
        num_threads(config, variant),
        (
            nvrtc.tma_descriptor(chunks, (box_chunks, min(m, variant.tokens), 64)),
            nvrtc.tma_descriptor(
                weight.packed.view(torch.int64),
                (blocks // (1 + silu_mul), config.stage_groups, BLOCK_BYTES // 8),
            ),
            out, bias, m, n, k, tiles_n,
        ),
        x.device,
    )  # fmt: skip


_load_kernel = nvrtc.loader("gemm_int4_sm90_kernel", cuda_source, smem_bytes)
