"""FlashInfer's paged attention: planned on the host, for every mask of every step.

`plan()` of a wrapper splits the work over CTAs from exact lengths on the host, so a replay after
lengths changed needs it again; it runs in `prepare`, and the captured `run` reads the wrapper's
buffers. The engine therefore waits for each step's result (`HostLengths.EXACT`).

Decode steps use the prefill wrapper with its fa2 kernels for any number of tokens: they split long
contexts, and for one token they are faster than the decode wrapper. fa3 has no such split; it
serves prompt chunks on Hopper. (flashinfer.BatchPrefillWithPagedKVCacheWrapper, 0.6.15.)
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
from forerun.attention.capabilities import (
    AttentionNeed,
    Capabilities,
    HostLengths,
    LayerMask,
    Mask,
)
from forerun.attention.host_pages import PageLists
from forerun.attention.packages import FLASHINFER
from forerun.attention.paged import LibraryBackend, PagedPlan, PagedTokens
from forerun.kernels.runtime.gpu import gpu_of
from forerun.kernels.speculation.tree import unpack_bits
from forerun.kvcache.pools import ModelPools

ARCHS = frozenset({"sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"})
WORKSPACE_BYTES = 256 << 20  # partial results of split contexts, at least
INDEX_BYTES = 1 << 20  # a plan's indices, a few per CTA and token
TREE = LayerMask(Mask.CUSTOM)
CTAS_PER_SM = 2


def split_bytes(shape: DecodeShape, need: AttentionNeed, num_sms: int) -> int:
    """Bytes of partial results that fa2 sets aside for a captured shape, in float32.

    As its planner counts them: a tile of query rows (those of a K/V head's group) for every CTA
    that a captured launch may have.
    """
    group = need.num_heads // need.num_kv_heads
    rows = shape.batch_size * shape.q_len
    longest = (rows - shape.batch_size + 1) * group
    tile = 128 if longest > 64 else 64 if longest > 16 else 16
    tiles = -(-rows * group // tile) + shape.batch_size - 1
    tiles = max(tiles, CTAS_PER_SM * num_sms // need.num_kv_heads)
    return need.num_heads * tiles * tile * (need.head_dim + 1) * 4 + (1 << 10)


class TreeMask:
    """FlashInfer's packed mask of a decode shape, written on the device.

    A request's mask is W x kv_len bits, row by row, lowest bit of a byte first. Every bit is set
    but those of a step's own tokens that are no ancestors.
    """

    def __init__(self, shape: DecodeShape) -> None:
        requests, width = shape.batch_size, shape.q_len
        self._stride = -(-width * shape.kv_len_ub // 8)  # bytes of a request
        device = shape.device
        self.bits = torch.empty(requests * self._stride, dtype=torch.uint8, device=device)
        first = torch.arange(requests + 1, dtype=torch.int32, device=device)
        self.indptr = first * self._stride  # [B + 1] int32: first byte of each request

    def write(self, start: Tensor, tree: Tensor) -> None:
        """start [B] int32; tree [B, W, words] int64, of `AttentionBatch`."""
        width, token = tree.shape[1], torch.arange(tree.shape[1], device=tree.device)
        begin = start.long().view(-1, 1, 1)
        position = token.view(-1, 1) * (begin + width) + begin + token  # [B, W, W], in bits
        byte = self.indptr[:-1].long().view(-1, 1, 1) + position // 8
        hidden = (~unpack_bits(tree, width)).long()
        # Bits of a byte are distinct, so adding -2^i modulo 256 clears them, in any order.
        cleared = (-(hidden << (position % 8))).to(torch.uint8)
        self.bits.fill_(255).scatter_add_(0, byte.flatten(), cleared.flatten())


@dataclass
class FlashInferBuffers(Buffers):
    shape: DecodeShape
    wrappers: dict[LayerMask, Any]
    tree: TreeMask | None


@dataclass
class FlashInferPlan(PagedPlan):
    wrappers: dict[LayerMask, Any]
    tree: bool = False


class FlashInfer(LibraryBackend):
    name = "flashinfer"
    package = FLASHINFER
    module = "flashinfer"
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        archs=ARCHS,
        windows=frozenset({Mask.CAUSAL}),
        head_dims=(64, 128, 256),
        dtypes=(torch.bfloat16, torch.float16),
        page_sizes=(1, 16, 32, 64, 128),
        host_lengths=HostLengths.EXACT,
        host_page_table=True,
    )

    def __init__(self, need: AttentionNeed, pools: ModelPools) -> None:
        super().__init__(need, pools)
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=pools.device)
        # Two sets, in turn: a wrapper's plan is copied from pinned memory while the step before
        # may still wait for its own; with overlap at most one step is in flight.
        self._prefill = [self._prefill_wrappers() for _ in range(2)]

    def allocate(self, shape: DecodeShape) -> FlashInferBuffers:
        size = split_bytes(shape, self.need, gpu_of(shape.device).num_sms)
        if size > self._workspace.numel():  # the largest shape is captured first
            self._workspace = torch.empty(size, dtype=torch.uint8, device=shape.device)
        tree = TreeMask(shape) if shape.tree else None
        masks = [TREE if shape.tree and m.mask is Mask.CAUSAL else m for m in self._masks]
        wrappers = {mask: self._step_wrapper(shape, tree) for mask in dict.fromkeys(masks)}
        return FlashInferBuffers(shape, wrappers, tree)

    def prepare(self, buffers: Buffers, host: HostBatch) -> None:
        assert isinstance(buffers, FlashInferBuffers)
        lists = PageLists.of_step(buffers.shape, host, self.pools.page_size)
        for mask, wrapper in buffers.wrappers.items():
            self._plan(wrapper, mask, lists)

    def plan(self, batch: AttentionBatch, buffers: Buffers | None = None) -> FlashInferPlan:
        tokens = PagedTokens.of(batch, self.pools.page_size)
        if batch.q_len is None:
            wrappers = self._prefill.pop(0)
            self._prefill.append(wrappers)
            lists = PageLists.of_chunks(batch, self.pools.page_size)
            for mask, wrapper in wrappers.items():
                self._plan(wrapper, mask, lists)
            return FlashInferPlan(tokens, wrappers)
        assert isinstance(buffers, FlashInferBuffers)
        if buffers.tree is not None:
            assert batch.tree is not None
            buffers.tree.write(batch.start, batch.tree)
        return FlashInferPlan(tokens, buffers.wrappers, buffers.tree is not None)

    def attend(self, plan: Plan, layer: int, spec: AttentionSpec, q: Tensor) -> Tensor:
        assert isinstance(plan, FlashInferPlan)
        mask = TREE if plan.tree and spec.mask.mask is Mask.CAUSAL else spec.mask
        out = plan.wrappers[mask].run(
            q,
            (self.pools.k(layer), self.pools.v(layer)),
            q_scale=spec.scale,
            out=torch.empty_like(q),
        )
        return out  # type: ignore[no-any-return]

    @property
    def _masks(self) -> list[LayerMask]:
        """Returns the masks of the layers; a tree comes with the batch."""
        return [mask for mask in self.need.masks if mask.mask is not Mask.CUSTOM]

    def _prefill_wrappers(self) -> dict[LayerMask, Any]:
        wrappers = {}
        for mask in self._masks:
            fa3 = self.need.arch == "sm_90" and mask.window is None
            wrappers[mask] = self.library.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, "NHD", backend="fa3" if fa3 else "fa2"
            )
        return wrappers

    def _step_wrapper(self, shape: DecodeShape, tree: TreeMask | None) -> Any:
        """A wrapper whose `run` can be captured."""
        pages = -(-shape.kv_len_ub // self.pools.page_size)

        def room(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=shape.device)

        wrapper = self.library.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=room(shape.batch_size + 1),
            paged_kv_indptr_buf=room(shape.batch_size + 1),
            paged_kv_indices_buf=room(shape.batch_size * pages),
            paged_kv_last_page_len_buf=room(shape.batch_size),
            custom_mask_buf=None if tree is None else tree.bits,
            mask_indptr_buf=None if tree is None else tree.indptr,
            backend="fa2",
        )
        # Its own 8 MB, and as much pinned memory, would be many GB over all captured steps.
        indices = torch.empty(INDEX_BYTES, dtype=torch.uint8, device=shape.device)
        wrapper.reset_workspace_buffer(self._workspace, indices)
        return wrapper

    def _plan(self, wrapper: Any, mask: LayerMask, lists: PageLists) -> None:
        """The scale is given to `run`; a tree's mask is in the wrapper's buffers."""
        need = self.need
        wrapper.plan(
            lists.qo_indptr,
            lists.kv_indptr,
            lists.indices,
            lists.last_page_len,
            need.num_heads,
            need.num_kv_heads,
            need.head_dim,
            self.pools.page_size,
            causal=mask.mask is Mask.CAUSAL,
            sm_scale=1.0,
            window_left=-1 if mask.window is None else mask.window - 1,
            q_data_type=need.dtype,
            kv_data_type=need.kv_dtype or need.dtype,
        )
