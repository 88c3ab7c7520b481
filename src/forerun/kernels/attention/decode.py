"""Paged attention for a few tokens per request: decoding, verification, a draft's block.

Every request has the same number of query tokens (`q_len`), or in a ragged pass at most so many
(`PagedKV.rows`): then tiles are as large, and those past a request's tokens are empty. These and
the query heads that share a K/V head are packed into tiles of M = q_len * group rows, so that K/V
is read once for all of them, and the context is cut into splits that run side by side
(flash-decoding, split-KV); a second kernel combines their partial results. The host fixes how many
splits there are; which positions each of them covers follows from the lengths on the device, so a
graph captured for the longest context costs little at a short one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.kernels.attention import decode_sm90
from forerun.kernels.attention.decode_kernels import combine_splits, decode_attention_kernel
from forerun.kernels.attention.decode_sm90 import DecodeArguments
from forerun.kernels.attention.paged_kv import PagedKV
from forerun.kernels.attention.tiles import TileConfig, decode_tile_config, uses_tma
from forerun.kernels.runtime.fp8 import as_bits, fp8_mode
from forerun.kernels.runtime.gpu import GpuInfo, gpu_of
from forerun.kernels.runtime.jit import triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options
from forerun.kernels.speculation.tree import unpack_bits

CAUSAL, BLOCK, TREE, SLIDING_BLOCK = 0, 1, 2, 3  # the masks, as kernels know them
LOG2E = math.log2(math.e)
PREFETCH_LEN = 128  # positions whose K/V a CTA prefetches into L2 while it waits
MIN_SM90_CONTEXT = 16384  # positions that a request may have, from which on `decode_sm90.py` serves
COMBINE_SIZE = 4096  # elements of partial results that a CTA combines at once


@dataclass(frozen=True, eq=False)
class MaskSpec:
    """Which positions a query token attends to; `start` is the position of the first one.

    CAUSAL: a token at p attends to (p - window, p]. BLOCK: to the last `window` positions before
    `start` and to all query tokens of the request. SLIDING_BLOCK, always with a window: to the
    context and all query tokens of the request within (p - window, p + window). TREE: to all
    positions before `start`, and to the query tokens whose bits are set; with a window, of these to
    the last `window` positions, itself included, where a token with n ancestors stands at `start` +
    n. Besides, every token of a head attends to the head's sink, a score without a value (gpt-oss).
    """

    mask: int = CAUSAL
    window: int | None = None
    # [B * q_len, words] int64, bit j: attends to token j; in this order in a ragged pass too
    tree: Tensor | None = None
    sinks: Tensor | None = None  # [Hq] float32, not scaled
    softcap: float | None = None  # of scaled scores s: softcap · tanh(s / softcap)

    @property
    def tree_words(self) -> int:
        """Words of a token's bits; 1 without a tree."""
        return 1 if self.tree is None else self.tree.shape[1]

    @property
    def window_constant(self) -> int:
        """Returns it as kernels take it: -1 without a window."""
        return -1 if self.window is None else self.window

    @property
    def softcap_constant(self) -> float:
        """Returns it as kernels take it: 0 without a soft-cap."""
        return 0.0 if self.softcap is None else self.softcap

    def qk_scale(self, scale: float) -> float:
        """What kernels multiply q · k by: for exp2, or with a soft-cap for `tanh_of`."""
        return scale * LOG2E if self.softcap is None else 2 * LOG2E * scale / self.softcap

    @property
    def needs_triton(self) -> bool:
        """Whether only the Triton kernels have it."""
        tree = self.mask == TREE and (self.window is not None or self.tree_words > 1)
        return self.softcap is not None or tree or self.mask == SLIDING_BLOCK


def paged_attention(
    q: Tensor,
    kv: PagedKV,
    q_len: int,
    mask: MaskSpec,
    scale: float,
    num_splits: int,
    config: TileConfig | None = None,
) -> Tensor:
    """Attention of `q_len` tokens for each of B requests; their K/V is in the pool already.

    Under programmatic dependent launch `start`, `page_table` and the K/V of positions before
    `start` are read before the kernel waits for its predecessor: a kernel without it
    (`compute_kv_slots`) must lie between what writes them and this one. The query tokens' own K/V
    is read after the wait.

    Fastest on Hopper and later where a page holds whole K/V blocks (64 positions; 32 for head dim
    256), which TMA then loads.

    Args:
        q: [T, Hq, D], T = B * q_len without `kv.rows`; tokens at any stride.
        kv: the cache.
        q_len: tokens per request, or at most.
        mask: the mask.
        scale: of the scores.
        num_splits: parts that the context is cut into, from `choose_num_splits`.
        config: instead of the tuned tile.

    Returns:
        [T, Hq, D] in q's dtype.
    """
    if not use_triton(q):
        return paged_attention_ref(q, kv, q_len, mask, scale)
    total, heads, dim = q.shape
    group, batch = heads // kv.num_kv_heads, kv.start.shape[0]
    out = torch.empty((total, heads, dim), dtype=q.dtype, device=q.device)
    partial, lse = out, out
    if num_splits > 1:
        partial = torch.empty((total, heads, num_splits, dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((total, heads, num_splits), dtype=torch.float32, device=q.device)
    sm90 = config is None and not mask.needs_triton
    if sm90 and why_not_decode_sm90(gpu_of(q.device), q, kv, q_len, num_splits) is None:
        causal, scale = mask.mask == CAUSAL, scale * LOG2E
        args = DecodeArguments(q, kv, partial, lse, q_len, scale, causal, mask.window, mask.tree)
        decode_sm90.launch(args)
        combine(partial, lse, out, mask.sinks)
        return out
    if config is None:
        config = _tuned_config(q, kv, q_len, num_splits)
    num_tiles = triton.cdiv(group * q_len, config.block_m)
    tma = uses_tma(gpu_of(q.device), kv.page_size, config.block_n, dim, kv.k.dtype)
    first = None if kv.rows is None else kv.rows.first
    decode_attention_kernel[(kv.num_kv_heads * num_tiles, num_splits, batch)](
        q, as_bits(kv.k), as_bits(kv.v),
        _tma_descriptor(kv.k, config) if tma else None,
        _tma_descriptor(kv.v, config) if tma else None,
        partial, lse, kv.page_table, kv.start, first, q if mask.tree is None else mask.tree,
        mask.sinks, mask.qk_scale(scale), q.stride(0), q.stride(1), kv.page_table.stride(0),
        GROUP=group, KV_HEADS=kv.num_kv_heads, Q_LEN=q_len, DIM=dim, PAGE_SIZE=kv.page_size,
        MASK=mask.mask, WINDOW=mask.window_constant, SPLIT_KV=num_splits > 1,
        FP8=fp8_mode(kv.k), INT64_OFFSETS=needs_int64_offsets(kv.k), TMA=tma,
        PREFETCH_LEN=PREFETCH_LEN, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_D=triton.next_power_of_2(dim), STAGES=config.num_stages,
        SOFTCAP=mask.softcap_constant, WORDS=mask.tree_words,
        num_warps=config.num_warps, num_stages=config.num_stages, **pdl_options(q),
    )  # fmt: skip
    if num_splits > 1:
        combine(partial, lse, out, mask.sinks)
    return out


def why_not_decode_sm90(
    gpu: GpuInfo, q: Tensor, kv: PagedKV, q_len: int, num_splits: int
) -> str | None:
    """Why `decode_sm90.py` cannot serve, or should not; None: it does.

    Up to 16 rows, the Triton kernel's tile of 16 takes less time to compute than to read. What
    counts is the longest context that the page table has room for, which a captured step knows.
    """
    group = q.shape[1] // kv.num_kv_heads
    if gpu.amd or gpu.interpreted or gpu.capability != 90:
        return "it is for Hopper GPUs"
    if kv.rows is not None:
        return "requests differ in their tokens"
    if group * q_len <= 16:
        return "the Triton kernel is as fast up to 16 rows"
    if kv.page_table.shape[1] * kv.page_size < MIN_SM90_CONTEXT:
        return "contexts are short"
    if num_splits == 1:
        return "it leaves partial results, of at least two splits"
    if _num_ctas(q, kv, q_len, num_splits) > gpu.num_sms:
        return "it has one CTA per SM"
    return decode_sm90.why_unfit(q.dtype, kv.k.dtype, q.shape[2], kv.page_size, group)


def _num_ctas(q: Tensor, kv: PagedKV, q_len: int, num_splits: int) -> int:
    """Returns the CTAs of tiles of 64 rows."""
    q_rows = q.shape[1] // kv.num_kv_heads * q_len
    return -(-q_rows // 64) * kv.num_kv_heads * num_splits * kv.start.shape[0]


def _tuned_config(q: Tensor, kv: PagedKV, q_len: int, num_splits: int) -> TileConfig:
    gpu, (_, heads, dim) = gpu_of(q.device), q.shape
    q_rows = heads // kv.num_kv_heads * q_len
    one_cta_per_sm = _num_ctas(q, kv, q_len, num_splits) <= gpu.num_sms
    return decode_tile_config(gpu, q_rows, dim, q.dtype, kv.k.dtype, kv.page_size, one_cta_per_sm)


def needs_int64_offsets(pool: Tensor) -> bool:
    """Whether an element's offset in a pool needs more than 32 bits."""
    return pool.numel() >= 1 << 31


def _tma_descriptor(pool: Tensor, config: TileConfig) -> Any:
    """Describes a pool's K/V blocks: [1, N, D] out of [pages, P, Hkv * D]."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    block = [1, config.block_n, pool.shape[3]]
    return TensorDescriptor.from_tensor(pool.flatten(2), block)


def combine(partial: Tensor, lse: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
    """partial [T, Hq, S, D], lse [T, Hq, S], sinks [Hq] float32 -> out [T, Hq, D]."""
    total, heads, num_splits, dim = partial.shape
    rows, padded = total * heads, triton.next_power_of_2(num_splits)
    most = max(1, COMBINE_SIZE // (padded * triton.next_power_of_2(dim)))
    gpu = gpu_of(out.device)
    fill = triton.next_power_of_2(triton.cdiv(rows, 2 * gpu.num_sms))
    # A warp alone adds up many splits without shared memory, if they fit into its registers.
    fits = 8 <= padded <= COMBINE_SIZE // triton.next_power_of_2(dim)
    one_warp = fits and rows <= 4 * gpu.num_sms and not gpu.amd
    block_rows = 1 if one_warp else min(most, fill)
    combine_splits[(triton.cdiv(rows, block_rows),)](
        partial, lse, out, sinks, rows, num_splits,
        NUM_HEADS=1 if sinks is None else heads,
        DIM=dim, BLOCK_ROWS=block_rows, BLOCK_SPLITS=padded,
        BLOCK_D=triton.next_power_of_2(dim),
        num_warps=1 if one_warp else 4, **pdl_options(out),
    )  # fmt: skip


# --- reference implementation -----------------------------------------------------------------


def paged_attention_ref(q: Tensor, kv: PagedKV, q_len: int, mask: MaskSpec, scale: float) -> Tensor:
    """Reference implementation of `paged_attention`: gathers every page of the table.

    Computes in float32, or in q's dtype where that is wider.
    """
    rows = kv.rows
    if rows is not None:  # as many tokens of every request; what is added is dropped again
        q = rows.unpack(q)
    total, heads, dim = q.shape
    batch = kv.start.shape[0]
    exact = torch.promote_types(q.dtype, torch.float32)
    tile = q.view(batch, q_len, kv.num_kv_heads, heads // kv.num_kv_heads, dim).to(exact)
    k, v = (
        pool[kv.page_table.long()].to(exact).flatten(1, 2)  # [B, L, Hkv, D]
        for pool in (kv.k, kv.v)
    )
    seen = _mask_ref(kv.start, q_len, k.shape[1], mask)  # [B, q_len, L]
    if rows is not None:
        end = (kv.start + rows.widths).view(-1, 1, 1)
        seen = rows.unpack(rows.pack(seen.flatten(0, 1))).view(seen.shape)
        seen = seen & (torch.arange(k.shape[1], device=q.device) < end)
    reached = seen.any(1)[:, :, None, None]
    k, v = k.where(reached, 0.0), v.where(reached, 0.0)
    scores = torch.einsum("bwhgd,blhd->bhgwl", tile, k) * scale
    if mask.softcap is not None:
        scores = mask.softcap * torch.tanh(scores / mask.softcap)
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    if mask.sinks is None:
        weights = scores.softmax(-1)
    else:
        sinks = mask.sinks.to(exact).view(1, kv.num_kv_heads, -1, 1, 1)
        joined = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
        weights = joined.softmax(-1)[..., :-1]
    out = torch.einsum("bhgwl,blhd->bwhgd", weights, v)
    out = out.reshape(total, heads, dim).to(q.dtype)
    return out if rows is None else rows.pack(out)


def _mask_ref(start: Tensor, q_len: int, kv_len: int, mask: MaskSpec) -> Tensor:
    """[B, q_len, kv_len] bool: which positions each token attends to."""
    position = torch.arange(kv_len, device=start.device).view(1, 1, -1)
    begin = start.long().view(-1, 1, 1)
    last = begin + torch.arange(q_len, device=start.device).view(1, -1, 1)
    if mask.mask == TREE:
        assert mask.tree is not None
        offset = position - begin
        own = unpack_bits(mask.tree, q_len).view(-1, q_len, q_len)
        ancestors = own.gather(2, offset.clamp(0, q_len - 1).expand(-1, q_len, -1))
        seen = (offset < 0) | (ancestors & (offset < q_len))
        if mask.window is None:
            return seen
        depth = own.sum(2)  # [B, q_len], 1 for the root
        of_position = depth.gather(1, offset.clamp(0, q_len - 1).squeeze(1)).unsqueeze(1) - 1
        stands = torch.where(offset < 0, position, begin + of_position)
        return seen & (stands >= begin + depth.unsqueeze(2) - mask.window)
    oldest = begin if mask.mask == BLOCK else last + 1
    seen = position <= last if mask.mask == CAUSAL else position < begin + q_len
    if mask.mask == SLIDING_BLOCK:
        assert mask.window is not None
        seen = seen & (position < last + mask.window)
    if mask.window is not None:
        seen = seen & (position >= oldest - mask.window)
    return seen.expand(-1, q_len, -1)
