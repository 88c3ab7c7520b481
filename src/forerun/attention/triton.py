"""Attention in our own Triton kernels: NVIDIA and AMD GPUs.

A decode plan can be captured into a device graph: lengths and page tables are read on the device,
and the host's bound only sets into how many splits a context is cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from forerun.attention.base import (
    AttentionBatch,
    AttentionSpec,
    Buffers,
    Plan,
)
from forerun.attention.capabilities import AttentionNeed, Capabilities, Mask
from forerun.attention.latent import LatentExpand
from forerun.attention.paged import (
    PagedBackend,
    SlotPlan,
    WholeContexts,
    chunk_kv_slots,
    step_kv_slots,
)
from forerun.kernels.attention.decode import (
    BLOCK,
    CAUSAL,
    SLIDING_BLOCK,
    TREE,
    MaskSpec,
    paged_attention,
)
from forerun.kernels.attention.fixed_order import (
    TreePaths,
    fixed_order_attention,
    fixed_order_prefill,
)
from forerun.kernels.attention.mla_absorbed import (
    PagedLatent,
    build_row_tile_map,
    mla_decode,
    mla_prefill,
)
from forerun.kernels.attention.mla_expanded import ExpandedKV, expanded_attention
from forerun.kernels.attention.mla_fixed_order import (
    mla_fixed_order_decode,
    mla_fixed_order_prefill,
)
from forerun.kernels.attention.paged_kv import PagedKV
from forerun.kernels.attention.prefill import prefill_attention
from forerun.kernels.attention.tile_map import Spans, TileMap, build_tile_map
from forerun.kernels.attention.tiles import (
    DecodeProblem,
    LatentShape,
    absorbed_speedup,
    best_mla_page_size,
    best_page_size,
    choose_mla_splits,
    choose_num_splits,
    expanded_tile_config,
    mla_fixed_order_tile,
    mla_prefill_tile_rows,
    prefill_tile_config,
)
from forerun.kernels.runtime.fp8 import FP8, as_bits
from forerun.kernels.runtime.gpu import gpu_of, have_triton
from forerun.kvcache.layouts import LatentKV, PagedLayout
from forerun.platform.device import upload

MASKS = {
    Mask.CAUSAL: CAUSAL,
    Mask.BLOCK: BLOCK,
    Mask.SLIDING_BLOCK: SLIDING_BLOCK,
    Mask.CUSTOM: TREE,
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 512
MAX_LATENT, MAX_ROPE = 512, 128  # values of a latent row that MLA kernels take
MAX_EXPANDED = 256  # values of a head of expanded K or V that the kernel for them takes


@dataclass
class TritonPlan(SlotPlan):
    """`tree` [B * q_len, words] int64, bit j: the token sees token j of its request; None: none."""

    batch: AttentionBatch
    kv_slots: Tensor  # [T] int64
    # By what layers keep; latent layers are all alike.
    num_splits: Mapping[PagedLayout, int]
    tile_maps: Mapping[PagedLayout, TileMap]  # of ragged chunks
    tree: Tensor | None = None
    paths: TreePaths | None = None  # of a tree, where sums have a fixed order
    expanded: _Expanded | None = None  # made by the first layer that needs it


@dataclass(frozen=True)
class _Expanded:
    """What layers share that attend to expanded latent rows."""

    contexts: WholeContexts
    tile_map: TileMap


class TritonAttention(PagedBackend):
    name = "triton"

    capabilities = Capabilities(
        devices=frozenset({"cuda", "cpu"}),  # on a CPU: Triton's interpreter
        head_dims=range(16, MAX_HEAD_DIM + 1),
        latent_dims=range(2, MAX_LATENT + MAX_ROPE + 1),
        dtypes=DTYPES,
        kv_dtypes=(*DTYPES, FP8),
        mla=True,
        mixed_layouts=True,
        sinks=True,
        logit_softcap=True,
        fixed_order=True,
        ragged_steps=True,
    )

    @classmethod
    def why_unfit(cls, need: AttentionNeed) -> list[str]:
        reasons = super().why_unfit(need)
        if not have_triton(need.device):
            missing = (
                "Triton is not installed; pip install triton"
                if need.device == "cuda"
                else f"it needs an NVIDIA or AMD GPU, not {need.device}"
            )
            reasons.insert(0, missing)
        if need.mla and not need.uniform:
            reasons.append("it needs latent rows of one shape in all layers")
        if need.mla and need.sinks:
            reasons.append("its latent (MLA) attention has no attention sinks")
        if need.mla and need.logit_softcap:
            reasons.append("its latent (MLA) attention has no logit soft-cap")
        if need.mla and any(m.mask is Mask.CUSTOM and m.window is not None for m in need.masks):
            reasons.append("in its latent (MLA) attention trees have no window")
        if need.mla and any(m.mask is Mask.SLIDING_BLOCK for m in need.masks):
            reasons.append("its latent (MLA) attention has no sliding block mask")
        rope_dim = need.head_dim - need.latent_dim
        if need.mla and not need.dense and (need.latent_dim > MAX_LATENT or rope_dim > MAX_ROPE):
            reasons.append(
                f"latent rows of {need.latent_dim} + {rope_dim} values exceed"
                f" {MAX_LATENT} + {MAX_ROPE}"
            )
        return reasons

    @classmethod
    def preferred_page_size(cls, need: AttentionNeed) -> int:
        device = torch.device(need.device)
        if need.mla:
            return best_mla_page_size(device)
        # Of layers that differ, those of smaller heads have larger blocks.
        dims, kv_dtype = need.head_dims or {need.head_dim}, need.kv_dtype or need.dtype
        return max(best_page_size(device, dim, kv_dtype) for dim in dims)

    def plan(self, batch: AttentionBatch, buffers: Buffers | None = None) -> TritonPlan:
        """K/V before `start` may be read ahead of the kernel that runs before `attend`.

        So a plan without `kv_slots` is made after what is written there: finding them waits for it.
        """
        page, device = self.pools.page_size, batch.start.device
        if batch.q_len is not None:
            kv_slots = step_kv_slots(batch, page)
            tree = None if batch.tree is None else batch.tree.flatten(0, 1)
            splits = {kind: self._num_splits(batch, batch.q_len, kind) for kind in self._kinds}
            paths = None
            if self.need.fixed_order and tree is not None:
                paths = TreePaths.of(tree, batch.q_len)
            return TritonPlan(batch, kv_slots, splits, {}, tree, paths)
        assert batch.ragged is not None
        kv_slots, _ = chunk_kv_slots(batch, page)
        # The upload in `build_tile_map` lies between `kv_slots` and its first reader (see pdl.py).
        tile_maps = {kind: self._tile_map(batch.ragged, device, kind) for kind in self._kinds}
        return TritonPlan(batch, kv_slots, {}, tile_maps)

    @property
    def _kinds(self) -> Iterable[PagedLayout]:
        return self.pools.paged

    def _num_splits(self, batch: AttentionBatch, q_len: int, kind: PagedLayout) -> int:
        need, gpu, size = self.need, gpu_of(batch.start.device), batch.start.shape[0]
        if isinstance(kind, LatentKV):
            rows = need.num_heads * q_len
            return choose_mla_splits(gpu, rows, self._latent_shape, size, batch.kv_len_ub)
        problem = DecodeProblem(
            batch_size=size,
            q_rows=need.num_heads // kind.num_kv_heads * q_len,
            num_kv_heads=kind.num_kv_heads,
            head_dim=kind.head_dim,
            kv_dtype=need.kv_dtype or need.dtype,
            page_size=self.pools.page_size,
            kv_len_ub=batch.kv_len_ub,
        )
        return choose_num_splits(gpu, problem)

    def _tile_map(self, chunks: Spans, device: torch.device, kind: PagedLayout) -> TileMap:
        need, gpu, send = self.need, gpu_of(device), partial(upload, device=device)
        if isinstance(kind, LatentKV):
            tile_rows = mla_prefill_tile_rows(gpu, self._latent_shape)
            if need.fixed_order:
                tile_rows = mla_fixed_order_tile(gpu, self._latent_shape).block_m
            return build_row_tile_map(chunks, need.num_heads, tile_rows, send)
        config = prefill_tile_config(gpu, kind.head_dim, need.dtype)
        group = need.num_heads // kind.num_kv_heads
        return build_tile_map(chunks, max(1, config.block_m // group), send)

    @cached_property
    def absorbed_speedup(self) -> float:
        """Infinite in a fixed order: prompts never expand K and V, which rounds otherwise."""
        if self.need.fixed_order:
            return math.inf
        return absorbed_speedup(gpu_of(self.pools.device), self._latent_shape)

    @property
    def _latent_shape(self) -> LatentShape:
        need = self.need
        return LatentShape(
            need.latent_dim,
            need.head_dim - need.latent_dim,
            need.dtype,
            need.kv_dtype or need.dtype,
            self.pools.page_size,
        )

    def attend(self, plan: Plan, layer: int, spec: AttentionSpec, q: Tensor) -> Tensor:
        assert isinstance(plan, TritonPlan)
        batch, mask = plan.batch, _mask(plan, spec)
        kind = self.pools.layout.paged_layer(layer)
        pools = self.pools.k(layer), self.pools.v(layer)
        kv = PagedKV(*pools, batch.page_table, batch.start, batch.rows)
        if self.need.fixed_order and batch.q_len is not None:
            ub, paths = batch.kv_len_ub, plan.paths
            return fixed_order_attention(q, kv, batch.q_len, mask, spec.scale, ub, paths)
        if batch.q_len is not None:
            splits = plan.num_splits[kind]
            return paged_attention(q, kv, batch.q_len, mask, spec.scale, splits)
        assert batch.ragged is not None
        tile_map = plan.tile_maps[kind]
        if self.need.fixed_order:
            return fixed_order_prefill(q, kv, tile_map, mask, spec.scale)
        return prefill_attention(q, kv, batch.ragged, tile_map, mask, spec.scale)

    def attend_latent(self, plan: Plan, layer: int, spec: AttentionSpec, q: Tensor) -> Tensor:
        assert isinstance(plan, TritonPlan)
        kind = self.pools.layout.layers[layer]
        assert isinstance(kind, LatentKV)
        batch, mask = plan.batch, _mask(plan, spec)
        pool = self.pools.latent(layer)
        where = batch.page_table, batch.start, batch.rows
        cache = PagedLatent(pool, kind.latent_dim, *where)
        if self.need.fixed_order and batch.q_len is not None:
            more = batch.kv_len_ub, plan.paths
            return mla_fixed_order_decode(q, cache, batch.q_len, mask, spec.scale, *more)
        if batch.q_len is not None:
            splits = plan.num_splits[kind]
            return mla_decode(q, cache, batch.q_len, mask, spec.scale, splits)
        assert batch.ragged is not None
        tile_map = plan.tile_maps[kind]
        if self.need.fixed_order:
            return mla_fixed_order_prefill(q, cache, tile_map, mask, spec.scale)
        return mla_prefill(q, cache, batch.ragged, tile_map, mask, spec.scale)

    def attend_latent_prefill(
        self,
        plan: Plan,
        batch: AttentionBatch,
        layer: int,
        spec: AttentionSpec,
        q: Tensor,
        expand: LatentExpand,
    ) -> Tensor:
        assert isinstance(plan, TritonPlan)
        assert batch.ragged is not None
        dims, device = expand.dims, q.device
        if max(dims.qk, dims.v) > MAX_EXPANDED:
            return super().attend_latent_prefill(plan, batch, layer, spec, q, expand)
        if plan.expanded is None:
            tile = expanded_tile_config(gpu_of(device), dims.qk, dims.v, q.dtype)
            send = partial(upload, device=device)
            tile_map = build_tile_map(batch.ragged, tile.block_m, send)
            plan.expanded = _Expanded(WholeContexts.of(batch, self.pools.page_size), tile_map)
        contexts, pool = plan.expanded.contexts, self.pools.latent(layer)
        stored = as_bits(pool).flatten(0, 1).index_select(0, contexts.kv_slots)
        rows = stored.view(pool.dtype).to(q.dtype)
        parts = []
        for heads in expand.head_groups(rows.shape[0], q.element_size()):
            kv = ExpandedKV(*expand(rows, heads), contexts.cu_kv_lens)
            tile_map, window = plan.expanded.tile_map, spec.mask.window
            parts.append(
                expanded_attention(q[:, heads], kv, batch.ragged, tile_map, spec.scale, window)
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _mask(plan: TritonPlan, spec: AttentionSpec) -> MaskSpec:
    mask = TREE if plan.tree is not None else MASKS[spec.mask.mask]
    return MaskSpec(mask, spec.mask.window, plan.tree, spec.sinks, spec.logit_softcap)
