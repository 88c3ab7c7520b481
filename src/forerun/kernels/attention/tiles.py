"""Tile sizes and split counts of attention, by GPU, shape and dtype. NVIDIA: tuned on an H200.

A decode tile has `q_rows` rows: the tokens of a request times the query heads that share a K/V
head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import GpuInfo, gpu_of, next_power_of_2

MAX_SPLITS = 64
MIN_SPLIT_LEN = 64  # K/V positions that are worth a split of their own
MAX_SHORT_SPLITS = 20  # below LONG_CONTEXT: what combining more takes is not earned back
MAX_LONE_STAGES = 5  # of attention in a fixed order: a segment has two blocks, or four
LONG_CONTEXT = 4096  # positions from which on reading K/V outweighs the cost of splits
# Of `mla_sm90.py`: values of a latent row, positions of a page, query rows of a CTA and of a
# prefill tile (a cluster of two CTAs).
SM90_LATENT_DIMS, SM90_LATENT_PAGE, SM90_LATENT_ROWS, SM90_PREFILL_ROWS = (512, 64), 64, 64, 128


@dataclass(frozen=True)
class TileConfig:
    """The tile of a CTA."""

    block_m: int  # rows: tokens times query heads
    block_n: int  # K/V positions
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # per thread, so that two CTAs fit on an SM

    def launch_options(self) -> dict[str, int]:
        """The register limit, if there is one."""
        return {} if self.max_registers is None else {"maxnreg": self.max_registers}


def padded(dim: int) -> int:
    """A dimension of a matrix product, as Triton takes it."""
    return max(16, next_power_of_2(dim))


@dataclass(frozen=True)
class LatentShape:
    """The rows that MLA kernels read, by which their tiles are chosen."""

    latent_dim: int
    rope_dim: int
    dtype: torch.dtype  # of q
    kv_dtype: torch.dtype
    page_size: int

    @property
    def padded_dim(self) -> int:
        """Values of a row in shared memory."""
        return padded(self.latent_dim) + padded(self.rope_dim)


@dataclass(frozen=True)
class DecodeProblem:
    """The shape of a decode attention, from which the number of splits is chosen."""

    batch_size: int
    q_rows: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype
    page_size: int
    kv_len_ub: int  # host bound of the context length


def uses_tma(
    gpu: GpuInfo, page_size: int, block_n: int, head_dim: int, kv_dtype: torch.dtype
) -> bool:
    """Whether K/V blocks are loaded by TMA (sm_90 on): each must lie within one page."""
    able = not gpu.amd and gpu.capability >= 90 and kv_dtype.itemsize > 1
    return able and page_size % block_n == 0 and head_dim == next_power_of_2(head_dim)


def best_page_size(device: torch.device, head_dim: int, kv_dtype: torch.dtype) -> int:
    """Tokens per page: where TMA can be used, as many as a K/V block has."""
    block_n = decode_block_n(head_dim, kv_dtype)
    on_gpu = device.type == "cuda"
    tma = on_gpu and uses_tma(gpu_of(device), block_n, block_n, head_dim, kv_dtype)
    return block_n if tma else 16


def decode_block_n(head_dim: int, dtype: torch.dtype) -> int:
    """Positions of a K/V block, except on RDNA and for some float8."""
    row_bytes: int = next_power_of_2(head_dim) * dtype.itemsize
    return max(16, min(64, (64 << 8) // row_bytes))


def decode_tile_config(
    gpu: GpuInfo,
    q_rows: int,
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    page_size: int,
    one_cta_per_sm: bool,
) -> TileConfig:
    """`one_cta_per_sm`: the grid is so small that no SM gets two CTAs.

    AMD has 64 KiB of shared memory (LDS), and RDNA few registers.
    """
    padded_dim = next_power_of_2(head_dim)
    row_bytes = padded_dim * dtype.itemsize
    block_m = min(64, max(16, next_power_of_2(q_rows)))
    if padded_dim > 256 and (dtype == torch.float32 or kv_dtype.itemsize == 1):
        block_m = 16  # more rows would spill registers
    block_n = decode_block_n(head_dim, dtype)
    if gpu.amd and gpu.warp_size == 32:
        return TileConfig(min(block_m, 32 if row_bytes <= 256 else 16), 16, 8, 1)
    if gpu.amd:
        return TileConfig(block_m, block_n, 4, 1 if row_bytes > 256 else 2)
    if kv_dtype.itemsize == 1 and block_m == 16 and row_bytes <= 256:
        block_n *= 2
    tma = uses_tma(gpu, page_size, block_n, head_dim, kv_dtype)
    if tma and block_m > 16:
        block_m = 64  # wgmma; 32 rows take mma.sync, whose softmax crosses warps
    # Few CTAs must keep many loads in flight; of many, two should fit on an SM.
    stages = 3 if kv_dtype.itemsize == 1 or (block_m > 16 and not one_cta_per_sm) else 4
    if block_m == 16 and one_cta_per_sm and tma:
        stages = 5
    room = gpu.smem_bytes - 2 * block_m * row_bytes
    stages = max(1, min(stages, room // (2 * block_n * padded_dim * kv_dtype.itemsize)))
    if row_bytes > 1024:
        stages = 1
    warps = 8 if row_bytes > 256 or dtype == torch.float32 else 4
    return TileConfig(block_m, block_n, warps, stages)


def choose_num_splits(gpu: GpuInfo, problem: DecodeProblem) -> int:
    """How many splits of the context fill the device (flash-decoding).

    Two CTAs per SM hide each other's arithmetic. One is enough with TMA, and where a tile has many
    rows: each split also costs its partial results, which a short context does not earn back.
    """
    p = problem
    tiles = -(-p.q_rows // 64) * p.batch_size * p.num_kv_heads
    fp8 = p.kv_dtype.itemsize == 1
    most = -(-p.kv_len_ub // (2 * MIN_SPLIT_LEN if fp8 else MIN_SPLIT_LEN))
    wanted = 2 * gpu.num_sms // tiles
    one_cta_per_sm = p.q_rows > 16 and p.kv_len_ub < LONG_CONTEXT and not fp8
    block_n = decode_block_n(p.head_dim, p.kv_dtype)
    tma = uses_tma(gpu, p.page_size, block_n, p.head_dim, p.kv_dtype)
    if tma:
        # Unless every block can be a split of its own.
        one_cta_per_sm = p.q_rows > 16 or most > wanted
    nearly_full = 0.9 * gpu.num_sms <= tiles <= gpu.num_sms
    if one_cta_per_sm and (2 * tiles <= gpu.num_sms or nearly_full) and not gpu.amd:
        wanted = gpu.num_sms // tiles
    limit = MAX_SHORT_SPLITS if tma and p.kv_len_ub < LONG_CONTEXT else MAX_SPLITS
    return max(1, min(wanted, most, limit))


def prefill_tile_config(gpu: GpuInfo, head_dim: int, dtype: torch.dtype) -> TileConfig:
    """The tile of a prefill CTA. For AMD see `decode_tile_config`."""
    row_bytes = next_power_of_2(head_dim) * dtype.itemsize
    if gpu.interpreted:
        return TileConfig(16, 16, 4, 1)
    if dtype == torch.float32 and head_dim > 256:
        return TileConfig(16, 16, 4, 1)
    if dtype == torch.float32:
        return TileConfig(32, 32 if head_dim <= 128 else 16, 4, 1 if gpu.amd else 2)
    if gpu.amd and gpu.warp_size == 32:
        return TileConfig(32, 16, 8, 1) if row_bytes <= 256 else TileConfig(16, 16, 8, 1)
    if gpu.amd:
        if row_bytes > 512:
            return TileConfig(32, 16, 8, 1)
        return TileConfig(128, 64, 8, 1) if row_bytes <= 256 else TileConfig(64, 32, 8, 1)
    if row_bytes > 512:  # [64, 512] accumulators take half of an SM's registers
        return TileConfig(64, 32 if gpu.smem_bytes >= 200 << 10 else 16, 8, 2)
    if gpu.capability < 90 or gpu.smem_bytes < 160 << 10:
        return TileConfig(128, 32, 8, 3) if row_bytes <= 256 else TileConfig(64, 32, 8, 2)
    if row_bytes > 256:
        return TileConfig(128, 32, 8, 2)
    if gpu.capability > 90:
        return TileConfig(128, 64, 8, 2)
    return TileConfig(128, 64, 8, 2, max_registers=128)  # two CTAs per SM, with a few spills


def fixed_order_tile(gpu: GpuInfo, head_dim: int, dtype: torch.dtype) -> TileConfig:
    """The one tile of `fixed_order.py`, for decode, verify and prefill alike."""
    tile = prefill_tile_config(gpu, head_dim, dtype)
    if gpu.interpreted or gpu.amd or dtype == torch.float32 or gpu.capability != 90:
        return tile
    wide = next_power_of_2(head_dim) > 128
    return TileConfig(64, 32 if wide else 64, 8 if wide else 4, 2 if wide else 3)


def lone_fixed_order_stages(
    gpu: GpuInfo, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> int:
    """Stages of such a tile whose CTA shares its SM with no other.

    On Hopper as many blocks as there is room for, so that few CTAs keep enough loads in flight,
    besides q, converted K/V and what storing results takes.
    """
    tile, padded_dim = fixed_order_tile(gpu, head_dim, dtype), next_power_of_2(head_dim)
    if gpu.interpreted or gpu.amd or dtype == torch.float32 or gpu.capability != 90:
        return tile.num_stages
    values, rows = 2 * tile.block_n * padded_dim, tile.block_m * padded_dim
    room = gpu.smem_bytes - rows * (dtype.itemsize + 4)
    if kv_dtype != dtype:
        room -= values * dtype.itemsize
    return max(1, min(MAX_LONE_STAGES, room // (values * kv_dtype.itemsize)))


# --- latent K/V (MLA) ---------------------------------------------------------------------------


def mla_uses_tma(gpu: GpuInfo, shape: LatentShape, block_n: int) -> bool:
    """Whether blocks of latent rows are loaded by TMA."""
    rope_fits = shape.rope_dim >= 16 and shape.rope_dim == next_power_of_2(shape.rope_dim)
    tma = uses_tma(gpu, shape.page_size, block_n, shape.latent_dim, shape.kv_dtype)
    return tma and rope_fits and shape.latent_dim >= 16


def best_mla_page_size(device: torch.device) -> int:
    """Tokens per page: where TMA can be used, as many as a block of latent rows has."""
    tma = device.type == "cuda" and not gpu_of(device).amd and gpu_of(device).capability >= 90
    return 64 if tma else 16


def mla_tile_config(gpu: GpuInfo, q_rows: int, shape: LatentShape) -> TileConfig:
    """The tile of an MLA CTA; a request has `q_rows` rows: its tokens times the query heads.

    DeepSeek's rows have 512 + 64 values. With 64 query rows a CTA on Hopper keeps q, two blocks of
    64 positions and [64, 512] accumulators, which is all the shared memory and registers of an SM.
    """
    block_m = min(64, max(16, next_power_of_2(q_rows)))
    if shape.dtype == torch.float32:
        return TileConfig(16, 16, 4 if gpu.amd and gpu.warp_size == 64 else 8, 1)
    if gpu.amd and gpu.warp_size == 32:
        return TileConfig(16, 16, 8, 1)
    if gpu.amd:
        return TileConfig(block_m, 16 if block_m == 64 else 32, 4, 1)
    block_n, reserved = 64, 8 << 10  # reserved: shared memory for weights and barriers
    if gpu.capability < 90 or gpu.smem_bytes < 160 << 10:
        block_m, block_n = min(block_m, 32), 32 if gpu.smem_bytes >= 160 << 10 else 16
    elif gpu.capability > 90 and block_m == 64:
        block_n, reserved = 32, 36 << 10
    if shape.kv_dtype.itemsize == 1:  # a block is also kept as it is multiplied
        if block_m > 16:
            block_n = min(block_n, 32 if gpu.capability >= 90 else 16)
        reserved += block_n * shape.padded_dim * shape.dtype.itemsize
    room = gpu.smem_bytes - reserved - block_m * shape.padded_dim * shape.dtype.itemsize
    blocks = room // (block_n * shape.padded_dim * shape.kv_dtype.itemsize)
    # wgmma (64 rows) runs while the next block is loaded, and holds one block more.
    stages = blocks if block_m == 64 else blocks + 1
    return TileConfig(block_m, block_n, 8, max(1, min(stages, 4)))


def why_not_mla_sm90(gpu: GpuInfo, q_rows: int, shape: LatentShape) -> str | None:
    """Why `mla_sm90.py` cannot serve, or should not; None: it does.

    Up to 16 rows (one token of 16 heads) reading the latent rows takes longest, and a tile of 64
    rows is mostly padding: the Triton kernel's tile of 16 is as fast or faster.
    """
    if gpu.amd or gpu.interpreted or gpu.capability != 90:
        return "it is for Hopper GPUs"
    if q_rows <= 16:
        return "the Triton kernel is as fast up to 16 rows"
    return why_unfit_for_mla_sm90(shape)


def why_unfit_for_mla_sm90(shape: LatentShape) -> str | None:
    """Why `mla_sm90.py` cannot serve these latent rows on a Hopper GPU; None: it can."""
    half, dims = torch.bfloat16, (shape.latent_dim, shape.rope_dim)
    if not nvrtc.available():
        return "it needs NVRTC"
    if shape.dtype != half or shape.kv_dtype != half:
        return f"it takes bfloat16, not {shape.dtype} over {shape.kv_dtype}"
    if dims != SM90_LATENT_DIMS:
        return f"latent rows have {dims} values, not {SM90_LATENT_DIMS}"
    if shape.page_size != SM90_LATENT_PAGE:
        return f"pages have {shape.page_size} positions, not {SM90_LATENT_PAGE}"
    return None


def mla_prefill_tile_config(gpu: GpuInfo, shape: LatentShape) -> TileConfig:
    """The tile of prefill chunks with absorbed projections: the largest."""
    return mla_tile_config(gpu, 64, shape)


def mla_fixed_order_tile(gpu: GpuInfo, shape: LatentShape) -> TileConfig:
    """The one tile of `mla_fixed_order.py`, for decode, verify and prefill alike.

    Its rows have two accumulators, so there are half as many as in other tiles.
    """
    if gpu.interpreted or gpu.amd or shape.dtype == torch.float32:
        return TileConfig(16, 16, 8, 1)
    return TileConfig(32, 32, 8, 3 if gpu.smem_bytes >= 160 << 10 else 1)


def mla_prefill_tile_rows(gpu: GpuInfo, shape: LatentShape) -> int:
    """Rows (tokens times heads) of an entry of the tile map that `mla_prefill` wants."""
    if why_not_mla_sm90(gpu, SM90_PREFILL_ROWS, shape) is None:
        return SM90_PREFILL_ROWS
    return mla_prefill_tile_config(gpu, shape).block_m


def absorbed_speedup(gpu: GpuInfo, shape: LatentShape) -> float:
    """FLOP/s of prefill attention with absorbed projections, relative to the expanded form's.

    On an H200 with 16 heads: `mla_sm90.py` 670 to 690 TFLOP/s, the Triton kernel for either form
    220 (512 tokens) to 440.
    """
    return 1.0 if why_not_mla_sm90(gpu, SM90_PREFILL_ROWS, shape) else 2.0


def choose_mla_splits(
    gpu: GpuInfo, q_rows: int, shape: LatentShape, batch_size: int, kv_len_ub: int
) -> int:
    """How many splits of the context fill the device: a CTA takes a whole SM.

    A split of 64 rows has partial results of 128 KiB, so a short context is cut into fewer.
    """
    block_m = mla_tile_config(gpu, q_rows, shape).block_m
    if why_not_mla_sm90(gpu, q_rows, shape) is None:
        block_m = SM90_LATENT_ROWS
    tiles = -(-q_rows // block_m) * batch_size
    most = -(-kv_len_ub // (2 * MIN_SPLIT_LEN if block_m == 64 else MIN_SPLIT_LEN))
    return max(1, min(gpu.num_sms // tiles, most, MAX_SPLITS))


def expanded_tile_config(gpu: GpuInfo, head_dim: int, v_dim: int, dtype: torch.dtype) -> TileConfig:
    """The tile of a prefill CTA over expanded K and V (MLA): a tile is of one head."""
    row_bytes = (padded(head_dim) + padded(v_dim)) * dtype.itemsize
    if gpu.interpreted:
        return TileConfig(16, 16, 4, 1)
    if dtype == torch.float32:
        return TileConfig(32, 16, 4, 1)
    if gpu.amd and gpu.warp_size == 32:
        return TileConfig(32, 16, 8, 1)
    if gpu.amd:
        return TileConfig(128, 64, 8, 1) if row_bytes <= 768 else TileConfig(64, 32, 8, 1)
    if gpu.capability < 90 or gpu.smem_bytes < 160 << 10:
        return TileConfig(128, 32, 8, 2) if row_bytes <= 768 else TileConfig(64, 32, 8, 2)
    return TileConfig(128, 128 if row_bytes <= 768 else 64, 8, 2)
