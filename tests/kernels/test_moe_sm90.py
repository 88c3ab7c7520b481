"""The experts' kernel for Hopper: dispatch, the division of work, and on a GPU its results."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forerun.kernels.moe.align import of_experts
from forerun.kernels.moe.config import (
    DECODE_BLOCK_M,
    MAX_DECODE_TOKENS,
    SM90_DECODE,
    SM90_FEW_TOKENS,
    Sm90MoeConfig,
    choose_moe,
    choose_moe_sm90,
    max_tiles,
)
from forerun.kernels.moe.experts import expert_partials
from forerun.kernels.moe.experts_sm90 import MAX_TILES
from forerun.kernels.moe.router import new_counts, top_k
from forerun.kernels.moe.routing import (
    MAX_EXPERTS,
    MAX_TOP_K,
    Routed,
    Routing,
    align_ref,
    route_ref,
)
from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import GpuInfo, gpu_of

H200 = GpuInfo(132, amd=False, capability=90)
# experts, experts per token, hidden size, width, shared experts
SHAPES = {
    "qwen3-30b-a3b": (128, 8, 2048, 768, 0),
    "qwen3-235b-a22b": (128, 8, 4096, 1536, 0),
    "deepseek-v2-lite": (64, 6, 2048, 1408, 2),
    "multiples of 64": (10, 3, 320, 192, 1),
}


def test_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(
        tokens: int = 1,
        hidden: int = 2048,
        width: int = 768,
        dtype: torch.dtype = torch.bfloat16,
        gpu: GpuInfo = H200,
    ) -> Sm90MoeConfig | None:
        return choose_moe_sm90(tokens, hidden, width, dtype, gpu)

    monkeypatch.setattr(nvrtc, "available", lambda: True)
    for tokens in (1, 4, 5, MAX_DECODE_TOKENS):
        for _, _, hidden, width, _ in SHAPES.values():
            few = tokens <= 4 and hidden % 128 == 0 and width % 128 == 0
            assert choose(tokens, hidden, width) == (SM90_FEW_TOKENS if few else SM90_DECODE)
    assert choose(MAX_DECODE_TOKENS + 1) is None
    assert choose(hidden=2080) is None and choose(width=776) is None
    assert choose(dtype=torch.float16) is None and choose(dtype=torch.float32) is None
    for gpu in (
        replace(H200, capability=80),
        replace(H200, capability=100),
        replace(H200, amd=True),
        replace(H200, interpreted=True),
    ):
        assert choose(gpu=gpu) is None
    monkeypatch.setattr(nvrtc, "available", lambda: False)
    assert choose() is None


def test_tiles_fit_and_have_a_counter_each() -> None:
    for experts, k, shared in (
        (MAX_EXPERTS, MAX_TOP_K, 0), (128, 8, 0), (8, 2, 0), (1, 1, 0),
        (MAX_EXPERTS - 2, MAX_TOP_K - 2, 2), (64, 6, 2), (1, 1, 1),
    ):  # fmt: skip
        counts = new_counts(Routing(experts, k, num_shared=shared), torch.device("cpu"))
        for tokens in (1, 64, MAX_DECODE_TOKENS):
            assert choose_moe(tokens, H200).block_m == DECODE_BLOCK_M
            most = max_tiles(tokens * (k + shared), experts + shared, DECODE_BLOCK_M)
            assert most <= MAX_TILES and experts + 1 + 2 + most <= len(counts)


def schedule(gate_up: int, down: int, num_ctas: int, lead: int) -> list[list[tuple[str, int]]]:
    """The fixed work tiles of each CTA, as `TileScheduler` in experts_sm90.cu computes them."""
    busy = gate_up % num_ctas
    idle = num_ctas - busy
    ctas = []
    for cta in range(num_ctas):
        work = [("gate/up", i) for i in range(cta, gate_up, num_ctas)]
        rank = idle + cta if cta < busy else cta - busy
        if cta >= busy:
            work += [("down", rank + i * idle) for i in range(lead)]
        work += [("down", i) for i in range(lead * idle + rank, down, num_ctas)]
        ctas.append([(kind, i) for kind, i in work if kind == "gate/up" or i < down])
    return ctas


@pytest.mark.parametrize("num_ctas", [1, 7, 78, 132, 264])
@pytest.mark.parametrize("tiles", [1, 3, 6, 8, 11, 50, 152])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_work_tile_is_computed_once(shape: str, tiles: int, num_ctas: int) -> None:
    _, _, hidden, width, _ = SHAPES[shape]
    gate_up, down, lead = tiles * width // 32, tiles * hidden // 64, hidden // width
    ctas = schedule(gate_up, down, num_ctas, lead)
    found = Counter(work for works in ctas for work in works)
    want = [("gate/up", i) for i in range(gate_up)] + [("down", i) for i in range(down)]
    assert found == Counter(want)
    for works in ctas:  # gate/up first, in order: no two CTAs wait for each other
        assert works == sorted(works, key=lambda work: (work[0] == "down", work[1]))
    times = [sum(hidden if kind == "gate/up" else width for kind, _ in works) for works in ctas]
    mean = (gate_up * hidden + down * width) / num_ctas
    assert max(times) <= mean + max(hidden, 2 * width)


# --- on a GPU -------------------------------------------------------------------------------------


def choose_on_this_gpu(tokens: int, hidden: int, width: int) -> Sm90MoeConfig | None:
    return choose_moe_sm90(tokens, hidden, width, torch.bfloat16, gpu_of(torch.device("cuda")))


@pytest.fixture
def hopper() -> None:
    if choose_on_this_gpu(1, 2048, 768) is None:
        pytest.skip("needs Hopper and NVRTC")


class Layer:
    """Random weights."""

    def __init__(self, shape: str) -> None:
        self.num_experts, self.top_k, self.hidden, width, shared = SHAPES[shape]
        self.routing = Routing(self.num_experts, self.top_k, norm_topk_prob=True, num_shared=shared)
        self.generator = torch.Generator("cuda").manual_seed(0)
        self.counts = new_counts(self.routing, torch.device("cuda"))
        self.w13 = self.normal(self.num_experts + shared, 2 * width, self.hidden) * 0.02
        self.w2 = self.normal(self.num_experts + shared, self.hidden, width) * 0.02

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device="cuda", dtype=torch.bfloat16)

    def route(self, scores: Tensor) -> Routed:
        """Without Triton kernels, which take seconds to compile."""
        routed = route_ref(scores, None, self.routing)
        tiles = align_ref(routed.experts, len(self.w13), DECODE_BLOCK_M)
        progress = self.counts[self.num_experts + 1 :]
        return replace(routed, tiles=replace(tiles, progress=progress))

    def run(self, x: Tensor, routed: Routed) -> Tensor:
        assert choose_on_this_gpu(len(x), *self.w2.shape[1:]) is not None
        return expert_partials(x, self.w13, self.w2, routed)

    def run_ref(self, x: Tensor, routed: Routed) -> Tensor:
        """In float32, one expert after the other, rounded where the kernel rounds."""
        out = torch.zeros(routed.experts.shape[1], *x.shape, device="cuda")
        for expert in range(len(self.w13)):
            token, choice = (routed.experts == expert).nonzero(as_tuple=True)
            both = (x[token].float() @ self.w13[expert].float().T).bfloat16()
            gate, up = both.float().chunk(2, 1)
            act = (torch.nn.functional.silu(gate) * up).bfloat16().float()
            y = (act @ self.w2[expert].float().T).bfloat16().float()
            out[choice, token] = y * routed.weights[token, choice, None]
        return out


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_at_real_sizes(shape: str) -> None:
    layer = Layer(shape)
    for tokens in (1, 4, 5, 33, 128):
        x, scores = layer.normal(tokens, layer.hidden), layer.normal(tokens, layer.num_experts)
        same = scores.clone()
        same[:, : layer.top_k] += 50  # all tokens to the same experts
        for routed in (layer.route(scores), layer.route(same)):
            got, want = layer.run(x, routed), layer.run_ref(x, routed)
            assert (got - want).norm() / want.norm() < 2e-3
            assert (got - want).abs().max() / want.abs().max() < 1e-2
            for _ in range(10):
                assert torch.equal(layer.run(x, routed), got)
    assert not layer.counts.any()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_a_token_has_the_same_partials_in_any_batch() -> None:
    """Also in one that is small enough for the other configuration, whose work tiles are fixed."""
    layer = Layer("qwen3-30b-a3b")
    x, scores = layer.normal(128, layer.hidden), layer.normal(128, layer.num_experts)
    x[5] = torch.nan  # of one token, which harms no other
    want = layer.run(x, layer.route(scores))
    assert want[:, 5].isnan().all() and not want[:, 6:].isnan().any()
    order = torch.randperm(128, device="cuda")
    got = layer.run(x[order], layer.route(scores[order]))
    torch.testing.assert_close(got, want[:, order], rtol=0, atol=0, equal_nan=True)
    for tokens in (1, 4, 5, 64, 100):
        got = layer.run(x[-tokens:].contiguous(), layer.route(scores[-tokens:]))
        assert torch.equal(got, want[:, -tokens:])


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("tokens", [1, 9, 128])
def test_parts_of_the_experts_add_up(tokens: int) -> None:
    """As ranks with `ep_size` compute them, in a graph; a part may have no pair."""
    layer = Layer("qwen3-30b-a3b")
    x, scores = layer.normal(tokens, layer.hidden), layer.normal(tokens, layer.num_experts)
    parts = range(16), range(16, 112), range(112, 128)
    own = [(layer.w13[p.start : p.stop].clone(), layer.w2[p.start : p.stop].clone()) for p in parts]

    def route() -> Routed:
        return top_k(scores[None].float(), None, layer.routing, layer.counts)

    def run() -> list[Tensor]:
        routed = route()
        here = (of_experts(routed, part) for part in parts)
        return [expert_partials(x, *w, each) for w, each in zip(own, here, strict=True)]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for first in (0, 16, 0):
        scores.copy_(layer.normal(*scores.shape))
        scores[:, first : first + 24] += 50
        graph.replay()
        assert torch.equal(torch.stack(captured).sum(0), layer.run(x, route()))
        assert bool(captured[0].any()) == (first == 0) and not captured[2].any()
    assert not layer.counts.any()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("tokens", [1, 128])
def test_captured_layers_follow_their_input(tokens: int) -> None:
    """Three routers and experts in a row, in one graph: PDL, and counters that end at zero."""
    layer = Layer("qwen3-30b-a3b")
    x, scores = layer.normal(tokens, layer.hidden), layer.normal(tokens, layer.num_experts)

    def run() -> list[Tensor]:
        found = []
        for scale in (1, -1, 1):
            logits = (scores * scale)[None].float()
            found.append(layer.run(x, top_k(logits, None, layer.routing, layer.counts)))
        return found

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(3):
        x.copy_(layer.normal(*x.shape))
        scores.copy_(layer.normal(*scores.shape))
        for _ in range(5):
            graph.replay()
        for got, want in zip(captured, run(), strict=True):
            assert torch.equal(got, want)
    assert not layer.counts.any()
