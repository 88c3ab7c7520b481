"""Mixtures of experts in a fixed order: a token has the same bits among any number of tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forerun.kernels.moe.config import (
    MAX_DECODE_TOKENS,
    choose_moe,
    experts_need_blocks,
)
from forerun.kernels.moe.experts import combine, expert_partials_ref
from forerun.kernels.moe.router import new_counts, route
from forerun.kernels.moe.routing import Routing, route_ref
from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import GpuInfo
from forerun.layers.communication import WeightPlacement
from forerun.layers.moe import SharedExpertMoE, SparseMoE
from forerun.layers.norm import RMSNorm

pytest.importorskip("triton")

COUNTS = (1, 2, 3, 4, 5, 16, 17, 64, 65, 128, 129, 200, 257, 500, 1000, 1025, 2048, 4097)
H200 = GpuInfo(132, amd=False)
ROUTERS = {
    "qwen3-30b-a3b": (Routing(128, 8, norm_topk_prob=True, float32_logits=False), 2048),
    "mixtral": (Routing(8, 2, norm_topk_prob=True), 4096),
    "deepseek-v2-lite": (Routing(64, 6, num_shared=2), 2048),
    "deepseek-v3, on Triton": (
        Routing(
            256, 8, "sigmoid", True, 2.5, n_group=8, topk_group=4, group_score="top2",
            correction_bias=True, num_shared=1,
        ),
        7168,
    ),
    "softmax on Triton": (Routing(160, 6, n_group=8, topk_group=3, routed_scaling_factor=16), 5120),
}  # fmt: skip
# routing, hidden size, width, width of a gated shared expert
LAYERS = {
    "qwen3-30b-a3b": (ROUTERS["qwen3-30b-a3b"][0], 2048, 768, 0),
    "deepseek-v2-lite": (ROUTERS["deepseek-v2-lite"][0], 2048, 1408, 0),
    "qwen3-next": (Routing(512, 10, norm_topk_prob=True), 2048, 512, 512),
    "qwen3.5-35b-a3b": (Routing(256, 8), 2048, 512, 512),
    "few wide experts": (Routing(8, 2, norm_topk_prob=True), 4096, 1792, 0),
    "small": (Routing(10, 3, num_shared=1), 320, 192, 0),
}


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cuda") * scale).bfloat16()


# --- dispatch -------------------------------------------------------------------------------------


def test_shared_experts_are_choices_of_any_number_of_tokens() -> None:
    routing = Routing(6, 3, num_shared=2, fixed_order=True)
    assert {routing.num_shared_choices(tokens) for tokens in (1, 128, 129, 5000)} == {2}
    assert replace(routing, fixed_order=False).num_shared_choices(129) == 0


def test_tiles_change_on_hopper_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """There both are multiplied by wgmma."""
    for gpu in (replace(H200, capability=80), replace(H200, amd=True), H200):
        monkeypatch.setattr(nvrtc, "available", lambda: False)
        tilings = {choose_moe(tokens, gpu, fixed_order=True) for tokens in COUNTS}
        assert len(tilings) == 1
        assert not experts_need_blocks(2080, 776, False, gpu)
    monkeypatch.setattr(nvrtc, "available", lambda: True)
    for tokens in COUNTS:
        assert choose_moe(tokens, H200, fixed_order=True) == choose_moe(tokens, H200)
    assert not experts_need_blocks(2048, 768, True, H200)
    assert experts_need_blocks(2048, 768, False, H200)  # quantized, or another activation
    assert experts_need_blocks(2080, 768, True, H200)
    assert experts_need_blocks(2048, 776, True, H200)


@pytest.mark.covering(0)
@pytest.mark.parametrize("tokens", [3, MAX_DECODE_TOKENS + 3])
@pytest.mark.parametrize("gated", [False, True])
def test_a_layer_against_the_definition(tokens: int, gated: bool, device: torch.device) -> None:
    """Shared experts as choices, or a gated one after them."""
    routing = Routing(6, 3, "sigmoid", True, 2.5, num_shared=0 if gated else 2)
    place = WeightPlacement(torch.float32, device, fixed_order=device.type != "cuda")
    moe = (
        SharedExpertMoE(64, 24, 40, routing, place) if gated else SparseMoE(64, 24, routing, place)
    )
    moe.gate.routing = replace(moe.gate.routing, fixed_order=True)
    generator = torch.Generator().manual_seed(0)
    for view in moe.weights().values():
        view.copy_(torch.randn(view.shape, generator=generator) * 0.2)
    weights = moe.gate.weight, moe.experts.w13, moe.experts.w2
    gate, w13, w2 = (w.cpu().clone() for w in weights)
    moe.gate.prepare()
    moe.experts.prepare()
    x = torch.randn(tokens, 64, generator=generator)
    routed = route_ref(x @ gate.T, None, replace(routing, fixed_order=True))
    assert routed.num_shared == (0 if gated else 2)
    want = expert_partials_ref(x, w13, w2, routed).sum(0)
    if gated:
        assert isinstance(moe, SharedExpertMoE)
        value = moe.shared_expert(x.to(device)).result().cpu()
        want += torch.sigmoid(x @ moe.shared_expert_gate.weight.cpu().T) * value
    partials = moe.partials(x.to(device))
    assert partials.dtype == torch.float32
    torch.testing.assert_close(partials.sum(0).cpu(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.exhaustive
def test_blocks_of_tokens_are_computed_one_after_another(device: torch.device) -> None:
    place = WeightPlacement(torch.float32, device)
    moe = SparseMoE(64, 24, Routing(6, 3), place)
    generator = torch.Generator().manual_seed(0)
    for view in moe.weights().values():
        view.copy_(torch.randn(view.shape, generator=generator) * 0.2)
    moe.gate.prepare()
    moe.experts.prepare()
    x = torch.randn(MAX_DECODE_TOKENS + 5, 64, generator=generator).to(device)
    assert not moe.experts.in_blocks
    want = moe(x).result()
    moe.experts.in_blocks = True
    torch.testing.assert_close(moe(x).result(), want, rtol=1e-4, atol=1e-4)


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROUTERS)
def test_a_token_is_routed_the_same_among_any_number(name: str) -> None:
    routing, hidden = ROUTERS[name]
    routing = replace(routing, fixed_order=True)
    weight = normal(routing.num_experts, hidden, scale=hidden**-0.5)
    bias = normal(routing.num_experts, seed=2).float() if routing.correction_bias else None
    counts = new_counts(routing, weight.device)
    x = normal(max(COUNTS), hidden, seed=1)
    whole = route(x, weight, bias, routing, counts)
    for count in COUNTS:
        for rows in (slice(0, count), slice(max(COUNTS) - count, None)):
            got = route(x[rows].contiguous(), weight, bias, routing, counts)
            assert torch.equal(got.experts, whole.experts[rows]), count
            same = got.weights.view(torch.int32) == whole.weights[rows].view(torch.int32)
            assert bool(same.all()), count
    logits = x.double() @ weight.double().T
    if not routing.float32_logits:
        logits = logits.bfloat16()
    want = route_ref(logits.float(), bias, routing)
    assert (want.experts == whole.experts).float().mean() > 0.98  # near-ties aside


def layer(name: str) -> SparseMoE:
    """With random weights."""
    routing, hidden, width, shared = LAYERS[name]
    place = WeightPlacement(torch.bfloat16, torch.device("cuda"), fixed_order=True)
    moe = (
        SharedExpertMoE(hidden, width, shared, routing, place)
        if shared
        else SparseMoE(hidden, width, routing, place)
    )
    moe.experts.fused = True
    generator = torch.Generator("cuda").manual_seed(0)
    for view in moe.weights().values():
        view.normal_(0, 0.02, generator=generator)
    moe.gate.prepare()
    moe.experts.prepare()
    if isinstance(moe, SharedExpertMoE):
        moe.shared_expert.gate_up_proj.prepare()
        moe.shared_expert.down_proj.prepare()
    return moe


def normed(moe: SparseMoE, x: Tensor, residual: Tensor) -> Tensor:
    """The layer's sum, the residual stream after it and its norm, one after another."""
    norm = RMSNorm.of(torch.linspace(-1, 1, x.shape[1], device="cuda").bfloat16(), 1e-6)
    out, total = moe(x).add_rms_norm(residual, norm, None)
    assert isinstance(out, Tensor)
    return torch.cat([moe(x).result(), total, out], 1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYERS)
def test_a_token_has_the_same_bits_among_any_number(name: str) -> None:
    moe, hidden = layer(name), LAYERS[name][1]
    x, residual = normal(max(COUNTS), hidden, seed=1), normal(max(COUNTS), hidden, seed=2)
    whole = normed(moe, x, residual)
    differing = {}
    for count in COUNTS:
        for rows in (slice(0, count), slice(max(COUNTS) - count, None)):
            got = normed(moe, x[rows].contiguous(), residual[rows].contiguous())
            equal = (got == whole[rows]).all(1)
            if not bool(equal.all()):
                differing[count] = int((~equal).sum())
    assert not differing
    assert not moe.gate._counts.any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "qwen3.5-35b-a3b", "deepseek-v2-lite"])
def test_a_captured_layer_has_the_same_bits(name: str) -> None:
    moe, hidden = layer(name), LAYERS[name][1]
    x, residual = normal(600, hidden, seed=1), normal(600, hidden, seed=2)
    whole = normed(moe, x, residual)
    for count in (1, 4, 64, 200):
        inputs = x[:count].clone(), residual[:count].clone()
        normed(moe, *inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = normed(moe, *inputs)
        for first in (0, 300):
            inputs[0].copy_(x[first : first + count])
            inputs[1].copy_(residual[first : first + count])
            graph.replay()
            assert torch.equal(captured, whole[first : first + count]), count


@pytest.mark.gpu
def test_silu_at_its_ends_is_that_of_both_kernels() -> None:
    """gate from -128 to 128, also where exp overflows: few tokens, and the same among many."""
    moe = layer("small")
    count, hidden = 200, LAYERS["small"][1]
    x = normal(count, hidden, seed=1) * torch.logspace(-2, 3, count, device="cuda")[:, None]
    x = x.bfloat16()
    many = combine(moe.partials(x), torch.float32)
    few = torch.cat([combine(moe.partials(part), torch.float32) for part in x.split(8)])
    assert torch.equal(few, many)
