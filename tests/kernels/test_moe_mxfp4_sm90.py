"""The kernel for Hopper of experts in MXFP4: dispatch, and on a GPU its results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forerun.kernels.moe.align import of_experts
from forerun.kernels.moe.config import (
    DECODE_BLOCK_M,
    SM90_MXFP4_DECODE,
    SM90_MXFP4_FEW_TOKENS,
    SM90_MXFP4_FEW_TOKENS_NARROW,
    choose_moe_mxfp4_sm90,
)
from forerun.kernels.moe.experts import ClampedSwiglu
from forerun.kernels.moe.experts_mxfp4 import (
    Mxfp4Matrices,
    Mxfp4Weight,
    expert_partials_mxfp4,
)
from forerun.kernels.moe.router import new_counts, route, top_k
from forerun.kernels.moe.routing import Routed, Routing, align_ref, route_ref
from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import GpuInfo, gpu_of

H200 = GpuInfo(132, amd=False, capability=90)
SHAPES = {  # experts, top-k, hidden size, width
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "gpt-oss-20b on one of two ranks": (32, 4, 2880, 1472),
    "small": (6, 2, 64, 192),
}


def test_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "available", lambda: True)
    bf16 = torch.bfloat16
    for tokens, config in ((1, SM90_MXFP4_FEW_TOKENS), (8, SM90_MXFP4_FEW_TOKENS)):
        assert choose_moe_mxfp4_sm90(tokens, 2880, 2880, bf16, H200) == config
    assert choose_moe_mxfp4_sm90(8, 2880, 1472, bf16, H200) == SM90_MXFP4_FEW_TOKENS_NARROW
    assert choose_moe_mxfp4_sm90(9, 2880, 2880, bf16, H200) == SM90_MXFP4_DECODE
    assert choose_moe_mxfp4_sm90(128, 2880, 1472, bf16, H200) == SM90_MXFP4_DECODE
    assert choose_moe_mxfp4_sm90(129, 2880, 2880, bf16, H200) is None
    assert choose_moe_mxfp4_sm90(1, 2880, 2880, torch.float16, H200) is None
    for gpu in (replace(H200, capability=80), replace(H200, amd=True)):
        assert choose_moe_mxfp4_sm90(1, 2880, 2880, bf16, gpu) is None


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.fixture
def hopper() -> None:
    gpu = gpu_of(torch.device("cuda"))
    if choose_moe_mxfp4_sm90(1, 64, 64, torch.bfloat16, gpu) is None:
        pytest.skip("needs Hopper and NVRTC")


class Layer:
    """Random codes and scales around 2^-8, biases."""

    def __init__(self, shape: str) -> None:
        self.num_experts, chosen, self.hidden, width = SHAPES[shape]
        self.routing = Routing(self.num_experts, chosen, norm_topk_prob=True, float32_logits=False)
        self.generator = torch.Generator("cuda").manual_seed(0)
        self.counts = new_counts(self.routing, torch.device("cuda"))
        self.w13, self.w2 = self.matrices(2 * width, self.hidden), self.matrices(self.hidden, width)
        biases = (
            self.normal(self.num_experts, 2 * width),
            self.normal(self.num_experts, self.hidden),
        )
        self.swiglu = ClampedSwiglu(*biases, alpha=1.702, limit=7.0)

    def matrices(self, n: int, k: int) -> Mxfp4Matrices:
        runs = self.num_experts, n, k // 32
        blocks = torch.empty(*runs, 16, dtype=torch.uint8, device="cuda")
        scales = torch.empty(runs, dtype=torch.uint8, device="cuda")
        blocks.random_(0, 256, generator=self.generator)
        scales.random_(117, 122, generator=self.generator)
        return Mxfp4Matrices.pack(Mxfp4Weight.of(blocks, scales))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device="cuda", dtype=torch.bfloat16)

    def route(self, scores: Tensor) -> Routed:
        """Without Triton kernels, which take seconds to compile."""
        routed = route_ref(scores, None, self.routing)
        tiles = align_ref(routed.experts, self.num_experts, DECODE_BLOCK_M)
        progress = self.counts[self.num_experts + 1 :]
        return replace(routed, tiles=replace(tiles, progress=progress))

    def run(self, x: Tensor, routed: Routed) -> Tensor:
        return expert_partials_mxfp4(x, self.w13, self.w2, routed, self.swiglu)

    def run_ref(self, x: Tensor, routed: Routed) -> Tensor:
        """In float32, one expert after the other, rounded where the kernel rounds."""
        w13, w2 = (w.dequantize(torch.float32) for w in (self.w13, self.w2))
        out = torch.zeros(routed.experts.shape[1], *x.shape, device="cuda")
        for expert in range(self.num_experts):
            token, choice = (routed.experts == expert).nonzero(as_tuple=True)
            both = x[token].float() @ w13[expert].T + self.swiglu.b13[expert].float()
            act = self.swiglu.act(both.bfloat16()).float()
            y = (act @ w2[expert].T + self.swiglu.b2[expert].float()).bfloat16().float()
            out[choice, token] = y * routed.weights[token, choice, None]
        return out


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("shape", SHAPES)
def test_mxfp4_experts_at_real_sizes(shape: str) -> None:
    layer = Layer(shape)
    for tokens in (1, 8, 9, 33, 128):
        x, scores = layer.normal(tokens, layer.hidden), layer.normal(tokens, layer.num_experts)
        same = scores.clone()
        same[:, : layer.routing.top_k] += 50  # all tokens to the same experts
        for routed in (layer.route(scores), layer.route(same)):
            got, want = layer.run(x, routed), layer.run_ref(x, routed)
            assert (got - want).norm() / want.norm() < 2e-3
            assert (got - want).abs().max() / want.abs().max() < 1e-2
            for _ in range(10):
                assert torch.equal(layer.run(x, routed), got)
    assert not layer.counts.any()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_has_the_same_partials_in_any_batch(shape: str) -> None:
    """Also in one that is small enough for the other configuration."""
    layer = Layer(shape)
    x, scores = layer.normal(128, layer.hidden), layer.normal(128, layer.num_experts)
    want = layer.run(x, layer.route(scores))
    order = torch.randperm(128, device="cuda")
    assert torch.equal(layer.run(x[order], layer.route(scores[order])), want[:, order])
    for tokens in (1, 4, 8, 9, 100):
        got = layer.run(x[-tokens:].contiguous(), layer.route(scores[-tokens:]))
        assert torch.equal(got, want[:, -tokens:])


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("tokens", [1, 9, 128, 130])
def test_parts_of_the_experts_add_up(tokens: int) -> None:
    """As ranks with `ep_size` compute them; a part may have no pair. 130 are Triton's kernels'."""
    layer = Layer("small")
    x, scores = layer.normal(tokens, layer.hidden), layer.normal(tokens, layer.num_experts)
    scores[:, :4] += 50
    routed = top_k(scores[None].float(), None, layer.routing, layer.counts)
    total = torch.zeros(layer.routing.top_k, *x.shape, device="cuda")
    for part in (range(1), range(1, 4), range(4, 6)):
        own = slice(part.start, part.stop)
        w13, w2 = (
            Mxfp4Matrices(each.values[own].clone(), each.scales[own].clone())
            for each in (layer.w13, layer.w2)
        )
        swiglu = replace(
            layer.swiglu, b13=layer.swiglu.b13[own].clone(), b2=layer.swiglu.b2[own].clone()
        )
        got = expert_partials_mxfp4(x, w13, w2, of_experts(routed, part), swiglu)
        outside = (routed.experts < part.start) | (routed.experts >= part.stop)
        assert torch.equal(got.any(-1), ~outside.t())
        total += got
    assert torch.equal(total, layer.run(x, routed).float())
    assert not layer.counts.any()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("tokens", [1, 128])
def test_captured_layers_follow_their_input(tokens: int) -> None:
    """Three routers and experts in a row, in one graph: PDL, and counters that end at zero."""
    layer = Layer("gpt-oss-20b")
    gate, bias = layer.normal(layer.num_experts, layer.hidden), layer.normal(layer.num_experts)
    x = layer.normal(tokens, layer.hidden)

    def run() -> list[Tensor]:
        found = []
        for scale in (1, -1, 1):
            inputs = x * scale, gate, None, layer.routing, layer.counts, bias
            found.append(layer.run(inputs[0], route(*inputs)))
        return found

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(3):
        x.copy_(layer.normal(*x.shape))
        for _ in range(5):
            graph.replay()
        for got, want in zip(captured, run(), strict=True):
            assert torch.equal(got, want)
    assert not layer.counts.any()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 128])
def test_router_with_biased_logits(tokens: int) -> None:
    """The bias is added before the logits are rounded. Experts, weights and lists."""
    layer = Layer("small")
    x, gate = layer.normal(tokens, layer.hidden), layer.normal(layer.num_experts, layer.hidden)
    bias = layer.normal(layer.num_experts) * 20
    logits = x.double() @ gate.double().T + bias.double()
    # Sums of 64 products in float32 differ by less than that from their exact value.
    clear = logits.sort(descending=True).values.diff().abs().min(1).values > 0.5
    got = route(x, gate, None, layer.routing, layer.counts, bias)
    want = route_ref(logits.float().bfloat16(), None, layer.routing)
    assert clear.any() and torch.equal(got.experts[clear], want.experts[clear])
    torch.testing.assert_close(got.weights[clear], want.weights[clear], rtol=0.02, atol=1e-3)
    partials = logits.float()[None]
    same = top_k(partials, None, layer.routing, layer.counts, gate)
    assert torch.equal(same.experts[clear], got.experts[clear])
    assert got.tiles is not None and got.tiles.progress is not None
    listed = align_ref(got.experts, layer.num_experts, DECODE_BLOCK_M)
    for tile in range(int((listed.tiles[2] > 0).sum())):
        expert, first, rows = (int(v) for v in got.tiles.tiles[:, tile])
        of_expert, start, count = (int(v) for v in listed.tiles[:, tile])
        assert (expert, rows) == (of_expert, count)
        assert torch.equal(
            got.tiles.pairs[first : first + rows], listed.pairs[start : start + count]
        )
