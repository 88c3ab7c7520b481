"""FlashInfer's MLA with absorbed projections, planned on the host as `flashinfer.py` is.

One wrapper serves prompt chunks, decode, verification and draft extend; the latent and the rope
part are views of one pool. (flashinfer.mla.BatchMLAPagedAttentionWrapper, 0.6.15.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.attention.base import (
    AttentionBatch,
    AttentionSpec,
    Buffers,
    DecodeShape,
    HostBatch,
    Plan,
)
from forerun.attention.capabilities import AttentionNeed, Capabilities, HostLengths, Mask
from forerun.attention.flashinfer import ARCHS, WORKSPACE_BYTES
from forerun.attention.host_pages import PageLists
from forerun.attention.packages import FLASHINFER
from forerun.attention.paged import LATENT_ROW, LatentLibraryBackend, PagedPlan, PagedTokens
from forerun.kvcache.pools import ModelPools


@dataclass
class MlaPasses(Buffers):
    """Wrappers by mask, and what they were planned for last."""

    wrappers: dict[Mask, Any]
    shape: DecodeShape | None = None  # None: prompt chunks
    lists: PageLists | None = None
    scale: float = 0.0  # that the plans were made with


@dataclass
class FlashInferMlaPlan(PagedPlan):
    passes: MlaPasses


class FlashInferMla(LatentLibraryBackend):
    name = "flashinfer_mla"
    package = FLASHINFER
    module = "flashinfer.mla"
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        archs=ARCHS,
        masks=frozenset({Mask.CAUSAL, Mask.BLOCK}),
        windows=frozenset(),
        dtypes=(torch.bfloat16, torch.float16),
        page_sizes=(16, 32, 64),
        dense=False,
        mla=True,
        latent_row=LATENT_ROW,
        host_lengths=HostLengths.EXACT,
        host_page_table=True,
    )

    def __init__(self, need: AttentionNeed, pools: ModelPools) -> None:
        super().__init__(need, pools)
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=pools.device)
        self._kernels = "fa3" if need.arch == "sm_90" else "fa2"
        # Plans hold the softmax scale, which the first layer tells: in a warm-up, before capture.
        self._scale = 1.0
        # Two, in turn: see `FlashInfer`.
        self._prefill = [MlaPasses(self._wrappers(None)) for _ in range(2)]

    def allocate(self, shape: DecodeShape) -> MlaPasses:
        return MlaPasses(self._wrappers(shape), shape)

    def prepare(self, buffers: Buffers, host: HostBatch) -> None:
        assert isinstance(buffers, MlaPasses) and buffers.shape is not None
        self._plan(buffers, PageLists.of_step(buffers.shape, host, self.pools.page_size))

    def plan(self, batch: AttentionBatch, buffers: Buffers | None = None) -> FlashInferMlaPlan:
        tokens = PagedTokens.of(batch, self.pools.page_size)
        if batch.q_len is None:
            buffers = self._prefill.pop(0)
            self._prefill.append(buffers)
            self._plan(buffers, PageLists.of_chunks(batch, self.pools.page_size))
        assert isinstance(buffers, MlaPasses)
        return FlashInferMlaPlan(tokens, buffers)

    def attend_latent(self, plan: Plan, layer: int, spec: AttentionSpec, q: Tensor) -> Tensor:
        assert isinstance(plan, FlashInferMlaPlan)
        passes = plan.passes
        if passes.scale != spec.scale:
            self._scale = spec.scale
            assert passes.lists is not None
            self._plan(passes, passes.lists)
        sizes = self.latent_sizes(layer)
        latent, rope = self.pools.latent(layer).split_with_sizes(sizes, -1)
        q_latent, q_rope = (part.contiguous() for part in q.split_with_sizes(sizes, -1))
        out = passes.wrappers[spec.mask.mask].run(q_latent, q_rope, latent, rope)
        return out  # type: ignore[no-any-return]

    def _wrappers(self, shape: DecodeShape | None) -> dict[Mask, Any]:
        masks = sorted({mask.mask for mask in self.need.masks}, key=lambda mask: mask.value)
        return {mask: self._wrapper(shape) for mask in masks}

    def _wrapper(self, shape: DecodeShape | None) -> Any:
        make = self.library.BatchMLAPagedAttentionWrapper
        if shape is None:
            return make(self._workspace, backend=self._kernels)
        pages = -(-shape.kv_len_ub // self.pools.page_size)

        def room(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=shape.device)

        return make(
            self._workspace,
            use_cuda_graph=True,
            qo_indptr=room(shape.batch_size + 1),
            kv_indptr=room(shape.batch_size + 1),
            kv_indices=room(shape.batch_size * pages),
            kv_len_arr=room(shape.batch_size),
            backend=self._kernels,
        )

    def _plan(self, passes: MlaPasses, lists: PageLists) -> None:
        passes.lists, passes.scale = lists, self._scale
        for mask, wrapper in passes.wrappers.items():
            wrapper.plan(
                lists.qo_indptr,
                lists.kv_indptr,
                lists.indices,
                lists.kv_lens,
                self.need.num_heads,
                self.need.latent_dim,
                self.need.head_dim - self.need.latent_dim,
                self.pools.page_size,
                mask is Mask.CAUSAL,
                self._scale,
                self.need.dtype,
                self.need.kv_dtype or self.need.dtype,
            )
