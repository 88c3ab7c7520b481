"""GEMM dispatch: which implementation and configuration computes a GEMM [M, K] x [N, K]ᵀ.

The choice is a tuned configuration (`TUNED`, found by `forerun_bench.kernels.gemm --tune`), a
default for shapes that were not tuned, or None: the vendor's library (cuBLAS, hipBLAS). The
defaults serve up to 32 tokens, on Hopper up to 128. Larger GEMMs go to the library, except the
gate/up projection of large prefill chunks on Hopper, whose SiLU-mul is fused.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from forerun.kernels.gemm.config import (
    BLOCK_K_SM90,
    GemmConfig,
    Sm90Fp8GemmConfig,
    Sm90GemmConfig,
    TritonGemmConfig,
    m_bucket,
)
from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import GpuInfo

MAX_DEFAULT_M = 32  # largest M for the untuned Triton configuration
MAX_DEFAULT_M_SM90 = 128
MAX_FP8_M = 128
MIN_BLOCK_N_SM90 = 32  # rows of W: of the narrowest tile that the default for Hopper takes
MAX_PARTIALS_M = 256  # more tokens have large partials, and tiles enough without
MAX_BLOCK_N_OF_SLICES = 160  # of a tile of which a thread keeps two sums for each output
# Gate/up with SiLU-mul for M >= LARGE_M on Hopper. With fewer tokens, its tiles may leave too many
# SMs idle in the last wave.
LARGE_M = 2048
LARGE_M_SILU_MUL = Sm90GemmConfig(256, cluster_m=2, group_m=8)

GemmChoice = GemmConfig | None  # None: the library

# Compute capability -> (N, K) -> bucket of M -> choice.
TUNED: dict[int, dict[tuple[int, int], dict[int, GemmChoice]]] = {
    # One H200: Qwen3-8B's layers and LM head, and its block draft.
    90: {
        (6144, 4096): {  # qkv_proj
            16: Sm90GemmConfig(48, consumer_warpgroups=1),
            32: Sm90GemmConfig(48, consumer_warpgroups=1),
            64: Sm90GemmConfig(48, consumer_warpgroups=1),
            128: Sm90GemmConfig(96, consumer_warpgroups=1, cluster_m=2),
        },
        (4096, 4096): {  # o_proj
            16: Sm90GemmConfig(64, consumer_warpgroups=1, split_k=2),
            32: Sm90GemmConfig(64, consumer_warpgroups=1, split_k=2),
            64: Sm90GemmConfig(32, consumer_warpgroups=1),
            128: Sm90GemmConfig(128, consumer_warpgroups=1, cluster_m=2, split_k=2),
        },
        (24576, 4096): {  # gate_up_proj
            16: TritonGemmConfig(64, 128, 384, num_stages=3, swap_ab=True),
            32: TritonGemmConfig(64, 128, 384, num_stages=3, swap_ab=True, prefetch_k=0),
            64: Sm90GemmConfig(192, consumer_warpgroups=1),
            128: Sm90GemmConfig(192),
        },
        (4096, 12288): {  # down_proj
            16: Sm90GemmConfig(64, consumer_warpgroups=1, split_k=2),
            32: Sm90GemmConfig(64, consumer_warpgroups=1, split_k=2),
            64: Sm90GemmConfig(64, consumer_warpgroups=1, split_k=2),
            128: Sm90GemmConfig(128, consumer_warpgroups=1, cluster_m=2, split_k=2),
        },
        (151936, 4096): {  # lm_head
            16: Sm90GemmConfig(192, consumer_warpgroups=1),
            32: TritonGemmConfig(64, 128, 2374, num_stages=3, swap_ab=True, prefetch_k=0),
            64: Sm90GemmConfig(192, consumer_warpgroups=1),
            128: Sm90GemmConfig(192),
        },
        (4096, 20480): {  # the draft's fc
            16: Sm90GemmConfig(32, consumer_warpgroups=1),
            32: Sm90GemmConfig(32, consumer_warpgroups=1),
            64: Sm90GemmConfig(32, consumer_warpgroups=1),
            128: Sm90GemmConfig(64, consumer_warpgroups=1, cluster_m=2),
        },
        (10240, 4096): {  # the draft's context K/V
            16: Sm90GemmConfig(96, consumer_warpgroups=1),
            32: Sm90GemmConfig(96, consumer_warpgroups=1),
            64: Sm90GemmConfig(96, consumer_warpgroups=1),
            128: Sm90GemmConfig(160, consumer_warpgroups=1, cluster_m=2),
        },
    }
}


def choose_gemm(n: int, k: int, m: int, gpu: GpuInfo, partials: bool = False) -> GemmChoice:
    """How to multiply `m` tokens by a bfloat16 weight [n, k].

    `partials`: the next kernel can add up split-K partials.
    """
    bucket = m_bucket(m)
    tuned, hopper = TUNED.get(0 if gpu.amd else gpu.capability, {}).get((n, k)), _has_sm90(gpu)
    if tuned is not None:
        choice = tuned.get(bucket)
        if hopper or not isinstance(choice, Sm90GemmConfig):
            return choice
    if hopper and bucket <= MAX_DEFAULT_M_SM90:
        return default_sm90_config(n, k, bucket, gpu, partials)
    return default_triton_config(gpu) if bucket <= MAX_DEFAULT_M else None


def choose_fixed_order_gemm(
    n: int, k: int, m: int, gpu: GpuInfo, partials: bool = False
) -> GemmConfig:
    """How to multiply any number of tokens such that the order of sums is one.

    Each output is one chain of products along K or, where a weight has few rows, the sum of two, of
    the halves of K. Few tokens have these computed by CTAs of their own if `partials`, the next
    kernel can add them up; else one CTA adds up both. Tiles may differ with M.
    """
    if _has_sm90(gpu) and n % 8 == 0 and k % (2 * BLOCK_K_SM90) == 0:
        return _fixed_order_sm90(n, k, m_bucket(m), gpu, partials)
    block_m = min(128, m_bucket(m))
    tiles = -(-n // 64) * -(-m_bucket(m) // block_m)
    hopper = gpu.capability == 90 and not gpu.amd
    block_k = 64 if gpu.amd else 128
    return TritonGemmConfig(64, block_k, tiles, 4, 2 if gpu.amd else 4, swap_ab=hopper)


@cache
def _fixed_order_sm90(n: int, k: int, bucket: int, gpu: GpuInfo, partials: bool) -> Sm90GemmConfig:
    """The default up to 128 tokens; beyond, the widest tiles among those that fill the SMs best."""
    slices = 2 if n <= MIN_BLOCK_N_SM90 * gpu.num_sms else 1
    if bucket <= MAX_DEFAULT_M_SM90:
        split_k = slices if partials else 1
        tuned = TUNED.get(gpu.capability, {}).get((n, k), {}).get(bucket)
        if not isinstance(tuned, Sm90GemmConfig) or tuned.split_k != split_k:
            tuned = _best_sm90_config(n, bucket, gpu, (split_k,))
        return replace(tuned, k_slices=slices // split_k)
    cluster_m = 2 if bucket > 128 else 1
    clusters = -(-bucket // (128 * cluster_m))
    options = []
    for split_k in (1, slices) if partials and bucket <= MAX_PARTIALS_M else (1,):
        k_slices = slices // split_k
        for block_n in (96, 128, 192, 256) if k_slices == 1 else (96, 128, MAX_BLOCK_N_OF_SLICES):
            tiles = split_k * clusters * -(-n // block_n)
            waves = -(-tiles // (gpu.num_sms // cluster_m))
            # A tile takes as long as it is wide and K is long, and some time to begin and to store.
            cost = waves * (block_n + 32) / split_k
            config = Sm90GemmConfig(
                block_n, cluster_m=cluster_m, split_k=split_k, group_m=8, k_slices=k_slices
            )
            options.append((cost, -block_n, config))
    return min(options)[2]


def choose_fp8_gemm(
    n: int, k: int, m: int, gpu: GpuInfo, group: int = 0, partials: bool = False
) -> GemmChoice:
    """`choose_gemm` for an e4m3 weight; `group`: columns that share a scale, 0: all."""
    if m > MAX_FP8_M:
        return None
    if fp8_sm90_serves(n, k, gpu, group):
        return choose_fp8_sm90(n, k, m, gpu, group, partials)
    block_k = 64 if gpu.amd else 128
    if group % block_k:
        return None
    hopper = gpu.capability == 90 and not gpu.amd
    return TritonGemmConfig(64, block_k, 2 * gpu.num_sms, 4, 2 if gpu.amd else 4, swap_ab=hopper)


def fp8_sm90_serves(n: int, k: int, gpu: GpuInfo, group: int) -> bool:
    """Whether the kernel for e4m3 weights on Hopper computes all GEMMs of up to 128 tokens."""
    return _has_sm90(gpu) and n % 8 == 0 and k % 128 == 0 and group in (0, 128)


@cache
def choose_fp8_sm90(
    n: int, k: int, m: int, gpu: GpuInfo, group: int = 0, partials: bool = False
) -> Sm90Fp8GemmConfig:
    """How sums are added up (`k_groups`, `split_k`) depends on the shape alone, so results do not
    depend on the number of tokens. Few tiles: K is split, among CTAs if the next kernel adds up
    the partials, else between two warpgroups. Many: as many rows per CTA as fill the SMs.
    """
    tiles = -(-n // 64)
    if tiles <= gpu.num_sms:
        if not partials:
            return Sm90Fp8GemmConfig(1, k_groups=2)
        splits = [
            s for s in (1, 2, 4, 8) if k % (128 * s) == 0 and -(-tiles // 2) * s <= gpu.num_sms
        ]
        return Sm90Fp8GemmConfig(2, split_k=max(splits))
    spills = group > 0 and m > 64
    options = [Sm90Fp8GemmConfig(rows) for rows in ((1, 2) if spills else (1, 2, 3))]
    busy = {c: _utilization(-(-n // c.block_n), gpu) for c in options}
    return max(c for c in options if busy[c] > 0.91 * max(busy.values()))


def _utilization(ctas: int, gpu: GpuInfo) -> float:
    """Returns how busy the SMs are, over all waves."""
    return ctas / -(-ctas // gpu.num_sms) / gpu.num_sms


def choose_gemm_silu_mul(n: int, k: int, m: int, gpu: GpuInfo) -> GemmChoice:
    """`choose_gemm` for a gate/up projection [n, k] with SiLU-mul in the epilogue."""
    if m < LARGE_M or n % 16 or k % BLOCK_K_SM90 or not _has_sm90(gpu):
        return choose_gemm(n, k, m, gpu)
    return LARGE_M_SILU_MUL


def _has_sm90(gpu: GpuInfo) -> bool:
    """Whether the CUDA C++ kernel for Hopper can run."""
    return gpu.capability == 90 and not (gpu.amd or gpu.interpreted) and nvrtc.available()


def default_triton_config(gpu: GpuInfo) -> TritonGemmConfig:
    """Two CTAs per SM, with tiles that fit into 64 KiB of LDS on AMD."""
    block_k = 64 if gpu.amd else 128
    return TritonGemmConfig(64, block_k, 2 * gpu.num_sms, num_stages=2 if gpu.amd else 4)


@cache
def default_sm90_config(
    n: int, k: int, bucket: int, gpu: GpuInfo, partials: bool = False
) -> Sm90GemmConfig | None:
    """The configuration that reads least among those with nearly the best SM utilization.

    None: the shape does not meet the kernel's alignment. For qkv_proj, gate_up_proj and down_proj
    of Qwen3-8B, the result is the tuned configuration.
    """
    if n % 8 or k % (2 * BLOCK_K_SM90):
        return None
    return _best_sm90_config(n, bucket, gpu, _splits_of_k(n, k, bucket, gpu) if partials else (1,))


def _best_sm90_config(n: int, bucket: int, gpu: GpuInfo, splits: tuple[int, ...]) -> Sm90GemmConfig:
    options = []
    for warpgroups, cluster_m in ((1, 1),) if bucket <= 64 else ((2, 1), (1, 2)):
        for split_k in splits:
            for block_n in range(MIN_BLOCK_N_SM90, 257, 16 * cluster_m):
                ctas = split_k * cluster_m * -(-n // block_n)
                waves = -(-ctas // gpu.num_sms)
                config = Sm90GemmConfig(block_n, warpgroups, cluster_m, split_k)
                read = waves * (config.block_m + block_n) / split_k
                options.append((ctas / waves / gpu.num_sms, (read, -block_n), config))
    best = max(utilization for utilization, _, _ in options)
    return min((cost, config) for busy, cost, config in options if busy > 0.91 * best)[1]


def _splits_of_k(n: int, k: int, bucket: int, gpu: GpuInfo) -> tuple[int, ...]:
    """Split K worth trying if the partials can be left to the next kernel: where N is small.

    If even the narrowest tiles leave half of the SMs idle, K is split in up to four, so that wider
    tiles fill them: x is read for each tile. Few tokens only, whose partials are small.
    """
    if bucket <= MAX_DEFAULT_M and 2 * -(-n // MIN_BLOCK_N_SM90) <= gpu.num_sms:
        return tuple(split_k for split_k in (1, 2, 4) if k % (split_k * BLOCK_K_SM90) == 0)
    return (1, 2) if k >= 2 * n else (1,)
