"""Paged attention with latent K/V (MLA) and absorbed projections.

Every position keeps one row of Dl latent and Dr rope values, shared by all heads: K is the row, V
its latent part (DeepSeek-V2, arXiv 2405.04434, section 2.1). So it is attention with one K/V head.
The tokens of a request times its query heads are the rows of the tiles, and a block of the pool
is loaded once for K and V.

`mla_decode` is for decoding and verification, where every request has the same number of tokens;
the context is cut into splits as in `decode.py`. `mla_prefill` is for ragged chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.kernels.attention import mla_sm90
from forerun.kernels.attention.decode import (
    CAUSAL,
    LOG2E,
    PREFETCH_LEN,
    MaskSpec,
    combine,
    needs_int64_offsets,
    paged_attention_ref,
)
from forerun.kernels.attention.mla_kernels import mla_attention_kernel
from forerun.kernels.attention.mla_sm90 import MlaArguments
from forerun.kernels.attention.paged_kv import PagedKV
from forerun.kernels.attention.prefill import prefill_attention_ref
from forerun.kernels.attention.tile_map import Spans, TileMap, build_tile_map
from forerun.kernels.attention.tiles import (
    SM90_PREFILL_ROWS,
    LatentShape,
    TileConfig,
    mla_prefill_tile_config,
    mla_tile_config,
    mla_uses_tma,
    padded,
    why_not_mla_sm90,
)
from forerun.kernels.runtime.fp8 import as_bits, fp8_mode
from forerun.kernels.runtime.gpu import gpu_of
from forerun.kernels.runtime.jit import triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options
from forerun.kernels.speculation.ragged import RaggedRows

MAX_PART = 128  # values of a head's partial result that `combine` takes as a head of its own


@dataclass(frozen=True)
class PagedLatent:
    """The latent rows of one layer, and where each of B requests finds its own."""

    pool: Tensor  # [pages, P, Dl + Dr], any float dtype or float8_e4m3fn
    latent_dim: int  # Dl
    page_table: Tensor  # [B, pages] int32
    start: Tensor  # [B] int32, position of each request's first query token
    rows: RaggedRows | None = None  # as `PagedKV.rows`

    @property
    def page_size(self) -> int:
        return self.pool.shape[1]

    @property
    def rope_dim(self) -> int:
        return self.pool.shape[2] - self.latent_dim

    def shape(self, dtype: torch.dtype) -> LatentShape:
        """Returns the shape for queries of `dtype`."""
        return LatentShape(self.latent_dim, self.rope_dim, dtype, self.pool.dtype, self.page_size)

    @property
    def as_kv(self) -> PagedKV:
        """Returns the pool with the row as K and as V of one head."""
        pool = self.pool.unsqueeze(2)
        return PagedKV(pool, pool, self.page_table, self.start, self.rows)


def mla_decode(
    q: Tensor,
    cache: PagedLatent,
    q_len: int,
    mask: MaskSpec,
    scale: float,
    num_splits: int,
    config: TileConfig | None = None,
) -> Tensor:
    """Attention of `q_len` tokens for each of B requests; their rows are in the pool already.

    Under programmatic dependent launch `start`, `page_table` and rows are read before the kernel
    waits for its predecessor, as in `paged_attention`.

    Fastest on Hopper and later where a page holds whole blocks (64 positions), which TMA loads;
    on Hopper `mla_sm90.py` serves then, unless `why_not_mla_sm90` has a reason.

    Args:
        q: [T, Hq, Dl + Dr], with W_UK absorbed; tokens and heads at any stride. T = B * q_len
            without `cache.rows`.
        cache: the latent pool.
        q_len: tokens per request, or at most.
        mask: the mask.
        scale: of the scores.
        num_splits: parts that the context is cut into, from `choose_mla_splits`.
        config: the Triton kernel with this tile.

    Returns:
        [T, Hq, Dl] in q's dtype.
    """
    if not use_triton(q):
        return mla_decode_ref(q, cache, q_len, mask, scale)
    rows = q.shape[1] * q_len
    out, lse = _empty_result(q, cache, num_splits)
    if config is None and not mask.needs_triton and _why_not_sm90(q, cache, rows) is None:
        splits = {"num_splits": num_splits, "q_len": q_len, "lse": lse}
        mla_sm90.launch(_sm90_arguments(q, cache, mask, scale, out, **splits))
    else:
        config = config or mla_tile_config(gpu_of(q.device), rows, cache.shape(q.dtype))
        grid = (triton.cdiv(rows, config.block_m), num_splits, cache.start.shape[0])
        launch = _Launch(cache, mask, scale, config)
        launch(grid, q, out, out if lse is None else lse, q_len)
    if lse is None:
        return out
    total, heads, dim = _out_shape(q, cache)
    combined = torch.empty((total, lse.shape[1], out.shape[3]), dtype=q.dtype, device=q.device)
    combine(out, lse, combined)
    return combined.view(total, heads, dim)


def _empty_result(q: Tensor, cache: PagedLatent, num_splits: int) -> tuple[Tensor, Tensor | None]:
    """The result and None, or partial results [T, Hq * parts, splits, part] and their lse."""
    total, heads, dim = _out_shape(q, cache)
    if num_splits == 1:
        return torch.empty((total, heads, dim), dtype=q.dtype, device=q.device), None
    part = _part(dim)
    sizes = (total, heads * (dim // part), num_splits)
    partial = torch.empty((*sizes, part), dtype=torch.float32, device=q.device)
    return partial, torch.empty(sizes, dtype=torch.float32, device=q.device)


def mla_prefill(
    q: Tensor,
    cache: PagedLatent,
    spans: Spans,
    tile_map: TileMap | None,
    mask: MaskSpec,
    scale: float,
    config: TileConfig | None = None,
) -> Tensor:
    """Attention of ragged chunks; their rows are in the pool already.

    Args:
        q: [T, Hq, Dl + Dr], with W_UK absorbed; tokens and heads at any stride.
        cache: the latent pool.
        spans: (start, tokens) of each request, on the host.
        tile_map: from `build_row_tile_map` with `mla_prefill_tile_rows`, or `config.block_m`; the
            reference implementation needs none.
        mask: causal, or the whole chunk as one block.
        scale: of the scores.
        config: the Triton kernel with this tile.

    Returns:
        [T, Hq, Dl] in q's dtype.
    """
    if not use_triton(q) or tile_map is None:
        return mla_prefill_ref(q, cache, spans, mask, scale)
    out, _ = _empty_result(q, cache, num_splits=1)
    if config is None and _why_not_sm90(q, cache, SM90_PREFILL_ROWS) is None:
        assert tile_map.tokens_per_tile == SM90_PREFILL_ROWS, "the tile map is for other tiles"
        mla_sm90.launch(_sm90_arguments(q, cache, mask, scale, out, tile_map=tile_map.entries))
        return out
    if config is None:
        config = mla_prefill_tile_config(gpu_of(q.device), cache.shape(q.dtype))
    assert tile_map.tokens_per_tile == config.block_m, "the tile map is for other tiles"
    launch = _Launch(cache, mask, scale, config)
    launch((tile_map.entries.shape[0], 1, 1), q, out, out, 0, tile_map.entries)
    return out


def build_row_tile_map(
    spans: Spans, heads: int, block_m: int, upload: Callable[[Tensor], Tensor]
) -> TileMap:
    """`build_tile_map` in rows: every token has `heads` of them; `tokens_per_tile` is `block_m`."""
    rows = [(start * heads, count * heads) for start, count in spans]
    return build_tile_map(rows, block_m, upload)


def _why_not_sm90(q: Tensor, cache: PagedLatent, rows: int) -> str | None:
    if cache.rows is not None:
        return "requests differ in their tokens"
    return why_not_mla_sm90(gpu_of(q.device), rows, cache.shape(q.dtype))


def _sm90_arguments(
    q: Tensor, cache: PagedLatent, mask: MaskSpec, scale: float, out: Tensor, **others: Any
) -> MlaArguments:
    return MlaArguments(
        q,
        cache.pool,
        cache.page_table,
        cache.start,
        out,
        scale * LOG2E,
        causal=mask.mask == CAUSAL,
        window=mask.window,
        tree=mask.tree,
        **others,
    )


@dataclass(frozen=True)
class _Launch:
    """What decode and prefill launch alike."""

    cache: PagedLatent
    mask: MaskSpec
    scale: float
    config: TileConfig

    def __call__(
        self,
        grid: tuple[int, int, int],
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        q_len: int,
        tile_map: Tensor | None = None,
    ) -> None:
        """`out`: the result, or partial results with their `lse`; `q_len` 0: ragged chunks."""
        cache, mask, config = self.cache, self.mask, self.config
        latent, rope = cache.latent_dim, cache.rope_dim
        tma = mla_uses_tma(gpu_of(q.device), cache.shape(q.dtype), config.block_n)
        mla_attention_kernel[grid](
            q, as_bits(cache.pool),
            _tma_descriptor(cache, config, latent) if tma else None,
            _tma_descriptor(cache, config, rope) if tma else None,
            out, lse, cache.page_table, cache.start,
            None if cache.rows is None else cache.rows.first,
            cache.start if tile_map is None else tile_map,
            q if mask.tree is None else mask.tree, self.scale * LOG2E,
            q.stride(0), q.stride(1), cache.page_table.stride(0),
            HEADS=q.shape[1], Q_LEN=q_len, LATENT=latent, ROPE=rope, PAGE_SIZE=cache.page_size,
            MASK=mask.mask, WINDOW=mask.window_constant, SPLIT_KV=grid[1] > 1,
            FP8=fp8_mode(cache.pool), INT64_OFFSETS=needs_int64_offsets(cache.pool), TMA=tma,
            PREFETCH_LEN=PREFETCH_LEN, PART=_part(latent), BLOCK_M=config.block_m,
            BLOCK_N=config.block_n, BLOCK_L=padded(latent), BLOCK_R=padded(rope),
            WORDS=mask.tree_words,
            num_warps=config.num_warps, num_stages=config.num_stages,
            **(pdl_options(q) if tile_map is None else {"PDL": False}),
        )  # fmt: skip


def _tma_descriptor(cache: PagedLatent, config: TileConfig, dim: int) -> Any:
    """Describes blocks [1, N, dim] of the pool."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(cache.pool, [1, config.block_n, dim])


def _out_shape(q: Tensor, cache: PagedLatent) -> tuple[int, int, int]:
    return q.shape[0], q.shape[1], cache.latent_dim


def _part(latent_dim: int) -> int:
    """Values of a head's partial result that are combined as a head of their own."""
    return MAX_PART if latent_dim % MAX_PART == 0 else latent_dim


# --- reference implementations ------------------------------------------------------------------


def mla_decode_ref(
    q: Tensor, cache: PagedLatent, q_len: int, mask: MaskSpec, scale: float
) -> Tensor:
    """Reference implementation of `mla_decode`: the row is K and V, the rope part is cut off."""
    return paged_attention_ref(q, cache.as_kv, q_len, mask, scale)[..., : cache.latent_dim]


def mla_prefill_ref(
    q: Tensor, cache: PagedLatent, spans: Spans, mask: MaskSpec, scale: float
) -> Tensor:
    """Reference implementation of `mla_prefill`."""
    return prefill_attention_ref(q, cache.as_kv, spans, mask, scale)[..., : cache.latent_dim]
