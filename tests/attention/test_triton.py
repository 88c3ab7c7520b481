"""The Triton backend compared with the plain one, through the same interface."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from forerun.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionNeed,
    AttentionSpec,
    LayerMask,
    Mask,
    Plan,
)
from forerun.attention.torch_native import TorchNative
from forerun.attention.triton import TritonAttention
from forerun.kvcache.layouts import DenseKV, ModelLayout, SharedKV
from forerun.kvcache.pools import ModelPools, PoolShape

pytest.importorskip("triton")

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 64, 2
MASKS = [LayerMask(), LayerMask(window=7), LayerMask(Mask.BLOCK), LayerMask(Mask.BLOCK, 9)]
MASKS += [LayerMask(Mask.SLIDING_BLOCK, 9), LayerMask(Mask.SLIDING_BLOCK, 2)]


def backends(page: int, device: torch.device) -> list[AttentionBackend]:
    """Triton and the plain one, each with its own pool."""
    need = AttentionNeed(device.type, torch.float32, DIM, HEADS, KV_HEADS, frozenset(MASKS))
    assert TritonAttention.why_not(need) == []
    layout = ModelLayout.dense(LAYERS, KV_HEADS, DIM, torch.float32)
    pools = [ModelPools(layout, PoolShape(1 + 3 * 8 * 16 // page, page), device) for _ in range(2)]
    return [TritonAttention(need, pools[0]), TorchNative(need, pools[1])]


def tables(page: int, device: torch.device) -> torch.Tensor:
    """Three requests of up to 128 positions, and the padding slot."""
    ids = torch.randperm(3 * 128 // page, generator=torch.Generator().manual_seed(3)) + 1
    table = torch.zeros(4, 128 // page, dtype=torch.int32)
    table[:3] = ids.view(3, -1)
    return table.to(device)


def qkv(rows: int, device: torch.device, seed: int) -> tuple[torch.Tensor, ...]:
    x = torch.randn(rows, HEADS + 2 * KV_HEADS, DIM, generator=torch.Generator().manual_seed(seed))
    return x.to(device).split_with_sizes([HEADS, KV_HEADS, KV_HEADS], 1)


def run(
    backend: AttentionBackend,
    plan: Plan,
    layer: int,
    mask: LayerMask,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> torch.Tensor:
    backend.write(plan, layer, k, v)
    return backend.attend(plan, layer, AttentionSpec(mask, DIM**-0.5), q)


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", [16, 1, 64])
def test_prefill_then_blocks(page: int, device: torch.device) -> None:
    """Prompts in two chunks, then a verify step with a padding slot, over two layers."""
    pair, table = backends(page, device), tables(page, device)
    chunks = [((0, 20), (0, 1), (0, 33)), ((20, 3), (1, 40), (33, 2))]
    for step, spans in enumerate(chunks):
        start = torch.tensor([s for s, _ in spans], dtype=torch.int32, device=device)
        bound = max(s + n for s, n in spans)
        batch = AttentionBatch(table[:3], start, bound, ragged=spans)
        _same(pair, batch, sum(n for _, n in spans), MASKS[step : step + 1], device, step)
    start = torch.tensor([23, 41, 35, 0], dtype=torch.int32, device=device)
    batch = AttentionBatch(table, start, 41 + 4, q_len=4)
    _same(pair, batch, 16, MASKS, device, 9)
    written = table[:3].long().unique()
    for layer in range(LAYERS):
        assert torch.equal(pair[0].pools.k(layer)[written], pair[1].pools.k(layer)[written])
        assert torch.equal(pair[0].pools.v(layer)[written], pair[1].pools.v(layer)[written])


@pytest.mark.parametrize(
    "window", [3, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (None, 70))]
)
def test_soft_cap_and_windows_of_trees(window: int | None, device: torch.device) -> None:
    pair, table = backends(16, device), tables(16, device)[:2]
    spec = AttentionSpec(LayerMask(window=window), DIM**-0.5, logit_softcap=0.7)
    start = torch.zeros(2, dtype=torch.int32, device=device)
    prompts = AttentionBatch(table, start, 90, ragged=((0, 90), (0, 3)))
    lengths = torch.tensor([90, 3], dtype=torch.int32, device=device)
    bits = torch.tensor([[1, 3, 5, 11, 27], [1, 3, 7, 15, 31]], device=device)
    tree = AttentionBatch(table, lengths, 95, q_len=5, tree=bits.unsqueeze(2))
    for seed, (batch, rows) in enumerate(((prompts, 93), (tree, 10))):
        q, k, v = qkv(rows, device, seed)
        outs = []
        for backend in pair:
            plan = backend.plan(batch)
            backend.write(plan, 0, k, v)
            outs.append(backend.attend(plan, 0, spec, q))
        torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)


def _same(
    pair: list[AttentionBackend],
    batch: AttentionBatch,
    rows: int,
    masks: list[LayerMask],
    device: torch.device,
    seed: int,
) -> None:
    plans = [backend.plan(batch) for backend in pair]
    real = rows if batch.q_len is None else rows - batch.q_len  # padding has arbitrary values
    for layer in range(LAYERS):
        q, k, v = qkv(rows, device, seed * 10 + layer)
        for mask in masks:
            outs = [
                run(backend, plan, layer, mask, q, k, v)
                for backend, plan in zip(pair, plans, strict=True)
            ]
            assert outs[0].shape == (rows, HEADS, DIM)
            torch.testing.assert_close(outs[0][:real], outs[1][:real], rtol=1e-5, atol=1e-5)
            assert bool(outs[0].isfinite().all())


def test_layers_that_differ(device: torch.device) -> None:
    """Heads of two sizes, shared by different numbers of query heads; a layer without K/V."""
    kinds = [DenseKV(2, 64, torch.float32), DenseKV(1, 80, torch.float32)]
    layout = ModelLayout((*kinds, SharedKV(0)))
    need = AttentionNeed(device.type, torch.float32, 80, HEADS, 1, frozenset(MASKS[:2]))
    need = replace(need, uniform=False, head_dims=frozenset({64, 80}))
    assert TritonAttention.why_not(need) == []
    pools = [ModelPools(layout, PoolShape(1 + 3 * 8, 16), device) for _ in range(2)]
    pair, table = (TritonAttention(need, pools[0]), TorchNative(need, pools[1])), tables(16, device)
    spans = ((0, 7), (0, 1), (0, 12))
    starts = [torch.tensor(s, dtype=torch.int32, device=device) for s in ([0] * 3, [7, 1, 12])]
    batches = [
        AttentionBatch(table[:3], starts[0], 12, ragged=spans),
        AttentionBatch(table[:3], starts[1], 14, q_len=2),
    ]
    for batch, tokens in zip(batches, (20, 6), strict=True):
        plans = [backend.plan(batch) for backend in pair]
        for layer, mask in enumerate((MASKS[1], MASKS[0], MASKS[1])):
            kind = layout.paged_layer(layer)
            assert isinstance(kind, DenseKV)
            generator = torch.Generator().manual_seed(tokens + layer)
            heads = HEADS + 2 * kind.num_kv_heads
            x = torch.randn(tokens, heads, kind.head_dim, generator=generator).to(device)
            q, k, v = x.split_with_sizes([HEADS, kind.num_kv_heads, kind.num_kv_heads], 1)
            outs = []
            for backend, plan in zip(pair, plans, strict=True):
                if not isinstance(layout.layers[layer], SharedKV):
                    backend.write(plan, layer, k, v)
                outs.append(backend.attend(plan, layer, AttentionSpec(mask, 0.1), q))
            assert outs[0].shape == q.shape
            torch.testing.assert_close(outs[0], outs[1], rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_a_captured_plan_follows_the_device() -> None:
    """One graph of plan, write and attend, captured at the longest bound, serves every length."""
    device = torch.device("cuda")
    (triton, native), table = backends(16, device), tables(16, device)[:3]
    start = torch.zeros(3, dtype=torch.int32, device=device)
    q, k, v = qkv(6, device, 1)
    batch = AttentionBatch(table, start, 128, q_len=2)

    def step() -> torch.Tensor:
        return run(triton, triton.plan(batch), 0, LayerMask(), q, k, v)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lengths in ([0, 0, 0], [5, 77, 126], [120, 1, 33]):
        triton.pools.dense.normal_()
        native.pools.dense.copy_(triton.pools.dense)
        start.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        expected = run(native, native.plan(batch), 0, LayerMask(), q, k, v)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_plan_and_run_do_not_synchronize() -> None:
    device = torch.device("cuda")
    (triton, _), table = backends(16, device), tables(16, device)[:3]
    start = torch.zeros(3, dtype=torch.int32, device=device)
    q, k, v = qkv(6, device, 1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for shape in (AttentionBatch(table, start, 128, q_len=2), _chunks(table, start)):
            run(triton, triton.plan(shape), 0, LayerMask(), q, k, v)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _chunks(table: torch.Tensor, start: torch.Tensor) -> AttentionBatch:
    return AttentionBatch(table, start, 3, ragged=((0, 1), (0, 2), (0, 3)))


def test_sinks(device: torch.device) -> None:
    """gpt-oss: in a prompt's chunk and in verify steps, one split and several."""
    pair, table = backends(16, device), tables(16, device)
    sinks = torch.tensor([-2.0, 0.0, 1.0, 5.0], device=device)
    for spans, q_len in ((((0, 40), (0, 3)), None), (((40, 2), (3, 2)), 2)):
        start = torch.tensor([s for s, _ in spans], dtype=torch.int32, device=device)
        ragged = spans if q_len is None else None
        batch = AttentionBatch(table[:2], start, 42, q_len=q_len, ragged=ragged)
        q, k, v = qkv(sum(n for _, n in spans), device, 5)
        for mask in MASKS[:2]:
            outputs = []
            for backend in pair:
                plan = backend.plan(batch)
                backend.write(plan, 0, k, v)
                spec = AttentionSpec(mask, DIM**-0.5, sinks=sinks)
                outputs.append(backend.attend(plan, 0, spec, q))
            torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)
            assert not torch.allclose(
                outputs[0], run(pair[0], pair[0].plan(batch), 0, mask, q, k, v)
            )
