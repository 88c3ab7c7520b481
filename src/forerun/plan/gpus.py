"""GPUs that `forerun plan` knows: their ceilings, and what they cost.

Those of the H200 are measured (docs/performance.md). Of the others the vendor's figures are taken,
times what the H200 reaches of its own. Prices are assumptions, to be replaced by one's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.core.errors import ConfigError, nearest

TERA, GIB = 1e12, 2**30
# Measured over the vendor's figure, on an H200: 4.6 of 4.8 TB/s, 780 of 989 TFLOP/s.
READ_RATIO, FLOPS_RATIO = 4.6 / 4.8, 780 / 989


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU."""

    name: str
    memory_bytes: float
    read_bytes_per_second: float
    flops: float  # of a large bfloat16 GEMM
    link_bytes_per_second: float  # to the other GPUs of the host, one direction; the vendor's
    dollars_per_hour: float
    measured: bool = False

    @classmethod
    def of_vendor(
        cls, name: str, memory_gib: float, read: float, flops: float, link: float, price: float
    ) -> Gpu:
        """`read` in TB/s, `flops` in TFLOP/s, `link` in TB/s: the vendor's figures."""
        ceilings = read * READ_RATIO * TERA, flops * FLOPS_RATIO * TERA
        return cls(name, memory_gib * GIB, *ceilings, link * TERA, price)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h200", 139.8 * GIB, 4.6 * TERA, 780 * TERA, 0.45 * TERA, 3.5, measured=True),
        Gpu.of_vendor("h100", 79.1, 3.35, 989, 0.45, 2.5),
        Gpu.of_vendor("b200", 178, 8.0, 2250, 0.9, 5.0),
        Gpu.of_vendor("a100", 79.1, 2.04, 312, 0.3, 1.5),
        Gpu.of_vendor("l40s", 44.4, 0.864, 362, 0.032, 1.0),
    )
}


def find_gpu(name: str) -> Gpu:
    """
    Raises:
        ConfigError: it is not in the table.
    """
    if name.lower() not in GPUS:
        raise ConfigError(
            f"Unknown GPU {name!r}.{nearest(name, GPUS)} Known: {', '.join(GPUS)}; of another one,"
            " give --gpu h200 with --read-bandwidth, --gemm-rate and --gpu-memory."
        )
    return GPUS[name.lower()]
