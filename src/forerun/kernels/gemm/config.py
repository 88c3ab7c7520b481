"""How a GEMM y = x Wᵀ is tiled: M tokens, N output features, K input features."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_K_SM90 = 64  # 128 bytes of bfloat16, the width of the shared-memory swizzle


@dataclass(frozen=True)
class TritonGemmConfig:
    """Tiling of the stream-K kernel (`gemm_triton.py`). Blocks are in elements."""

    block_n: int = 64  # rows of W per tile; with SiLU-mul, half of them gate, half up
    block_k: int = 128
    num_ctas: int = 128
    num_warps: int = 4
    num_stages: int = 4
    swap_ab: bool = False  # W as the left operand: Hopper's wgmma, which needs block_n >= 64
    prefetch_k: int = 256  # columns of its first W tile that a CTA prefetches into L2 (PDL)
    early_launch: bool = True  # PDL: trigger the next kernel at the start, not after the last load
    block_m: int = 128  # tokens per tile, if M is that large
    keep_partials: bool = False  # leave split-K partials to the next kernel, if it can sum them


@dataclass(frozen=True, order=True)
class Sm90GemmConfig:
    """Tiling of the warp-specialized kernel for Hopper (`gemm_sm90.py`)."""

    block_n: int  # rows of W per tile; with SiLU-mul, half of them gate, half up
    consumer_warpgroups: int = 2  # 1 or 2; each computes 64 tokens of a tile
    cluster_m: int = 1  # 1 or 2 CTAs along M that share W by multicast
    split_k: int = 1  # CTAs per tile along K; more than 1 leaves partials to the next kernel
    # Tile rasterization: so many clusters along M advance together along N, so that their tiles of
    # x stay in L2. 0: all of them.
    group_m: int = 0
    free_smem: int = 0  # bytes that stay free for a CTA of the next kernel, which PDL starts early
    # 2: a CTA adds up the two halves of K each on its own, and then both, as the next kernel does
    # with the partials of `split_k` 2.
    k_slices: int = 1

    @property
    def block_m(self) -> int:
        return 64 * self.consumer_warpgroups


@dataclass(frozen=True, order=True)
class Sm90Fp8GemmConfig:
    """Tiling of the kernel for e4m3 weights on Hopper (`gemm_fp8_sm90.py`), up to 128 tokens."""

    row_groups: int  # 1 to 3 warpgroups along N, 64 rows of W each
    k_groups: int = 1  # 1 or 2 warpgroups that share the blocks of K
    split_k: int = 1  # CTAs per tile along K; more than 1 leaves partials to the next kernel

    block_m = 128  # all tokens

    @property
    def block_n(self) -> int:
        return 64 * self.row_groups


GemmConfig = TritonGemmConfig | Sm90GemmConfig | Sm90Fp8GemmConfig


def m_bucket(m: int) -> int:
    """The number of tokens that M is rounded up to: 16, 32, 64, 128, then multiples of 128."""
    return max(16, 1 << (m - 1).bit_length()) if m <= 128 else -(-m // 128) * 128


def num_tiles(m: int, n: int, config: GemmConfig) -> int:
    """Output tiles of a GEMM; the same for all M of a bucket."""
    bucket = m_bucket(m)
    return -(-bucket // min(config.block_m, bucket)) * -(-n // config.block_n)


def uses_split_k(config: GemmConfig) -> bool:
    """Whether split-K partials are left to the next kernel, if it can sum them."""
    if isinstance(config, Sm90GemmConfig | Sm90Fp8GemmConfig):
        return config.split_k > 1
    return config.keep_partials
