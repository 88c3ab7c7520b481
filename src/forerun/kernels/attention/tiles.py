"""How attention is cut up, by GPU, shape and dtype. NVIDIA's numbers were tuned on an H200."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forerun.kernels.runtime.gpu import GpuInfo, gpu_of, next_power_of_2

MAX_SPLITS = 64
MIN_SPAN = 64  # positions worth a split of their own
LONG = 4096  # positions from which on reading outweighs what surrounds it


@dataclass(frozen=True)
class Tiles:
    """Shape of a program's work; chosen per device, dtype and head dim."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int | None = None  # most a thread may have, so that two programs share a processor

    def limits(self) -> dict[str, int]:
        """The launch option, where there is one."""
        return {} if self.registers is None else {"maxnreg": self.registers}


def uses_tma(gpu: GpuInfo, page: int, block_n: int, dim: int, pool: torch.dtype) -> bool:
    """Whether the bulk copy engine (sm_90 on) brings blocks of K/V: each within one page."""
    able = not gpu.amd and gpu.capability >= 90 and pool.itemsize > 1
    return able and page % block_n == 0 and dim == next_power_of_2(dim)


def best_page_size(device: torch.device, dim: int, pool: torch.dtype) -> int:
    """Positions a page: blocks within one page are brought by the bulk copy engine."""
    block_n = decode_block_n(dim, pool)
    on_gpu = device.type == "cuda"
    return block_n if on_gpu and uses_tma(gpu_of(device), block_n, block_n, dim, pool) else 16


def decode_block_n(dim: int, dtype: torch.dtype) -> int:
    """Positions of a block of K/V, but of RDNA and of some float8."""
    row_bytes: int = next_power_of_2(dim) * dtype.itemsize
    return max(16, min(64, (64 << 8) // row_bytes))


def decode_tiles(
    gpu: GpuInfo, rows: int, dim: int, dtype: torch.dtype, pool: torch.dtype, page: int, alone: bool
) -> Tiles:
    """`rows`: W * group; `page`: positions a page; `alone`: no processor has two programs.

    AMD has 64 KiB of shared memory, RDNA few registers besides.
    """
    power = next_power_of_2(dim)
    row_bytes = power * dtype.itemsize
    block_m = min(64, max(16, next_power_of_2(rows)))
    block_n = decode_block_n(dim, dtype)
    if gpu.amd and gpu.warp_size == 32:
        return Tiles(min(block_m, 32 if row_bytes <= 256 else 16), 16, 8, 1)
    if gpu.amd:
        return Tiles(block_m, block_n, 4, 1 if row_bytes > 256 else 2)
    if pool.itemsize == 1 and block_m == 16 and row_bytes <= 256:
        block_n *= 2
    # Few programs must keep much in flight; of many, two shall share a processor.
    stages = 3 if pool.itemsize == 1 or (block_m > 16 and not alone) else 4
    if block_m == 16 and alone and uses_tma(gpu, page, block_n, dim, pool):
        stages = 5
    room = gpu.smem_bytes - 2 * block_m * row_bytes
    stages = max(1, min(stages, room // (2 * block_n * power * pool.itemsize)))
    warps = 8 if row_bytes > 256 or dtype == torch.float32 else 4
    return Tiles(block_m, block_n, warps, stages)


def choose_splits(
    device: torch.device,
    batch: int,
    rows: int,
    kv_heads: int,
    longest: int,
    dim: int,
    pool: torch.dtype,
    page: int,
) -> int:
    """Splits that fill the device.

    Two programs a processor hide each other's arithmetic. One is enough for the bulk copy engine,
    and where a tile has many rows: each split also costs their partial results, which a short
    context does not earn back.

    Args:
        rows: W * group.
        longest: bound of the context.
        pool: dtype of the K/V.
        page: positions a page.
    """
    gpu = gpu_of(device)
    tiles = -(-rows // 64) * batch * kv_heads
    small = pool.itemsize == 1
    most = -(-longest // (2 * MIN_SPAN if small else MIN_SPAN))
    wanted = 2 * gpu.num_sms // tiles
    one = rows > 16 and longest < LONG and not small
    if uses_tma(gpu, page, decode_block_n(dim, pool), dim, pool):
        one = rows > 16 or most > wanted  # unless every block can be a split of its own
    if one and 2 * tiles <= gpu.num_sms and not gpu.amd:
        wanted = gpu.num_sms // tiles
    return max(1, min(wanted, most, MAX_SPLITS))


def prefill_tiles(gpu: GpuInfo, dim: int, dtype: torch.dtype) -> Tiles:
    """Of one program: BLOCK_M rows times heads. For AMD see `decode_tiles`."""
    row_bytes = next_power_of_2(dim) * dtype.itemsize
    if gpu.interpreted:
        return Tiles(16, 16, 4, 1)
    if dtype == torch.float32:
        return Tiles(32, 32 if dim <= 128 else 16, 4, 1 if gpu.amd else 2)
    if gpu.amd and gpu.warp_size == 32:
        return Tiles(32, 16, 8, 1) if row_bytes <= 256 else Tiles(16, 16, 8, 1)
    if gpu.amd:
        return Tiles(128, 64, 8, 1) if row_bytes <= 256 else Tiles(64, 32, 8, 1)
    if gpu.capability < 90 or gpu.smem_bytes < 160 << 10:
        return Tiles(128, 32, 8, 3) if row_bytes <= 256 else Tiles(64, 32, 8, 2)
    if row_bytes > 256:
        return Tiles(128, 32, 8, 2)
    return Tiles(128, 64, 8, 2, registers=128)  # two a processor, though they spill a little
