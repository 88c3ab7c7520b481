"""The router's kernel for Hopper: dispatch, and on a GPU its results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forerun.kernels.elementwise.rms_norm import add_rms_norm, rms_norm
from forerun.kernels.moe.config import (
    DECODE_BLOCK_M,
    MAX_DECODE_TOKENS,
    Sm90RouterConfig,
    choose_router_sm90,
    router_sm90_smem_bytes,
)
from forerun.kernels.moe.experts import expert_partials
from forerun.kernels.moe.router import new_counts, route
from forerun.kernels.moe.routing import Routed, Routing, align_ref, route_ref
from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import GpuInfo, gpu_of
from tests.kernels.guarded import guarded

H200 = GpuInfo(132, amd=False, capability=90)
QWEN3_MOE = Routing(128, 8, norm_topk_prob=True, float32_logits=False)
DEEPSEEK_V3 = Routing(
    256, 8, "sigmoid", True, 2.5, n_group=8, topk_group=4, group_score="top2", correction_bias=True
)
ROUTERS = {
    "qwen3-30b-a3b": (QWEN3_MOE, 2048),
    "qwen3-235b-a22b": (QWEN3_MOE, 4096),
    "deepseek-v2-lite": (Routing(64, 6, num_shared=2), 2048),
    "mixtral": (Routing(8, 2, norm_topk_prob=True), 4096),
    "groups by their best": (
        Routing(160, 6, "softmax", False, 16.0, n_group=8, topk_group=3),
        2048,
    ),
    "groups by their two best": (replace(DEEPSEEK_V3, num_shared=1), 2048),
    "sigmoid without groups": (Routing(64, 6, "sigmoid", True, correction_bias=True), 1024),
    "ten experts, ragged slices": (Routing(10, 3, num_shared=3), 136),
    "as many as fit": (Routing(336, 16), 1024),
    "one expert": (Routing(1, 1), 64),
    "one slice": (
        Routing(8, 2, "sigmoid", True, 2.5, 4, 2, "top2", correction_bias=True, num_shared=1),
        128,
    ),
    "three slices": (Routing(16, 2), 384),
}
TOKENS = (1, 2, 3, 4, 5, 16, 17, 33, 97, 128)


def choose(
    routing: Routing,
    hidden: int,
    tokens: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    gpu: GpuInfo = H200,
) -> Sm90RouterConfig | None:
    sizes = (routing.num_experts, routing.top_k, routing.groups[0])
    return choose_router_sm90(tokens, hidden, *sizes, dtype, gpu)


def test_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "available", lambda: True)
    assert choose(QWEN3_MOE, 2048) == Sm90RouterConfig(slice=256, tiles_per_warp=2)
    assert choose(QWEN3_MOE, 4096) == Sm90RouterConfig(slice=512, tiles_per_warp=2)
    assert choose(Routing(10, 3), 136) == Sm90RouterConfig(slice=128, tiles_per_warp=1)
    for routing, hidden in ROUTERS.values():  # whatever the number of tokens
        configs = {choose(routing, hidden, tokens) for tokens in TOKENS}
        assert len(configs) == 1 and None not in configs
    assert choose(QWEN3_MOE, 2048, MAX_DECODE_TOKENS + 1) is None
    # More of the weight than registers hold: DeepSeek-V3, V2, Qwen3-235B's with a ragged slice.
    assert choose(DEEPSEEK_V3, 7168) is None and choose(Routing(160, 6), 5120) is None
    assert choose(QWEN3_MOE, 4088) is None and choose(Routing(64, 8), 8192) is None
    assert choose(QWEN3_MOE, 2044) is None  # vectors of 8 columns
    # More shared memory than there is: for partials, and for x.
    assert choose(Routing(512, 8), 1024) is None and choose(Routing(64, 8), 6144) is None
    assert choose(Routing(64, 8, n_group=64, topk_group=32), 1024) is None
    for dtype in (torch.float16, torch.float32):
        assert choose(QWEN3_MOE, 2048, dtype=dtype) is None
    for gpu in (
        replace(H200, capability=80),
        replace(H200, capability=100),
        replace(H200, amd=True),
        replace(H200, interpreted=True),
    ):
        assert choose(QWEN3_MOE, 2048, gpu=gpu) is None
    monkeypatch.setattr(nvrtc, "available", lambda: False)
    assert choose(QWEN3_MOE, 2048) is None


def test_shared_memory() -> None:
    """One or two tokens are one CTA's, more are dealt out to 8. Beyond 16, with tiles of x."""
    assert router_sm90_smem_bytes(1, 128, 8, 256) == 8 * 128 * 4 + 8 * 4 + 128 * 16
    assert router_sm90_smem_bytes(2, 128, 8, 256) == 8 * 2 * 128 * 4 + 2 * 8 * 4 + 128 * 16
    assert router_sm90_smem_bytes(3, 128, 8, 256) == 8 * 128 * 4 + 3 * 8 * 4 + 128 * 16
    assert router_sm90_smem_bytes(16, 128, 8, 256) == 8 * 2 * 128 * 4 + 16 * 8 * 4 + 128 * 16
    many = 8 * 4 * 128 * 4 + 32 * (256 + 32) * 2 + 128 * 16  # a run of 4 tokens per CTA, two tiles
    assert router_sm90_smem_bytes(17, 128, 8, 256) == many + 17 * 8 * 4
    assert router_sm90_smem_bytes(32, 128, 8, 256) == many + 32 * 8 * 4
    assert (
        router_sm90_smem_bytes(128, 10, 3, 128)
        == 8 * 16 * 16 * 4 + 128 * (128 + 32) * 2 + 128 * 3 * 4 + 10 * 16
    )


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.fixture
def hopper() -> None:
    if choose(QWEN3_MOE, 2048, gpu=gpu_of(torch.device("cuda"))) is None:
        pytest.skip("needs Hopper and NVRTC")


class Router:
    """A router with random weights. `exact`: logits are exact in float32, and often equal."""

    def __init__(self, name: str, exact: bool = False) -> None:
        self.routing, self.hidden = ROUTERS[name]
        self.generator = torch.Generator("cuda").manual_seed(0)
        self.counts = new_counts(self.routing, torch.device("cuda"))
        experts = self.routing.num_experts
        if exact:
            self.weight = self.integers(2, experts, self.hidden) / 64
            self.x = self.integers(4, MAX_DECODE_TOKENS, self.hidden)
        else:
            self.weight = self.normal(experts, self.hidden) * self.hidden**-0.5
            self.x = self.normal(MAX_DECODE_TOKENS, self.hidden)
        self.bias = self.normal(experts).float() if self.routing.correction_bias else None
        assert choose(self.routing, self.hidden, gpu=gpu_of(self.x.device)) is not None

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device="cuda").bfloat16()

    def integers(self, end: int, *shape: int) -> Tensor:
        """Between -end and end, without these."""
        made = torch.randint(1 - end, end, shape, generator=self.generator, device="cuda")
        return made.bfloat16()

    def run(self, x: Tensor) -> Routed:
        return route(x, self.weight, self.bias, self.routing, self.counts)

    def run_ref(self, x: Tensor) -> Routed:
        logits = (x.double() @ self.weight.double().T).float()
        if not self.routing.float32_logits:
            logits = logits.bfloat16().float()
        return route_ref(logits, self.bias, self.routing)


def check_tiles(routed: Routed, num_experts: int) -> None:
    """Every expert's pairs are in order of tokens, and the tiles are those of `align_ref`."""
    tiles, tokens = routed.tiles, len(routed.experts)
    assert tiles is not None and tiles.block_m == DECODE_BLOCK_M
    want = align_ref(routed.experts, num_experts, DECODE_BLOCK_M)
    used = want.tiles[2] > 0
    assert torch.equal(tiles.tiles[2], want.tiles[2])
    assert torch.equal(tiles.tiles[0][used], want.tiles[0][used])
    assert torch.equal(tiles.tiles[1][used] // tokens, want.tiles[0][used])  # each in its own list
    for first, start, rows in zip(tiles.tiles[1].tolist(), *want.tiles[1:].tolist(), strict=True):
        pairs = tiles.pairs[first : first + rows]
        assert rows == 0 or torch.equal(pairs, want.pairs[start : start + rows])


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", ROUTERS)
def test_routing_at_real_sizes(name: str) -> None:
    """Exact logits: the same experts, also among equal scores."""
    router = Router(name, exact=True)
    for tokens in TOKENS:
        x = router.x[-tokens:]
        got, want = router.run(x), router.run_ref(x)
        same = (got.experts == want.experts).all(1)
        # With a bias, unequal scores may have equal sums, but for rounding.
        assert (~same).sum() <= (0 if router.bias is None else 1)
        assert got.num_shared == want.num_shared
        torch.testing.assert_close(got.weights[same], want.weights[same], rtol=1e-5, atol=1e-7)
        check_tiles(got, router.routing.num_experts + router.routing.num_shared)
    assert not router.counts.any()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", ROUTERS)
def test_nothing_is_read_beyond_the_inputs(name: str) -> None:
    router = Router(name)
    router.weight = guarded(router.weight)
    for tokens in TOKENS:
        router.run(guarded(router.x[:tokens]))
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", ROUTERS)
def test_a_token_is_routed_the_same_in_any_batch(name: str) -> None:
    router = Router(name)
    router.x[5] = torch.nan  # of one token, which harms no other
    whole, routing = router.run(router.x), router.routing
    assert whole.weights[5, : routing.top_k].isnan().all()
    assert len(set(whole.experts[5].tolist())) == routing.top_k + routing.num_shared
    check_tiles(whole, routing.num_experts + routing.num_shared)
    want = router.run_ref(router.x)
    same = (whole.experts == want.experts).all(1)
    assert same.sum() >= 120  # near-ties, and NaN
    others = same & ~want.weights.isnan().any(1)
    torch.testing.assert_close(whole.weights[others], want.weights[others], rtol=1e-4, atol=1e-6)
    order = torch.randperm(MAX_DECODE_TOKENS, device="cuda")
    batches = [order, *(order[:tokens] for tokens in (1, 2, 3, 16, 17, 32, 65, 100))]
    for batch in batches:
        got = router.run(router.x[batch])
        assert torch.equal(got.experts, whole.experts[batch])
        assert torch.equal(got.weights.view(torch.int32), whole.weights[batch].view(torch.int32))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("tokens", [1, 2, 9, 20, 128])
def test_captured_layers_follow_their_input(tokens: int) -> None:
    """Norm, router and experts, three times in one graph (PDL): the same as one by one."""
    router, width = Router("qwen3-30b-a3b"), 768
    norm = torch.ones(router.hidden, dtype=torch.bfloat16, device="cuda")
    w13 = router.normal(128, 2 * width, router.hidden) * 0.02
    w2 = router.normal(128, router.hidden, width) * 0.02
    x = router.x[:tokens].clone()

    def run(wait: bool = False) -> list[Tensor]:
        """`wait`: for every kernel, so that none can read too early."""
        found: list[Tensor] = []
        normed, total = rms_norm(x, norm, 1e-6), x
        for _ in range(3):
            routed = router.run(normed)
            assert routed.tiles is not None
            if wait:
                torch.cuda.synchronize()
            out = expert_partials(normed, w13, w2, routed)
            if wait:
                torch.cuda.synchronize()
            normed, total = add_rms_norm(out, total, norm, 1e-6)
            if wait:
                torch.cuda.synchronize()
            found += [routed.weights, routed.experts, routed.tiles.tiles[2], total]
        return found

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(20):
        x.copy_(router.normal(*x.shape))
        for _ in range(3):
            graph.replay()
        for got, want in zip(captured, run(wait=True), strict=True):
            assert torch.equal(got, want)
    assert not router.counts.any()
