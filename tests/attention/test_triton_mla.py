"""The Triton backend over latent rows (MLA) compared with the plain one, and in the engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun import LLM
from forerun.attention import latent
from forerun.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionNeed,
    AttentionSpec,
    LayerMask,
    Mask,
)
from forerun.attention.latent import LatentDims, LatentExpand
from forerun.attention.torch_native import TorchNative
from forerun.attention.triton import TritonAttention
from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import GpuInfo
from forerun.kvcache.layouts import LatentKV, ModelLayout
from forerun.kvcache.pools import ModelPools, PoolShape
from tests.kernels.attention_support import random_tree

pytest.importorskip("triton")

MASKS = [LayerMask(), LayerMask(window=7), LayerMask(Mask.BLOCK), LayerMask(Mask.BLOCK, 9)]
CPU = torch.device("cpu")
LAYER = 1  # of two


def test_absorbed_speedup_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `mla_sm90.py` serves: bfloat16, 512 + 64 values, pages of 64."""
    monkeypatch.setattr(nvrtc, "available", lambda: True)
    need = need_of(CPU, 16, 512, 64, torch.bfloat16)

    def speedup(need: AttentionNeed, page: int) -> float:
        return backends(need, page, CPU)[0].absorbed_speedup

    assert speedup(need, 64) == 1.0
    hopper = GpuInfo(132, amd=False)
    monkeypatch.setattr("forerun.attention.triton.gpu_of", lambda device: hopper)
    assert speedup(need, 64) == 2.0
    assert speedup(need, 16) == speedup(replace(need, dtype=torch.float16), 64) == 1.0


def need_of(
    device: torch.device, heads: int, latent: int, rope: int, dtype: torch.dtype
) -> AttentionNeed:
    masks = frozenset((*MASKS, LayerMask(Mask.CUSTOM)))
    return AttentionNeed(
        device.type, dtype, latent + rope, heads, 1, masks, mla=True, latent_dim=latent, dense=False
    )


def backends(need: AttentionNeed, page: int, device: torch.device) -> list[AttentionBackend]:
    """Triton and the plain one, each with its own pool; two layers."""
    assert TritonAttention.why_not(need) == []
    kind = LatentKV(need.latent_dim, need.head_dim - need.latent_dim, need.dtype)
    shape = PoolShape(1 + 3 * 256 // page, page)
    pools = [ModelPools(ModelLayout((kind, kind)), shape, device) for _ in range(2)]
    return [TritonAttention(need, pools[0]), TorchNative(need, pools[1])]


def tables(page: int, device: torch.device) -> torch.Tensor:
    """Three requests of up to 256 positions, and the padding slot."""
    ids = torch.randperm(3 * 256 // page, generator=torch.Generator().manual_seed(3)) + 1
    table = torch.zeros(4, 256 // page, dtype=torch.int32)
    table[:3] = ids.view(3, -1)
    return table.to(device)


def compare(
    pair: list[AttentionBackend], batch: AttentionBatch, masks: list[LayerMask], seed: int
) -> None:
    need, device = pair[0].need, batch.start.device
    draw = torch.Generator().manual_seed(seed)
    if batch.q_len is None:
        assert batch.ragged is not None
        tokens = real = sum(n for _, n in batch.ragged)
    else:
        tokens = batch.start.shape[0] * batch.q_len
        real = tokens - batch.q_len  # the padding slot has arbitrary values
    plans = [backend.plan(batch) for backend in pair]
    tolerance = 1e-5 if need.dtype == torch.float32 else 2e-2
    q = torch.randn(tokens, need.num_heads, need.head_dim, generator=draw)
    rows = torch.randn(tokens, need.head_dim + 8, generator=draw)
    q, rows = (x.to(device, need.dtype) for x in (q, rows))
    for backend, plan in zip(pair, plans, strict=True):
        backend.write_latent(plan, LAYER, rows[:, : need.head_dim])
    for mask in masks:
        spec = AttentionSpec(mask, need.head_dim**-0.5)
        got, want = (
            backend.attend_latent(plan, LAYER, spec, q)
            for backend, plan in zip(pair, plans, strict=True)
        )
        assert got.shape == (tokens, need.num_heads, need.latent_dim)
        torch.testing.assert_close(got[:real], want[:real], rtol=tolerance, atol=tolerance)
        assert bool(got.isfinite().all())


def run_forwards(need: AttentionNeed, page: int, q_len: int, device: torch.device) -> None:
    """Prompts in two chunks, a step of `q_len` tokens and one with a tree, and a padding slot."""
    pair, table = backends(need, page, device), tables(page, device)
    for step, chunks in enumerate((((0, 20), (0, 1), (0, 33)), ((20, 3), (1, 40), (33, 2)))):
        start = torch.tensor([s for s, _ in chunks], dtype=torch.int32, device=device)
        batch = AttentionBatch(table[:3], start, 41, ragged=chunks)
        compare(pair, batch, MASKS[step : step + 1], step)
    start = torch.tensor([23, 41, 35, 0], dtype=torch.int32, device=device)
    batch = AttentionBatch(table, start, 256, q_len=q_len)
    compare(pair, batch, MASKS, 9)
    draw = torch.Generator().manual_seed(q_len)
    tree = torch.tensor([random_tree(q_len, draw) for _ in range(4)], device=device)
    compare(pair, replace(batch, tree=tree), MASKS[:1], 11)
    written = table[:3].long().unique()
    assert torch.equal(*(backend.pools.latent(LAYER)[written] for backend in pair))
    assert not bool(pair[0].pools.latent(1 - LAYER).any())


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize(("page", "q_len"), [(1, 1), (16, 4), (64, 5)])
def test_prefill_then_steps(page: int, q_len: int, device: torch.device) -> None:
    run_forwards(need_of(device, 4, 24, 8, torch.float32), page, q_len, device)


class Expand(LatentExpand):
    """Random up-projections."""

    def __init__(self, heads: int, dims: LatentDims, device: torch.device, dtype: torch.dtype):
        self.num_heads, self.dims = heads, dims
        draw = torch.Generator().manual_seed(5)
        w = torch.randn(heads, dims.nope + dims.v, dims.latent, generator=draw)
        self.w = (w * dims.latent**-0.5).to(device, dtype)
        self.groups: list[slice] = []

    def __call__(self, rows: torch.Tensor, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        self.groups.append(heads)
        dims = self.dims
        both = torch.einsum("sr,hdr->shd", rows[:, : dims.latent], self.w[heads])
        rope = rows[:, None, dims.latent :].expand(-1, both.shape[1], -1)
        return torch.cat((both[..., : dims.nope], rope), -1), both[..., dims.nope :]


def run_expanded(
    need: AttentionNeed, dims: LatentDims, mask: LayerMask, device: torch.device
) -> Expand:
    """Chunks behind contexts of several lengths."""
    pair, table = backends(need, 16, device), tables(16, device)[:3]
    draw, dtype = torch.Generator().manual_seed(2), need.dtype
    expand = Expand(need.num_heads, dims, device, dtype)
    rows = torch.randn(3 * 256, need.head_dim, generator=draw).to(device, dtype)
    chunks = ((20, 3), (0, 40), (33, 1))
    start = torch.tensor([s for s, _ in chunks], dtype=torch.int32, device=device)
    batch = AttentionBatch(table, start, 40, ragged=chunks)
    q = torch.randn(44, need.num_heads, dims.qk, generator=draw).to(device, dtype)
    results = []
    for backend in pair:
        backend.pools.latent(0)[1:].flatten(0, 1).copy_(rows)
        plan, spec = backend.plan(batch), AttentionSpec(mask, dims.qk**-0.5)
        backend.write_latent(plan, 0, rows[:44])
        results.append(backend.attend_latent_prefill(plan, batch, 0, spec, q, expand))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)
    return expand


@pytest.mark.parametrize("mask", MASKS[:2], ids=str)
def test_expanded_prefill(
    mask: LayerMask, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two groups of heads."""
    monkeypatch.setattr(latent, "EXPANDED_BYTES", 2 * 97 * (24 + 16) * 4)
    need, dims = need_of(device, 4, 24, 8, torch.float32), LatentDims(24, 8, 16, 16)
    assert [slice(0, 2), slice(2, 4)] == run_expanded(need, dims, mask, device).groups[:2]


@pytest.mark.gpu
def test_expanded_prefill_with_the_sizes_of_deepseek() -> None:
    device = torch.device("cuda")
    need = need_of(device, 16, 512, 64, torch.bfloat16)
    run_expanded(need, LatentDims(512, 64, 128, 128), LayerMask(), device)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("page", "heads", "q_len"), [(64, 16, 1), (16, 16, 5), (64, 16, 16), (64, 128, 4)]
)
def test_prefill_then_steps_with_the_sizes_of_deepseek(page: int, heads: int, q_len: int) -> None:
    device = torch.device("cuda")
    run_forwards(need_of(device, heads, 512, 64, torch.bfloat16), page, q_len, device)


@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [1, 5])
def test_a_captured_plan_follows_the_device(q_len: int) -> None:
    """One graph of plan, write and attend, captured at the longest bound, serves every length."""
    device = torch.device("cuda")
    need = need_of(device, 16, 512, 64, torch.bfloat16)
    (triton, native), table = backends(need, 64, device), tables(64, device)[:3]
    start = torch.zeros(3, dtype=torch.int32, device=device)
    batch = AttentionBatch(table, start, 256, q_len=q_len)
    q = torch.randn(3 * q_len, 16, 576, device=device).bfloat16()
    rows = torch.randn(3 * q_len, 576, device=device).bfloat16()

    def step(backend: AttentionBackend) -> torch.Tensor:
        plan = backend.plan(batch)
        backend.write_latent(plan, 0, rows)
        return backend.attend_latent(plan, 0, AttentionSpec(LayerMask(), 576**-0.5), q)

    step(triton)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(triton)
    for lengths in ([0, 0, 0], [5, 77, 250], [240, 1, 33]):
        triton.pools.latent(0).normal_()
        native.pools.latent(0).copy_(triton.pools.latent(0))
        start.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        torch.testing.assert_close(out, step(native), rtol=2e-2, atol=2e-2)


def test_rows_that_the_kernels_cannot_take() -> None:
    need = need_of(CPU, 16, 512, 64, torch.float32)
    assert TritonAttention.why_not(need) == []
    wide = replace(need, head_dim=600, latent_dim=560)
    assert TritonAttention.why_not(wide) == ["latent rows of 560 + 40 values exceed 512 + 128"]
    assert "head dim 1088 is not within 2 to 640" in " ".join(
        TritonAttention.why_not(replace(need, head_dim=1088, latent_dim=1024))
    )


@pytest.mark.exhaustive
def test_the_engine_on_deepseeks_sizes(device: torch.device) -> None:
    """The trained toy of `tests/golden`, with its MTP layer: expanded prefill, verify, drafts."""
    folder = Path(__file__).parents[1] / "golden" / "deepseek-toy"
    case = json.loads((folder / "cases.json").read_text())[0]
    with LLM(
        folder,
        device=device.type,
        dtype="float32",
        skip_tokenizer_init=True,
        attention_backend="triton",
        speculative_algorithm="NEXTN",
        speculative_num_steps=1,
        speculative_adaptive=False,
        chunked_prefill_size=16,
        page_size=64,
    ) as llm:
        greedy = {"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True}
        made = llm.generate(input_ids=case["prompt"], sampling_params=greedy)
    assert made.output_ids == case["output"][:3]
    assert made.meta_info["spec_accept_lengths"] == [2]
