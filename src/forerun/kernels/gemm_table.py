"""Which product serves how many rows: a tuned configuration, or the vendor's library.

`TABLE` is what `benchmarks/kernels_gemm.py --tune` found. Shapes it does not know take a default
up to 64 rows, and the library above.
"""

from __future__ import annotations

from functools import cache

import torch

from forerun.kernels.gemm import GemmConfig, rows_block

DEFAULT_ROWS = 64  # the default serves no more

# family -> (N, K) -> rows bucket -> configuration; None: the library is faster.
TABLE: dict[str, dict[tuple[int, int], dict[int, GemmConfig | None]]] = {}


def choose(n: int, k: int, rows: int, device: torch.device) -> GemmConfig | None:
    """How to compute `rows` rows times a bfloat16 matrix [n, k]; None: with the library."""
    family = device_family(device.type, device.index)
    tuned = TABLE.get(family, {}).get((n, k))
    bucket = rows_block(rows)
    if tuned is not None:
        return tuned.get(bucket)
    return default(n, k, bucket, family) if bucket <= DEFAULT_ROWS else None


def default(n: int, k: int, bucket: int, family: str) -> GemmConfig:
    """Enough programs to fill a GPU, and tiles that fit everywhere (64 KiB of LDS on AMD)."""
    amd = family.startswith("gfx")
    block_k = 64 if amd or bucket > 32 else 128
    tiles, split = -(-n // 64), 1
    while tiles * split < 200 and k >= 2 * split * 4 * block_k:
        split *= 2
    return GemmConfig(64, block_k, split, stages=2 if amd else 4)


@cache
def device_family(kind: str, index: int | None) -> str:
    """ "sm_90", "gfx942", ...; "" on a CPU."""
    if kind != "cuda":
        return ""
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(index).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"
