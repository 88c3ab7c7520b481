"""Few tokens on Hopper: the experts' kernel chooses from the router's logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forerun.kernels.elementwise.rms_norm import add_rms_norm
from forerun.kernels.moe.config import Sm90RouterConfig
from forerun.kernels.moe.experts import expert_partials
from forerun.kernels.moe.router import new_counts, route
from forerun.kernels.moe.router_logits_sm90 import (
    LogitsRouter,
    add_rms_norm_router_logits_sm90,
    choose_logits_sm90,
    norm_fits,
    router_logits_sm90,
)
from forerun.kernels.moe.routing import Routing
from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import GpuInfo, gpu_of
from tests.kernels.guarded import guarded

H200 = GpuInfo(132, amd=False, capability=90)
QWEN3_MOE = Routing(128, 8, norm_topk_prob=True, float32_logits=False)
# hidden size, width, routing
SHAPES = {
    "qwen3-30b-a3b": (2048, 768, QWEN3_MOE),
    "deepseek-v2-lite": (2048, 1408, Routing(64, 6, num_shared=2)),
    "glm-4.5-air": (4096, 1408, Routing(128, 8, "sigmoid", True, 1.0, correction_bias=True)),
    "odd": (384, 128, Routing(12, 3, "sigmoid", num_shared=1, routed_scaling_factor=2.5)),
}


def test_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(
        tokens: int = 1,
        hidden: int = 2048,
        width: int = 768,
        routing: Routing = QWEN3_MOE,
        gpu: GpuInfo = H200,
    ) -> Sm90RouterConfig | None:
        return choose_logits_sm90(tokens, hidden, width, routing, torch.bfloat16, gpu)

    monkeypatch.setattr(nvrtc, "available", lambda: True)
    for hidden, width, routing in SHAPES.values():
        for tokens in (1, 4):
            assert choose(tokens, hidden, width, routing) is not None
        assert choose(5, hidden, width, routing) is None
    assert choose(width=704) is None  # the experts have no kernel for few tokens
    assert choose(routing=Routing(128, 9)) is None  # 36 pairs
    assert choose(routing=Routing(128, 8, n_group=8, topk_group=4)) is None
    assert choose(gpu=replace(H200, capability=100)) is None
    assert norm_fits(2, 2048) and not norm_fits(3, 2048) and not norm_fits(1, 4096)


# --- on a GPU -------------------------------------------------------------------------------------


class Layer:
    """Random weights."""

    def __init__(self, shape: str) -> None:
        self.hidden, width, self.routing = SHAPES[shape]
        routing, device = self.routing, torch.device("cuda")
        config = choose_logits_sm90(1, self.hidden, width, routing, torch.bfloat16, gpu_of(device))
        if config is None:
            pytest.skip("needs Hopper and NVRTC")
        self.generator = torch.Generator("cuda").manual_seed(0)
        self.counts = new_counts(routing, device)
        experts = routing.num_experts + routing.num_shared
        self.gate = guarded(self.normal(routing.num_experts, self.hidden) * 0.02)
        self.w13 = self.normal(experts, 2 * width, self.hidden) * 0.02
        self.w2 = self.normal(experts, self.hidden, width) * 0.02
        self.bias = None
        if routing.correction_bias:
            self.bias = self.normal(routing.num_experts).float() * 0.1
        self.router = LogitsRouter(self.gate, self.bias, routing, self.counts, config)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device="cuda", dtype=torch.bfloat16)

    def run(self, x: Tensor, few: bool) -> Tensor:
        if few:
            return expert_partials(
                x, self.w13, self.w2, router_logits_sm90(guarded(x), self.router)
            )
        routed = route(x, self.gate, self.bias, self.routing, self.counts)
        return expert_partials(x, self.w13, self.w2, routed)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_bits_as_with_the_router(shape: str) -> None:
    layer = Layer(shape)
    for tokens in (1, 2, 3, 4):
        x = layer.normal(tokens, layer.hidden)
        same, nan = x[:1].expand_as(x).contiguous(), x.clone()
        nan[0, 3] = torch.nan
        for tried in (*(layer.normal(*x.shape) for _ in range(5)), torch.zeros_like(x), same, nan):
            tried = guarded(tried)
            got, want = layer.run(tried, few=True), layer.run(tried, few=False)
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert not layer.counts.any()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["qwen3-30b-a3b", "deepseek-v2-lite"])
@pytest.mark.parametrize("parts", [2, 4])
def test_norm_has_the_same_bits_as_the_norm_of_more_tokens(shape: str, parts: int) -> None:
    layer = Layer(shape)
    norm, residuals = layer.normal(layer.hidden), layer.normal(200, layer.hidden)
    partials = layer.normal(parts, 200, layer.hidden).float()
    partials += layer.normal(parts, 200, layer.hidden).float() / 1024
    want, want_total = add_rms_norm(partials, residuals, norm, 1e-6)
    for token in range(0, 200, 2):
        for rows in (slice(token, token + 1), slice(token, token + 2)):
            got, total, logits = add_rms_norm_router_logits_sm90(
                partials[:, rows].contiguous(), residuals[rows], (norm, 1e-6), layer.router
            )
            assert torch.equal(total, want_total[rows]) and torch.equal(got, want[rows])
            assert torch.equal(logits.logits, router_logits_sm90(got, layer.router).logits)
