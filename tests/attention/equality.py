"""A backend beside the plain one, each with its own pools, over the forwards of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from forerun.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionNeed,
    AttentionSpec,
    LayerMask,
    Plan,
)
from forerun.attention.latent import LatentDims, LatentExpand
from forerun.attention.torch_native import TorchNative
from forerun.kvcache.layouts import DenseKV, LatentKV, ModelLayout
from forerun.kvcache.pools import ModelPools, PoolShape
from forerun.platform.device import gpu_arch

CAUSAL = LayerMask()
REQUESTS = 3
BF16_ERROR = 0.008  # ‖out - reference‖ / ‖reference‖ in bfloat16, whose values round by 0.002

Chunks = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Sizes:
    """Dense K/V (`kv_heads`, `dim`) or latent rows (`latent`, `rope`)."""

    heads: int
    kv_heads: int = 1
    dim: int = 0
    latent: int = 0
    rope: int = 0
    layers: int = 2
    positions: int = 256  # of a request, at most

    @property
    def is_latent(self) -> bool:
        return self.latent > 0

    @property
    def row(self) -> int:
        """Of q and K."""
        return self.latent + self.rope if self.is_latent else self.dim

    def layout(self, dtype: torch.dtype) -> ModelLayout:
        kind = (
            LatentKV(self.latent, self.rope, dtype)
            if self.is_latent
            else DenseKV(self.kv_heads, self.dim, dtype)
        )
        return ModelLayout((kind,) * self.layers)


class Case:
    """Requests whose K/V is in shuffled pages; the fourth row of the table is the padding slot."""

    def __init__(
        self,
        kind: type[AttentionBackend],
        sizes: Sizes,
        page: int,
        device: torch.device,
        sinks: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self.sizes, self.device, self.dtype, self.sinks = sizes, device, dtype, sinks
        pages = REQUESTS * sizes.positions // page
        need = AttentionNeed(
            device.type,
            dtype,
            sizes.row,
            sizes.heads,
            sizes.kv_heads,
            frozenset(),
            mla=sizes.is_latent,
            dense=not sizes.is_latent,
            arch=gpu_arch(device),
        )
        # The plain one reads the same values, and computes in float32.
        plain = need if dtype is torch.float64 else replace(need, dtype=torch.float32)
        pools = [
            ModelPools(sizes.layout(dtype), PoolShape(1 + pages, page), device) for _ in range(2)
        ]
        self.subject, self.plain = kind(need, pools[0]), TorchNative(plain, pools[1])
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(3)) + 1
        table = torch.zeros(REQUESTS + 1, pages // REQUESTS, dtype=torch.int32)
        table[:REQUESTS] = order.view(REQUESTS, -1)
        self.table = table.to(device)
        self.generator = torch.Generator().manual_seed(1)

    @classmethod
    def of(
        cls,
        kind: type[AttentionBackend],
        sizes: Sizes,
        page: int,
        device: torch.device,
        sinks: Tensor | None = None,
    ) -> Case:
        """float32 on a CPU, where the results must agree closely, bfloat16 on a GPU."""
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        return cls(kind, sizes, page, device, None if sinks is None else sinks.to(device), dtype)

    @property
    def both(self) -> tuple[AttentionBackend, AttentionBackend]:
        return self.subject, self.plain

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def chunks(self, chunks: Chunks) -> AttentionBatch:
        """A ragged batch: (start, tokens) of each request."""
        start = torch.tensor([s for s, _ in chunks], dtype=torch.int32, device=self.device)
        bound = max(s + n for s, n in chunks)
        return AttentionBatch(self.table[:REQUESTS], start, bound, ragged=tuple(chunks))

    def tokens(self, starts: Sequence[int], q_len: int, bound: int | None = None) -> AttentionBatch:
        """A step of `q_len` tokens each, and of the padding slot."""
        start = torch.tensor([*starts, 0], dtype=torch.int32, device=self.device)
        return AttentionBatch(self.table, start, bound or max(starts) + q_len, q_len=q_len)

    def prefill(
        self, chunks: Chunks, masks: Sequence[LayerMask], reference_only: bool = False
    ) -> None:
        """`reference_only`: the backend writes what the plain one does, and does not attend."""
        count = sum(n for _, n in chunks)
        self._compare(self.chunks(chunks), count, count, [] if reference_only else masks)

    def step(self, starts: Sequence[int], q_len: int, masks: Sequence[LayerMask]) -> None:
        real = len(starts) * q_len
        self._compare(self.tokens(starts, q_len), real + q_len, real, masks)

    def _compare(
        self, batch: AttentionBatch, count: int, real: int, masks: Sequence[LayerMask]
    ) -> None:
        """`real`: the first tokens, those after them belong to the padding slot."""
        plans = [backend.plan(batch) for backend in self.both]
        for layer in range(self.sizes.layers):
            self.write(plans, layer, count)
            q = self.normal(count, self.sizes.heads, self.sizes.row)
            for mask in masks:
                spec = AttentionSpec(mask, self.sizes.row**-0.5, sinks=self.sinks)
                got, want = self.attend(plans, layer, spec, q)
                assert got.shape == want.shape
                self.close(got[:real], want[:real])

    def write(self, plans: Sequence[Plan], layer: int, count: int) -> None:
        """New K/V of `count` tokens, to both pools."""
        sizes = self.sizes
        if sizes.is_latent:
            latent = self.normal(count, sizes.row)
            for backend, plan in zip(self.both, plans, strict=True):
                backend.write_latent(plan, layer, latent)
            return
        k, v = (self.normal(count, sizes.kv_heads, sizes.dim) for _ in range(2))
        for backend, plan in zip(self.both, plans, strict=True):
            backend.write(plan, layer, k, v)

    def attend(
        self, plans: Sequence[Plan], layer: int, spec: AttentionSpec, q: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(subject's, plain one's)."""
        return (
            self.attend_with(self.subject)(plans[0], layer, spec, q),
            self.attend_with(self.plain)(plans[1], layer, spec, q.to(self.plain.need.dtype)),
        )

    def attend_with(self, backend: AttentionBackend) -> Callable[..., Tensor]:
        return backend.attend_latent if self.sizes.is_latent else backend.attend

    def prefill_expanded(self, chunks: Chunks, spec: AttentionSpec, expand: Expand) -> None:
        batch, count = self.chunks(chunks), sum(n for _, n in chunks)
        plans = [backend.plan(batch) for backend in self.both]
        for layer in range(self.sizes.layers):
            self.write(plans, layer, count)
            q = self.normal(count, self.sizes.heads, expand.dims.qk)
            got, want = (
                backend.attend_latent_prefill(
                    plan, batch, layer, spec, q.to(backend.need.dtype), expand
                )
                for backend, plan in zip(self.both, plans, strict=True)
            )
            self.close(got, want)

    def close(self, got: Tensor, want: Tensor) -> None:
        assert bool(got.isfinite().all())
        if self.dtype is torch.bfloat16:
            error = float((got.float() - want).norm() / want.norm())
            assert error < BF16_ERROR, error
        else:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)

    def same_pools(self) -> None:
        """Both have written the same, but for the null page."""
        for mine, its in zip(*(b.pools.paged.values() for b in self.both), strict=True):
            assert torch.equal(mine[:, :, 1:], its[:, :, 1:])


class Expand(LatentExpand):
    """DeepSeek's head dims, 128 and 128, over any latent row."""

    def __init__(self, heads: int, latent: int, rope: int, device: torch.device) -> None:
        self.num_heads, self.dims = heads, LatentDims(latent, rope, nope=128, v=128)
        normal = partial(torch.randn, generator=torch.Generator().manual_seed(5))
        self.weight = (normal(heads, 256, latent) / latent**0.5).to(device)

    def __call__(self, rows: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        dims = self.dims
        both = torch.einsum("sr,hdr->shd", rows[:, : dims.latent].float(), self.weight[heads])
        rope = rows[:, None, dims.latent :].expand(-1, both.shape[1], -1)
        k = torch.cat((both[..., : dims.nope].to(rows.dtype), rope), -1)
        return k, both[..., dims.nope :].to(rows.dtype).contiguous()
