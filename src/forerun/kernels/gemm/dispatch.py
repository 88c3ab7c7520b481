"""Which product serves how many rows: a tuned configuration, or the vendor's library.

`TABLE` is what `benchmarks/kernels_gemm.py --tune` found. Shapes it does not know take a default
up to 32 rows, on Hopper up to 128, and the library above, but for SiLU of many rows on Hopper.
"""

from __future__ import annotations

from functools import cache

from forerun.kernels.gemm.gemm import Config, GemmConfig, rows_block
from forerun.kernels.gemm.gemm_sm90 import CHUNK, Sm90Config
from forerun.kernels.runtime import nvrtc as cuda
from forerun.kernels.runtime.gpu import GpuInfo

DEFAULT_ROWS = 32  # the default serves no more
DEFAULT_SM90_ROWS = 128
# SiLU · up of many rows on Hopper. With fewer, its tiles may fill the multiprocessors too unevenly.
SILU_MANY, SILU_ROWS = Sm90Config(256, cluster=2, band=8), 4096

BackendChoice = Config | None  # None: the library is faster

# Compute capability -> (N, K) -> rows bucket -> choice.
TABLE: dict[int, dict[tuple[int, int], dict[int, BackendChoice]]] = {
    # On one H200: the layers, the head and the block draft of Qwen3-8B.
    90: {
        (6144, 4096): {
            16: Sm90Config(48, groups=1),
            32: Sm90Config(48, groups=1),
            64: Sm90Config(48, groups=1),
            128: Sm90Config(96, groups=1, cluster=2),
        },
        (4096, 4096): {
            16: GemmConfig(64, 128, 128, stages=6, swap=True, early=False),
            32: Sm90Config(64, groups=1, split=2),
            64: Sm90Config(32, groups=1),
            128: Sm90Config(128, groups=1, cluster=2, split=2),
        },
        (24576, 4096): {
            16: GemmConfig(64, 128, 384, stages=3, swap=True),
            32: GemmConfig(64, 128, 384, stages=3, swap=True, prefetch=0),
            64: Sm90Config(192, groups=1),
            128: Sm90Config(192),
        },
        (4096, 12288): {
            16: GemmConfig(64, 128, 128, stages=6, swap=True, parts=True),
            32: Sm90Config(64, groups=1, split=2),
            64: Sm90Config(64, groups=1, split=2),
            128: Sm90Config(128, groups=1, cluster=2, split=2),
        },
        (151936, 4096): {
            16: GemmConfig(128, 128, 1187, warps=8, stages=4, swap=True, prefetch=0),
            32: GemmConfig(64, 128, 2374, stages=3, swap=True, prefetch=0),
            64: Sm90Config(192, groups=1),
            128: Sm90Config(192),
        },
        (4096, 20480): {
            16: Sm90Config(32, groups=1),
            32: Sm90Config(32, groups=1),
            64: Sm90Config(32, groups=1),
            128: Sm90Config(64, groups=1, cluster=2),
        },
        (10240, 4096): {
            16: Sm90Config(96, groups=1),
            32: Sm90Config(96, groups=1),
            64: Sm90Config(96, groups=1),
            128: Sm90Config(160, groups=1, cluster=2),
        },
    }
}


def choose(n: int, k: int, rows: int, gpu: GpuInfo) -> BackendChoice:
    """How to compute `rows` rows times a bfloat16 matrix [n, k]."""
    bucket = rows_block(rows)
    tuned, hopper = TABLE.get(0 if gpu.amd else gpu.capability, {}).get((n, k)), _hopper(gpu)
    if tuned is not None:
        choice = tuned.get(bucket)
        if hopper or not isinstance(choice, Sm90Config):
            return choice
    if hopper and bucket <= DEFAULT_SM90_ROWS:
        return default_sm90(n, k, bucket, gpu)
    return default(bucket, gpu) if bucket <= DEFAULT_ROWS else None


def choose_silu(n: int, k: int, rows: int, gpu: GpuInfo) -> BackendChoice:
    """`choose` for a product with SiLU · up, which of many rows, too, may go inside."""
    if rows < SILU_ROWS or n % 16 or k % CHUNK or not _hopper(gpu):
        return choose(n, k, rows, gpu)
    return SILU_MANY


def _hopper(gpu: GpuInfo) -> bool:
    """Whether the kernel in CUDA C++ runs."""
    return gpu.capability == 90 and not (gpu.amd or gpu.interpreted) and cuda.available()


def default(bucket: int, gpu: GpuInfo) -> GemmConfig:
    """Two programs a multiprocessor, in tiles that fit everywhere (64 KiB of LDS on AMD)."""
    block_k = 64 if gpu.amd else 128
    return GemmConfig(64, block_k, 2 * gpu.num_sms, stages=2 if gpu.amd else 4)


@cache
def default_sm90(n: int, k: int, bucket: int, gpu: GpuInfo) -> Sm90Config | None:
    """Tiles that leave few multiprocessors idle and read little; None: better left to the library.

    It finds what tuning found for qkv, gate_up and down of Qwen3-8B.
    """
    if n % 8 or k % (2 * CHUNK):
        return None
    options = []
    for groups, cluster in ((1, 1),) if bucket <= 64 else ((2, 1), (1, 2)):
        for split in (1, 2) if k >= 2 * n else (1,):  # few rows: partial sums, or too narrow tiles
            for block_n in range(32, 257, 16 * cluster):
                programs = split * cluster * -(-n // block_n)
                waves = -(-programs // gpu.num_sms)
                config = Sm90Config(block_n, groups, cluster, split)
                read = waves * (config.block_m + block_n) / split
                options.append((programs / waves / gpu.num_sms, (read, -block_n), config))
    most = max(busy for busy, _, _ in options)
    return min((cost, config) for busy, cost, config in options if busy > 0.91 * most)[1]
