"""Which product serves how many rows: a tuned configuration, or the vendor's library.

`TABLE` is what `benchmarks/kernels_gemm.py --tune` found. Shapes it does not know take a default
up to 32 rows, and the library above. Above 128 rows the library serves all (docs/kernels.md).
"""

from __future__ import annotations

from forerun.kernels.device import Gpu
from forerun.kernels.gemm import GemmConfig, rows_block
from forerun.kernels.gemm_hopper import available

DEFAULT_ROWS = 32  # the default serves no more

Choice = GemmConfig | None  # None: the library is faster

# Compute capability -> (N, K) -> rows bucket -> choice.
TABLE: dict[int, dict[tuple[int, int], dict[int, Choice]]] = {
    # On one H200: the layers, the head and the block draft of Qwen3-8B.
    90: {
        (6144, 4096): {
            16: GemmConfig(64, 128, 132, stages=6, swap=True),
            32: GemmConfig(64, 64, 192, stages=6, swap=True),
            64: GemmConfig(64, 128, 96, stages=4, swap=True, tma=True),
        },
        (4096, 4096): {
            16: GemmConfig(64, 128, 128, stages=6, swap=True),
            32: GemmConfig(64, 128, 128, stages=4, swap=True),
            64: GemmConfig(64, 128, 128, swap=True, early=False, parts=True, tma=True),
        },
        (24576, 4096): {
            16: GemmConfig(64, 128, 384, stages=3, swap=True),
            32: GemmConfig(64, 128, 384, stages=3, swap=True, prefetch=0),
            64: GemmConfig(128, 128, 192, tma=True),
            128: GemmConfig(192, 64, 128, stages=5, hopper=True),
        },
        (4096, 12288): {
            16: GemmConfig(64, 128, 128, stages=6, swap=True, parts=True),
            32: GemmConfig(64, 128, 256, stages=4, swap=True, prefetch=0),
            64: GemmConfig(64, 128, 128, swap=True, parts=True, tma=True),
            128: GemmConfig(128, 64, 128, stages=6, parts=True, hopper=True),
        },
        (151936, 4096): {
            16: GemmConfig(128, 128, 1187, warps=8, stages=4, swap=True, prefetch=0),
            32: GemmConfig(64, 128, 2374, stages=3, swap=True, prefetch=0),
            64: GemmConfig(128, 128, 1187, prefetch=0, tma=True),
            128: GemmConfig(192, 64, 132, stages=5, hopper=True),
        },
        (4096, 20480): {
            16: GemmConfig(64, 128, 128, stages=6, swap=True, prefetch=512),
            32: GemmConfig(64, 128, 256, stages=4, swap=True, prefetch=512),
            64: GemmConfig(64, 128, 128, swap=True, prefetch=1024, tma=True),
        },
        (10240, 4096): {16: None, 32: None},
    }
}


def choose(n: int, k: int, rows: int, gpu: Gpu) -> Choice:
    """How to compute `rows` rows times a bfloat16 matrix [n, k]."""
    bucket = rows_block(rows)
    tuned = TABLE.get(0 if gpu.amd else gpu.capability, {}).get((n, k))
    if tuned is not None:
        choice = tuned.get(bucket)
        return None if choice is not None and choice.hopper and not available() else choice
    return default(bucket, gpu) if bucket <= DEFAULT_ROWS else None


def default(bucket: int, gpu: Gpu) -> GemmConfig:
    """Two programs a multiprocessor, in tiles that fit everywhere (64 KiB of LDS on AMD)."""
    block_k = 64 if gpu.amd else 128
    return GemmConfig(64, block_k, 2 * gpu.processors, stages=2 if gpu.amd else 4)
