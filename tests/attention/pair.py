"""A backend beside the plain one, each with its own pools, over chunks and steps of an engine.

Steps go through `ModelAttention` and `StepBuffers`, so backends that plan on the host are prepared
as the engine does it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionNeed,
    AttentionSpec,
    HostBatch,
    LayerMask,
    Mask,
    Plan,
)
from forerun.attention.latent import LatentDims, LatentExpand
from forerun.attention.model_attention import ModelAttention, StepBuffers
from forerun.attention.torch_native import TorchNative
from forerun.kvcache.layouts import DenseKV, LatentKV, ModelLayout
from forerun.kvcache.pools import ModelPools, PoolShape
from tests.kernels.attention_support import random_tree

CAUSAL, BLOCK = LayerMask(), LayerMask(Mask.BLOCK)
REQUESTS = 3
BF16_ERROR = 0.008  # of ||out - reference|| / ||reference||; bfloat16 rounds by 0.002

Span = tuple[int, int]


@dataclass(frozen=True)
class Sizes:
    heads: int
    kv_heads: int
    dim: int
    latent: int = 0  # MLA: Dl of `dim`
    layers: int = 2
    positions: int = 256  # of a request, at most

    def layout(self, dtype: torch.dtype) -> ModelLayout:
        if self.latent:
            kind: DenseKV | LatentKV = LatentKV(self.latent, self.dim - self.latent, dtype)
        else:
            kind = DenseKV(self.kv_heads, self.dim, dtype)
        return ModelLayout((kind,) * self.layers)


class Pair:
    """Three requests in shuffled pages, and the padding slot.

    Every layer attends with each of `masks` in turn (a tree's layers are CAUSAL).
    """

    def __init__(
        self,
        kind: type[AttentionBackend],
        sizes: Sizes,
        page: int,
        masks: Sequence[LayerMask],
        need: AttentionNeed,
    ) -> None:
        """`need`: device, dtype and architecture; the rest is set here."""
        self.sizes, self.masks, self.page = sizes, list(masks), page
        self.device, self.dtype = torch.device(need.device), need.dtype
        self.sinks: Tensor | None = None
        need = replace(
            need,
            head_dim=sizes.dim,
            num_heads=sizes.heads,
            num_kv_heads=sizes.kv_heads,
            masks=frozenset(masks),
            mla=sizes.latent > 0,
            dense=sizes.latent == 0,
            latent_dim=sizes.latent,
        )
        assert kind.why_not(need) == []
        shape = PoolShape(1 + REQUESTS * sizes.positions // page, page)
        pools = [ModelPools(sizes.layout(self.dtype), shape, self.device) for _ in range(2)]
        exact = replace(need, dtype=torch.float32)
        self.subject = kind(need, pools[0])
        self.plain = TorchNative(exact, pools[1])
        self.attention = ModelAttention.of(self.subject)
        ids = torch.randperm(shape.num_pages - 1, generator=torch.Generator().manual_seed(3)) + 1
        self.pages: list[list[int]] = ids.view(REQUESTS, -1).tolist()
        rows = [*self.pages, [0] * len(self.pages[0])]
        self.table = torch.tensor(rows, dtype=torch.int32, device=self.device)
        self.buffers: dict[tuple[int, bool], StepBuffers] = {}
        self.generator = torch.Generator().manual_seed(1)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def prefill(self, spans: Sequence[Span], subject_attends: bool = True) -> None:
        """Chunks (start, tokens); `subject_attends` False: they are only written."""
        batch, count = self.chunks(spans), sum(n for _, n in spans)
        self.compare(batch, None, count, count, self.masks if subject_attends else [])

    def prefill_expanded(
        self, spans: Sequence[Span], spec: AttentionSpec, expand: LatentExpand
    ) -> None:
        """Chunks of MLA with K and V per head."""
        batch, count = self.chunks(spans), sum(n for _, n in spans)
        plans = [(backend, backend.plan(batch)) for backend in (self.subject, self.plain)]
        for layer in range(self.sizes.layers):
            self.write(plans, layer, count)
            q = self.normal(count, self.sizes.heads, expand.dims.qk)
            got, want = (
                backend.attend_latent_prefill(
                    plan, batch, layer, spec, q.to(backend.need.dtype), expand
                )
                for backend, plan in plans
            )
            self.close(got, want)

    def chunks(self, spans: Sequence[Span]) -> AttentionBatch:
        start = torch.tensor([s for s, _ in spans], dtype=torch.int32, device=self.device)
        bound, table = max(s + n for s, n in spans), self.table[: len(spans)]
        return AttentionBatch(table, start, bound, ragged=tuple(spans), host_pages=self.pages)

    def step(self, starts: Sequence[int], q_len: int, tree: Tensor | None = None) -> None:
        """A step of `q_len` tokens of each request and of the padding slot."""
        batch = self.batch(starts, q_len, tree)
        real = q_len * len(starts)
        self.compare(batch, self.prepared(starts, q_len, tree), real + q_len, real, self.masks)

    def batch(
        self, starts: Sequence[int], q_len: int, tree: Tensor | None = None
    ) -> AttentionBatch:
        start = torch.tensor([*starts, 0], dtype=torch.int32, device=self.device)
        return AttentionBatch(self.table, start, self.sizes.positions, q_len=q_len, tree=tree)

    def prepared(self, starts: Sequence[int], q_len: int, tree: Tensor | None) -> StepBuffers:
        key = (q_len, tree is not None)
        if key not in self.buffers:
            self.buffers[key] = StepBuffers(REQUESTS + 1, self.sizes.positions)
        self.buffers[key].begin(HostBatch(list(starts), self.pages[: len(starts)]))
        return self.buffers[key]

    def spec(self, mask: LayerMask) -> AttentionSpec:
        return AttentionSpec(mask, self.sizes.dim**-0.5, sinks=self.sinks)

    def compare(
        self,
        batch: AttentionBatch,
        buffers: StepBuffers | None,
        count: int,
        real: int,
        masks: Sequence[LayerMask],
    ) -> None:
        """`real`: the first tokens; those after them belong to the padding slot."""
        ctx, plan = self.attention.context(batch, buffers), self.plain.plan(batch)
        for layer in range(self.sizes.layers):
            self.write([(ctx.backend, ctx.plan), (self.plain, plan)], layer, count)
            q = self.normal(count, self.sizes.heads, self.sizes.dim)
            for mask in masks:
                got = self.run(ctx.backend)(ctx.plan, layer, self.spec(mask), q)
                want = self.run(self.plain)(plan, layer, self.spec(mask), q.float())
                assert got.shape == want.shape
                self.close(got[:real], want[:real])

    def write(self, plans: Sequence[tuple[AttentionBackend, Plan]], layer: int, count: int) -> None:
        """New K/V of `count` tokens, the same for all."""
        k, v = (self.normal(count, self.sizes.kv_heads, self.sizes.dim) for _ in range(2))
        for backend, plan in plans:
            if self.sizes.latent:
                backend.write_latent(plan, layer, k.squeeze(1))
            else:
                backend.write(plan, layer, k, v)

    def run(self, backend: AttentionBackend) -> Callable[..., Tensor]:
        return backend.attend_latent if self.sizes.latent else backend.attend

    def close(self, got: Tensor, want: Tensor) -> None:
        assert bool(got.isfinite().all())
        if self.dtype is torch.float32:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        else:
            error = float((got.float() - want).norm() / want.norm())
            assert error < BF16_ERROR, error

    def same_pools(self) -> None:
        """Both have written the same, but for the null page."""
        pools = (each.pools.paged.values() for each in (self.subject, self.plain))
        for mine, its in zip(*pools, strict=True):
            assert torch.equal(mine[:, :, 1:], its[:, :, 1:])


class Expand(LatentExpand):
    """Heads of DeepSeek's dims, 128 and 128, over any latent row."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        rope = sizes.dim - sizes.latent
        self.num_heads, self.dims = sizes.heads, LatentDims(sizes.latent, rope, nope=128, v=128)
        weight = torch.randn(
            sizes.heads, 256, sizes.latent, generator=torch.Generator().manual_seed(5)
        )
        self.weight = (weight / sizes.latent**0.5).to(device)

    def __call__(self, rows: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        dims = self.dims
        both = torch.einsum("sr,hdr->shd", rows[:, : dims.latent].float(), self.weight[heads])
        rope = rows[:, None, dims.latent :].expand(-1, both.shape[1], -1)
        k = torch.cat((both[..., : dims.nope].to(rows.dtype), rope), -1)
        return k, both[..., dims.nope :].to(rows.dtype).contiguous()


def trees(q_len: int, device: torch.device) -> Tensor:
    """Ancestors of random trees, one per request and one of the padding slot, [4, W, words]."""
    generator = torch.Generator().manual_seed(q_len)
    made = [random_tree(q_len, generator) for _ in range(REQUESTS + 1)]
    return torch.tensor(made, dtype=torch.int64).to(device)
