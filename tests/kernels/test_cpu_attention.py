"""Attention and RoPE writes of the CPU kernels: as the references."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from forerun.attention.base import AttentionBatch, AttentionSpec
from forerun.attention.capabilities import AttentionNeed, LayerMask, Mask
from forerun.attention.cpu import CpuAttention
from forerun.attention.torch_native import TorchNative
from forerun.kernels.cpu import attention as cpu
from forerun.kernels.cpu import library
from forerun.kernels.cpu import norm as cpu_norm
from forerun.kernels.elementwise.qk_norm_rope import (
    HeadNorms,
    RopePositions,
    kv_norm_rope_write_ref,
    qk_norm_rope_write_ref,
)
from forerun.kernels.elementwise.rms_norm import add_rms_norm_ref, rms_norm_ref
from forerun.kvcache.layouts import LatentKV, ModelLayout
from forerun.kvcache.pools import ModelPools, PoolShape
from tests.kernels.attention_support import random_tree
from tests.kernels.cpu_levels import at_levels

pytestmark = [
    pytest.mark.skipif(library.compiled().library is None, reason="no C++ compiler"),
    pytest.mark.usefixtures("level"),
    at_levels("native"),
]

DTYPES = (torch.float32, torch.bfloat16)
CPU = torch.device("cpu")
PAGE = 16
CONTEXT = 2200  # more than two parts of the context


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Pair:
    """Both backends over the same pools, filled with random K/V; pages of a request in disorder."""

    def __init__(
        self,
        starts: list[int],
        heads: tuple[int, int, int] = (4, 2, 64),
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.hq, hkv, self.dim = heads
        draw = torch.Generator().manual_seed(0)
        per_request = CONTEXT // PAGE + 4
        pages = 1 + per_request * len(starts)
        layout = ModelLayout.dense(1, hkv, self.dim, kv_dtype or dtype)
        self.pools = ModelPools(layout, PoolShape(pages, PAGE), CPU)
        for pool in (self.pools.k(0), self.pools.v(0)):
            pool.copy_(torch.randn(pool.shape, generator=draw))
        order = 1 + torch.randperm(pages - 1, generator=draw).view(len(starts), -1)
        self.table, self.start = order.int(), torch.tensor(starts, dtype=torch.int32)
        need = AttentionNeed("cpu", dtype, self.dim, self.hq, hkv, frozenset())
        self.ours, self.reference = (kind(need, self.pools) for kind in (CpuAttention, TorchNative))
        self.dtype, self.draw = dtype, draw

    def batch(self, q_len: int, **more: Any) -> AttentionBatch:
        bound = int(self.start.max()) + q_len
        return AttentionBatch(self.table, self.start, bound, q_len=q_len, **more)

    def ragged(self, counts: list[int]) -> AttentionBatch:
        spans = tuple(zip(self.start.tolist(), counts, strict=True))
        return AttentionBatch(self.table, self.start, max(a + b for a, b in spans), ragged=spans)

    def queries(self, tokens: int) -> torch.Tensor:
        return torch.randn(tokens, self.hq, self.dim, generator=self.draw).to(self.dtype)

    def both(
        self, batch: AttentionBatch, spec: AttentionSpec, q: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        got, want = (each.attend(each.plan(batch), 0, spec, q) for each in self.backends)
        return got, want

    @property
    def backends(self) -> tuple[CpuAttention, TorchNative]:
        return self.ours, self.reference  # type: ignore[return-value]


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = 2e-5 if got.dtype is torch.float32 else 2e-2
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


MASKS = {
    "causal": LayerMask(),
    "causal window": LayerMask(window=70),
    "block": LayerMask(Mask.BLOCK),
    "block window": LayerMask(Mask.BLOCK, 45),
    "sliding block": LayerMask(Mask.SLIDING_BLOCK, 45),
    "window within the block": LayerMask(Mask.SLIDING_BLOCK, 3),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", [1, 16, 33])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str, q_len: int, dtype: torch.dtype) -> None:
    pair = Pair([0, 5, 100, 1100], dtype=dtype)
    spec = AttentionSpec(MASKS[mask], 0.125)
    check(*pair.both(pair.batch(q_len), spec, pair.queries(4 * q_len)))


@pytest.mark.parametrize("heads", [(1, 1, 64), (6, 2, 20), (8, 8, 128), (32, 1, 16), (4, 2, 34)])
def test_heads(heads: tuple[int, int, int]) -> None:
    pair = Pair([3, 40], heads)
    check(*pair.both(pair.batch(3), AttentionSpec(LayerMask(), 0.3), pair.queries(6)))


def test_kv_of_another_dtype() -> None:
    for dtype, kv_dtype in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        pair = Pair([3, 200], dtype=dtype, kv_dtype=kv_dtype)
        got, want = pair.both(pair.batch(2), AttentionSpec(LayerMask(), 0.125), pair.queries(4))
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_prompts() -> None:
    pair = Pair([0, 30, 2000, 0])
    for spec in (AttentionSpec(LayerMask(), 0.125), AttentionSpec(LayerMask(window=50), 0.125)):
        counts = [1, 70, 100, 33]
        check(*pair.both(pair.ragged(counts), spec, pair.queries(sum(counts))))


@pytest.mark.parametrize("width", [20, 64, 65, 128, 256])
def test_trees(width: int) -> None:
    pair = Pair([0, 65])
    trees = torch.tensor([random_tree(width, pair.draw) for _ in range(2)])
    spec = AttentionSpec(LayerMask(), 0.125)
    check(*pair.both(pair.batch(width, tree=trees), spec, pair.queries(2 * width)))


def test_softcap_and_sinks() -> None:
    pair = Pair([2, 1500])
    sinks = torch.randn(4, generator=pair.draw)
    for spec in (
        AttentionSpec(LayerMask(), 0.5, logit_softcap=3.0),
        AttentionSpec(LayerMask(), 0.5, sinks=sinks),
    ):
        check(*pair.both(pair.batch(2), spec, pair.queries(4)))


def test_positions_after_the_request_may_be_nan() -> None:
    pair = Pair([20])
    page, place = int(pair.table[0, 1]), 20 % PAGE + 3
    for pool in (pair.pools.k(0), pair.pools.v(0)):
        pool[page, place:] = torch.nan
    spec = AttentionSpec(LayerMask(), 0.125)
    q = pair.queries(3)
    assert pair.ours.attend(pair.ours.plan(pair.batch(3)), 0, spec, q).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("tokens", [1, 70])
def test_rope_writes_equal_their_references(tokens: int, normed: bool, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    hq, hkv, dim, layers = 4, 2, 40, 3

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    torch.set_num_threads(2)
    for positions in (torch.int32, torch.int64):
        rope = RopePositions(new(100, 2, 1, dim), torch.arange(tokens).to(positions) + 3)
        slots = torch.randperm(160, generator=draw)[:tokens]
        norms = HeadNorms(new(dim), new(dim), 1e-6) if normed else None
        k, v = torch.zeros(2, 10, 16, hkv, dim, dtype=dtype)
        k_ref, v_ref = k.clone(), v.clone()
        qkv = new(tokens, (hq + 2 * hkv) * dim)
        q = cpu.qk_norm_rope_write(qkv, hq, norms, rope, slots, k, v)
        check(q, qk_norm_rope_write_ref(qkv, hq, norms, rope, slots, k_ref, v_ref))
        check(k, k_ref)
        assert torch.equal(v, v_ref)
        pool = torch.zeros(2, layers, 10, 16, hkv, dim, dtype=dtype)
        pool_ref = pool.clone()
        norms = HeadNorms(new(dim), new(layers, dim), 1e-6) if normed else None
        kv = new(tokens, 2 * layers * hkv * dim)
        cpu.kv_norm_rope_write(kv, norms, rope, slots, pool)
        kv_norm_rope_write_ref(kv, norms, rope, slots, pool_ref)
        check(pool, pool_ref)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 100, 256])
def test_norms_equal_their_references(size: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(70, size, generator=draw).to(dtype) for _ in range(2))
    weight = torch.randn(size, generator=draw).to(dtype)
    check(cpu_norm.rms_norm(x, weight, 1e-6), rms_norm_ref(x, weight, 1e-6))
    got, want = (f(x, y, weight, 1e-6) for f in (cpu_norm.add_rms_norm, add_rms_norm_ref))
    check(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("heads", [4, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_rows(heads: int, dtype: torch.dtype) -> None:
    """MLA, absorbed: verify passes, trees and prompts; more heads than go together."""
    draw, sizes = torch.Generator().manual_seed(0), (24, 8)
    pools = ModelPools(ModelLayout((LatentKV(*sizes, dtype),)), PoolShape(100, PAGE), CPU)
    pools.latent(0).copy_(torch.randn(pools.latent(0).shape, generator=draw))
    need = AttentionNeed(
        "cpu", dtype, sum(sizes), heads, 1, frozenset(), mla=True, latent_dim=24, dense=False
    )
    assert not CpuAttention.why_unfit(need)
    table = 1 + torch.randperm(99, generator=draw)[:90].view(2, -1).int()
    start = torch.tensor([3, 200], dtype=torch.int32)
    tree = torch.tensor([random_tree(9, draw) for _ in range(2)])
    batches = [
        AttentionBatch(table, start, 209, q_len=9),
        AttentionBatch(table, start, 209, q_len=9, tree=tree),
        AttentionBatch(table, start, 260, ragged=((3, 30), (200, 60))),
    ]
    ours, reference = (kind(need, pools) for kind in (CpuAttention, TorchNative))
    assert ours.absorbed_speedup == float("inf")  # prompts are not expanded
    spec = AttentionSpec(LayerMask(), 0.2)
    for batch, tokens in zip(batches, (18, 18, 90), strict=True):
        q = torch.randn(tokens, heads, sum(sizes), generator=draw).to(dtype)
        check(*(each.attend_latent(each.plan(batch), 0, spec, q) for each in (ours, reference)))
