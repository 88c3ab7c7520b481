"""Mixtures of experts: router, tiles and grouped GEMMs against their reference implementations."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.errors import ConfigError
from forerun.kernels.moe import align as align_module
from forerun.kernels.moe import experts as experts_module
from forerun.kernels.moe.align import align, of_experts, select_tiles
from forerun.kernels.moe.config import (
    SM90_DECODE,
    choose_moe,
    choose_router_tile,
    max_tiles,
    router_slice,
)
from forerun.kernels.moe.experts import (
    GELU_TANH,
    ClampedSwiglu,
    combine,
    combine_ref,
    expert_partials,
    expert_partials_ref,
)
from forerun.kernels.moe.experts_mxfp4 import Mxfp4Matrices, Mxfp4Weight, expert_partials_mxfp4
from forerun.kernels.moe.gated_output import GatedOutput, gate_output, gate_output_ref
from forerun.kernels.moe.router import new_counts, route, router_partials, top_k
from forerun.kernels.moe.routing import (
    ExpertTiles,
    Routed,
    Routing,
    align_ref,
    route_ref,
    select_tiles_ref,
)
from forerun.kernels.runtime.gpu import gpu_of
from forerun.layers.communication import WeightPlacement
from forerun.layers.module import Module
from forerun.layers.moe import SharedExpertMoE, SparseMoE
from forerun.layers.residual import AddRMSNorm
from forerun.models.formats.mxfp4 import Mxfp4
from forerun.models.gpt_oss import GptOssMoE

ROUTINGS = {
    "softmax": Routing(8, 2),
    "normalized": Routing(20, 5, norm_topk_prob=True, float32_logits=False),
    "one expert": Routing(1, 1),
    "groups by their best": Routing(12, 3, n_group=3, topk_group=2, routed_scaling_factor=16.0),
    "groups by their two best": Routing(
        24, 4, "sigmoid", True, 2.5, n_group=4, topk_group=2, group_score="top2",
        correction_bias=True,
    ),
    "sigmoid without groups": Routing(48, 6, "sigmoid", True, correction_bias=True),
    "shared": Routing(8, 2, norm_topk_prob=True, routed_scaling_factor=2.5, num_shared=2),
    "one shared, groups": Routing(
        24, 3, "sigmoid", True, 2.5, n_group=4, topk_group=2, correction_bias=True, num_shared=1
    ),
}  # fmt: skip


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def tiles_by_expert(tiles: ExpertTiles) -> list[tuple[int, list[int]]]:
    """(expert, its pairs) of every tile in use."""
    pairs = tiles.pairs.tolist()
    used = [tile for tile in zip(*tiles.tiles.tolist(), strict=True) if tile[2] > 0]
    return [(expert, pairs[first : first + rows]) for expert, first, rows in used]


def check_tiles(routed: Routed, tiles: ExpertTiles, num_experts: int) -> None:
    """Every pair is in one tile of its expert, and no expert has more tiles than it needs."""
    experts, found = routed.experts.flatten().tolist(), tiles_by_expert(tiles)
    assert all(experts[pair] == expert for expert, members in found for pair in members)
    assert sorted(pair for _, members in found for pair in members) == list(range(len(experts)))
    assert all(len(members) <= tiles.block_m for _, members in found)
    want = {e: -(-n // tiles.block_m) for e, n in Counter(experts).items()}
    assert Counter(expert for expert, _ in found) == want
    order = [expert for expert, _ in found]
    assert order == sorted(order)  # tiles of an expert are neighbours
    assert tiles.tiles.shape[1] == max_tiles(len(experts), num_experts, tiles.block_m)


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        *product(ROUTINGS, (1, 7)),
        *product(("softmax", "shared"), (33, 65)),
        ("groups by their best", 131),
        ("shared", 128),
        ("shared", 131),
    ],
)
def test_routing(name: str, tokens: int, device: torch.device) -> None:
    routing, hidden = ROUTINGS[name], 136  # two slices of the router's K, one of them ragged
    x, weight = random(tokens, hidden, seed=1), random(routing.num_experts, hidden, seed=2)
    bias = random(routing.num_experts, seed=3) if routing.correction_bias else None
    want = route_ref(x @ weight.T, bias, routing)
    counts = new_counts(routing, device)
    for _ in range(2):  # the counts are left as they were
        got = route(
            x.to(device), weight.to(device), bias if bias is None else bias.to(device), routing,
            counts,
        )  # fmt: skip
        assert torch.equal(got.experts.cpu(), want.experts)
        torch.testing.assert_close(got.weights.cpu(), want.weights, rtol=1e-4, atol=1e-6)
        assert got.tiles is not None
        assert got.tiles.block_m == choose_moe(tokens, gpu_of(device)).block_m
        shared = routing.num_shared if tokens <= 128 else 0
        assert got.num_shared == want.num_shared == shared
        assert got.experts.shape == got.weights.shape == (tokens, routing.top_k + shared)
        check_tiles(got, got.tiles, routing.num_experts + shared)
        assert not counts.any()


@pytest.mark.parametrize("tokens", [1024, 1025])  # the last of small tiles, the first of large ones
def test_logits_of_many_tokens(tokens: int, device: torch.device) -> None:
    """In float16: the interpreter multiplies no bfloat16."""
    experts, hidden = 128, 136
    x, weight = (random(n, hidden, seed=n).half().to(device) for n in (tokens, experts))
    tile = choose_router_tile(tokens, experts, gpu_of(device))
    assert (tile.block_m > 64) == (tokens > 1024)
    partials = router_partials(x, weight)
    assert partials.shape == (2, tokens, experts)
    torch.testing.assert_close(partials.sum(0), x.float() @ weight.float().T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("tokens", [5, 40])  # one CTA, and several
def test_shared_experts_are_the_last_choices(tokens: int, device: torch.device) -> None:
    """With weight 1, which is neither normalised nor scaled."""
    routing = Routing(8, 2, norm_topk_prob=True, routed_scaling_factor=2.5, num_shared=3)
    logits = random(1, tokens, 8, seed=1)
    for got in (
        route_ref(logits[0], None, routing),
        top_k(logits.to(device), None, routing, new_counts(routing, device)),
    ):
        assert got.experts[:, 2:].tolist() == [[8, 9, 10]] * tokens
        assert got.weights[:, 2:].tolist() == [[1.0, 1.0, 1.0]] * tokens
        torch.testing.assert_close(got.weights[:, :2].sum(1).cpu(), torch.full((tokens,), 2.5))
        assert got.experts[:, :2].max() < 8


def test_rounded_logits(device: torch.device) -> None:
    """Experts whose logits are equal in bfloat16 are chosen by their number."""
    weight = torch.ones(4, 8)
    weight[2] += 1e-3  # 8.008: 8 in bfloat16
    weight[3] += 0.1
    x = torch.ones(1, 8)
    for float32, first in ((True, 2), (False, 0)):
        routing = Routing(4, 2, float32_logits=float32)
        partials = (x @ weight.T).unsqueeze(0).to(device)
        like = None if float32 else partials.bfloat16()
        got = top_k(partials, None, routing, new_counts(routing, device), like)
        assert got.experts.tolist() == [[3, first]]


@pytest.mark.parametrize("shared", [0, 2])
def test_a_token_of_nan_has_different_experts_and_harms_no_other(
    shared: int, device: torch.device
) -> None:
    routing = replace(ROUTINGS["groups by their two best"], num_shared=shared)
    x, weight = random(6, 64, seed=1), random(24, 64, seed=2)
    bias = random(24, seed=3)
    clean = route_ref(x @ weight.T, bias, routing)
    x[2] = torch.nan
    counts = new_counts(routing, device)
    got = route(x.to(device), weight.to(device), bias.to(device), routing, counts)
    experts = got.experts.tolist()
    assert len(set(experts[2][:4])) == 4 and all(0 <= e < 24 for e in experts[2][:4])
    assert experts[2][4:] == [24, 25][:shared]
    assert got.weights[2, :4].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(got.experts.cpu()[others], clean.experts[others])
    assert got.tiles is not None
    check_tiles(got, got.tiles, 24 + shared)


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("skew", [False, True])
def test_tiles_of_many_tokens(tokens: int, block_m: int, skew: bool) -> None:
    scores = random(tokens, 10, seed=4)
    if skew:
        scores[:, 3:7] -= 100  # experts without a token
    experts = scores.topk(3).indices.to(torch.int32)
    check_tiles(Routed(torch.empty(0), experts), align_ref(experts, 10, block_m), 10)


def same_tiles(got: ExpertTiles, want: ExpertTiles) -> bool:
    equal = torch.equal(got.pairs, want.pairs) and torch.equal(got.tiles, want.tiles)
    return equal and got.block_m == want.block_m


def random_experts(tokens: int, top_k: int, among: Tensor, seed: int = 0) -> Tensor:
    """[T, k] int32: different ones for each token, of `among`."""
    scores = random(tokens, len(among), seed=seed)
    return among[scores.argsort(dim=1)[:, :top_k]].to(torch.int32)


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts"),
    [
        (1, 1, 1),
        (1, 8, 64),
        (64, 1, 2),  # one chunk
        (65, 1, 2),  # a pair more
        (77, 3, 7),
        (129, 8, 128),
        (37, 5, 160),
        (23, 7, 512),
    ],
)
def test_tiles_are_those_of_the_reference(
    tokens: int, top_k: int, num_experts: int, block_m: int, device: torch.device
) -> None:
    experts = random_experts(tokens, top_k, torch.arange(num_experts)).to(device)
    want = align_ref(experts, num_experts, block_m)
    assert same_tiles(align(experts, num_experts, block_m), want)


@pytest.mark.parametrize(("chunks", "lists"), [(1, 512), (2, 16), (256, 64)])
@pytest.mark.parametrize(("tokens", "num_experts"), [(65, 20), (96, 20), (50, 300)])
def test_tiles_from_chunks_of_several_blocks(
    tokens: int,
    num_experts: int,
    chunks: int,
    lists: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(align_module, "SUMMED_CHUNKS", chunks)
    monkeypatch.setattr(align_module, "LISTS", lists)
    experts = random_experts(tokens, 3, torch.arange(num_experts)).to(device)
    want = align_ref(experts, num_experts, 16)
    assert same_tiles(align(experts, num_experts, 16), want)


@pytest.mark.parametrize("block", [4, 512])
@pytest.mark.parametrize("part", [range(3), range(3, 7), range(7, 20), range(8, 9)])
def test_selected_tiles_are_those_of_the_reference(
    part: range, block: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one block and of several; of experts without pairs, none is left."""
    monkeypatch.setattr(align_module, "SELECTED_BLOCK", block)
    chosen = torch.tensor([0, 2, 3, 5, 6, 7, 11, 19])
    tiles = align_ref(random_experts(60, 3, chosen), 20, 16)
    want = select_tiles_ref(tiles, part)
    moved = replace(tiles, pairs=tiles.pairs.to(device), tiles=tiles.tiles.to(device))
    got = select_tiles(moved, part)
    assert torch.equal(got.tiles.cpu(), want.tiles) and got.pairs is moved.pairs
    rows = want.tiles[2]
    inside = torch.tensor([int(owner) in part for owner in tiles.tiles[0]])
    assert rows.sum() == tiles.tiles[2][inside].sum()
    assert rows[rows.count_nonzero() :].count_nonzero() == 0
    assert (rows.count_nonzero() > 0) == (part != range(8, 9))


@pytest.mark.parametrize("chosen", [[0], [9], [4], [0, 9], [3, 4, 6]])
def test_tiles_of_few_among_many_experts(chosen: list[int], device: torch.device) -> None:
    """All pairs to one expert; experts without a pair before, between and after."""
    experts = random_experts(150, len(chosen), torch.tensor(chosen)).to(device)
    want = align_ref(experts, 10, 64)
    assert same_tiles(align(experts, 10, 64), want)


def test_the_bound_on_tiles_is_reached_and_never_passed() -> None:
    for pairs, experts, block_m in product((1, 5, 64, 100), (1, 4, 128), (16, 64)):
        bound = max_tiles(pairs, experts, block_m)
        touched = min(pairs, experts)
        most = touched - 1 + -(-(pairs - touched + 1) // block_m)  # all but one pair to one expert
        assert most <= bound <= touched + pairs // block_m


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # no bfloat16 in the interpreter
@pytest.mark.parametrize(
    ("tokens", "hidden", "width", "num_shared"),
    [(1, 64, 24, 0), (9, 136, 72, 0), (9, 136, 72, 2), (70, 40, 16, 1), (131, 24, 24, 0)],
)
def test_experts(
    tokens: int, hidden: int, width: int, num_shared: int, dtype: torch.dtype, device: torch.device
) -> None:
    routing, count = Routing(6, 3, norm_topk_prob=True, num_shared=num_shared), 6 + num_shared
    x = random(tokens, hidden, seed=1).to(dtype)
    gate = random(6, hidden, seed=2, scale=0.2).to(dtype)
    w13 = random(count, 2 * width, hidden, seed=3, scale=0.2).to(dtype)
    w2 = random(count, hidden, width, seed=4, scale=0.2).to(dtype)
    extra = random(tokens, hidden, seed=5).to(dtype) if tokens > 128 else None
    routed = route(x.to(device), gate.to(device), None, routing, new_counts(routing, device))
    plain = Routed(routed.weights.cpu(), routed.experts.cpu())
    want = expert_partials_ref(x.float(), w13.float(), w2.float(), plain, extra)
    moved = None if extra is None else extra.to(device)
    got = expert_partials(x.to(device), w13.to(device), w2.to(device), routed, moved)
    assert got.dtype == (torch.float32 if tokens <= 128 else dtype)
    error = (got.cpu().float() - want).norm(dim=-1) / want.norm(dim=-1)
    assert error.max() < (1e-5 if dtype == torch.float32 else 2e-3)
    torch.testing.assert_close(combine(got, dtype).cpu(), combine_ref(got.cpu(), dtype))


@pytest.mark.parametrize(
    ("hidden", "width", "is_part"),
    [(64, 64, False), (72, 24, False), (136, 72, True)],  # whole blocks of K, and parts
)
def test_rows_in_the_order_of_the_lists_have_the_same_bits(
    hidden: int, width: int, is_part: bool, device: torch.device
) -> None:
    tokens, routing = 150, Routing(6, 3, norm_topk_prob=True)
    x, gate = random(tokens, hidden, seed=1).to(device), random(6, hidden, seed=2).to(device)
    routed = route(x, gate, None, routing, new_counts(routing, device))
    routed = of_experts(routed, range(1, 4)) if is_part else routed
    count = 3 if is_part else 6
    w13 = random(count, 2 * width, hidden, seed=3, scale=0.2).to(device)
    w2 = random(count, hidden, width, seed=4, scale=0.2).to(device)
    assert routed.tiles is not None
    plain = choose_moe(tokens, gpu_of(device), x.itemsize)
    want = expert_partials(x, w13, w2, routed, None, plain)
    got = expert_partials(x, w13, w2, routed, None, replace(plain, tma=True))
    assert torch.equal(got, want) and bool(want.any())


@pytest.mark.parametrize("tokens", [3, 131])
def test_a_part_of_the_experts(tokens: int, device: torch.device) -> None:
    """Of the router's tiles those of other experts are skipped: their weights are not there."""
    routing = Routing(8, 3, norm_topk_prob=True)
    x, weight = (random(*s, seed=i).to(device) for i, s in enumerate([(tokens, 32), (8, 32)]))
    w13, w2 = random(8, 48, 32, seed=2).to(device), random(8, 32, 24, seed=3).to(device)
    routed = route(x, weight, None, routing, new_counts(routing, device))
    whole, total = expert_partials_ref(x, w13, w2, routed), 0
    for part in (range(5), range(5, 8)):
        own = slice(part.start, part.stop)
        got = expert_partials(x, w13[own].clone(), w2[own].clone(), of_experts(routed, part))
        outside = (routed.experts < part.start) | (routed.experts >= part.stop)
        assert not got[outside.t()].any()
        total = total + got.float()
    torch.testing.assert_close(total, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out", [None, torch.float32])
def test_gated_output(dtype: torch.dtype, out: torch.dtype | None, device: torch.device) -> None:
    x, value = (random(5, 72, seed=seed).to(device, dtype) for seed in (1, 2))
    weight = random(1, 72, seed=3, scale=0.2).to(device, dtype)
    places = [None if out is None else torch.full((5, 72), torch.nan, device=device) for _ in "ab"]
    got, want = (
        gate_output(x, weight, value, places[0]),
        gate_output_ref(x, weight, value, places[1]),
    )
    assert got.dtype == want.dtype == (out or dtype)
    assert out is None or (got is places[0] and want is places[1])
    gate = torch.sigmoid((x.double() * weight.double()).sum(1, keepdim=True))
    for each in (got, want):
        error = (each.double() - gate * value.double()).abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("tokens", [3, pytest.param(130, marks=pytest.mark.exhaustive)])
def test_a_gated_shared_expert_beside_the_kernel_for_hopper(
    tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That kernel leaves room for it (here the reference implementation does), Triton's add it."""

    def stand_in(
        x: Tensor, weights: tuple[Tensor, Tensor], routed: Routed, _: object, num_more: int = 0
    ) -> Tensor:
        out = expert_partials_ref(x, *weights, routed)
        return torch.cat((out, out.new_full((num_more, *out.shape[1:]), torch.nan)))

    hidden, width = 64, 24
    routing, count = Routing(6, 3, norm_topk_prob=True), 6
    x, gate = random(tokens, hidden, seed=1).to(device), random(6, hidden, seed=2).to(device)
    w13 = random(count, 2 * width, hidden, seed=3, scale=0.2).to(device)
    w2 = random(count, hidden, width, seed=4, scale=0.2).to(device)
    shared = GatedOutput(
        x, random(1, hidden, seed=5).to(device), random(tokens, hidden, seed=6).to(device)
    )
    counts = new_counts(routing, device)
    routed = route(x, gate, None, routing, counts)
    assert routed.tiles is not None
    routed = replace(routed, tiles=replace(routed.tiles, progress=counts))
    want = combine_ref(expert_partials_ref(x, w13, w2, routed, shared.result()), x.dtype)
    for config in (None, SM90_DECODE) if tokens <= 128 else (None,):
        monkeypatch.setattr(experts_module, "choose_moe_sm90", lambda *_, found=config: found)
        monkeypatch.setattr(experts_module, "expert_partials_sm90", stand_in)
        got = expert_partials(x, w13, w2, routed, shared)
        assert len(got) == (3 if config is None else 4)
        torch.testing.assert_close(combine(got, x.dtype), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("tokens", "hidden", "width"), [(1, 32, 40), (7, 72, 24), (131, 32, 24)])
def test_biases_and_clamped_swiglu(
    tokens: int, hidden: int, width: int, device: torch.device
) -> None:
    """gpt-oss: kernels and reference against the definition, with a router's bias."""
    routing = Routing(6, 2, norm_topk_prob=True, float32_logits=False)
    x, gate = random(tokens, hidden, seed=1), random(6, hidden, seed=2)
    w13, w2 = random(6, 2 * width, hidden, seed=3), random(6, hidden, width, seed=4)
    b13, b2, bias = random(6, 2 * width, seed=5), random(6, hidden, seed=6), random(6, seed=7)
    logits, chosen = (x @ gate.T + bias).topk(2)
    weights = logits.softmax(1)
    want = torch.empty(2, tokens, hidden)
    for t, (experts, of) in enumerate(zip(chosen.tolist(), weights, strict=True)):
        for j, e in enumerate(experts):
            glu, up = (w13[e] @ x[t] + b13[e]).chunk(2)
            glu, up = glu.clamp(max=1.5), up.clamp(-1.5, 1.5)
            act = (up + 1) * glu * torch.sigmoid(1.702 * glu)
            want[j, t] = (w2[e] @ act + b2[e]) * of[j]

    def outcome(device: torch.device) -> tuple[Routed, Tensor]:
        a, b, c, d, e, f, g = (t.to(device) for t in (x, gate, w13, w2, b13, b2, bias))
        routed = route(a, b, None, routing, new_counts(routing, device), g)
        swiglu = ClampedSwiglu(e, f, 1.702, 1.5)
        return routed, expert_partials(a, c, d, routed, activation=swiglu).float().cpu()

    routed, got = outcome(device)
    assert torch.equal(routed.experts.cpu().long(), chosen)
    torch.testing.assert_close(routed.weights.cpu(), weights, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    swiglu = ClampedSwiglu(b13, b2, 1.702, 1.5)
    plain = Routed(weights, chosen.to(torch.int32))
    torch.testing.assert_close(
        expert_partials_ref(x, w13, w2, plain, None, swiglu), want, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("tokens", "hidden", "width"),
    [(1, 32, 40), pytest.param(131, 72, 24, marks=pytest.mark.exhaustive)],
)
def test_gelu_experts(tokens: int, hidden: int, width: int, device: torch.device) -> None:
    """Gemma 4: kernels and reference against the definition."""
    routing = Routing(6, 2, norm_topk_prob=True, float32_logits=False)
    x, gate = random(tokens, hidden, seed=1), random(6, hidden, seed=2)
    w13, w2 = random(6, 2 * width, hidden, seed=3), random(6, hidden, width, seed=4)
    moved = [t.to(device) for t in (x, gate, w13, w2)]
    routed = route(moved[0], moved[1], None, routing, new_counts(routing, device))
    got = expert_partials(moved[0], *moved[2:], routed, activation=GELU_TANH).float().cpu()
    plain = Routed(routed.weights.cpu(), routed.experts.cpu())
    of_all = torch.einsum("th,eih->tei", x, w13)  # every token by every expert
    glu, up = of_all.chunk(2, -1)
    out = torch.einsum("tei,ehi->teh", F.gelu(glu, approximate="tanh") * up, w2)
    chosen = out.gather(1, plain.experts.long().unsqueeze(-1).expand(-1, -1, hidden))
    want = (chosen * plain.weights.unsqueeze(-1)).transpose(0, 1)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    of_ref = expert_partials_ref(x, w13, w2, plain, None, GELU_TANH)
    torch.testing.assert_close(of_ref, want, rtol=1e-4, atol=1e-4)


@pytest.mark.covering(0)
@pytest.mark.parametrize("tokens", [7, 131])
def test_mxfp4(tokens: int, device: torch.device) -> None:
    """Against the same kernels over the weights that the codes mean."""
    routing = Routing(6, 2, norm_topk_prob=True, float32_logits=False)
    hidden, width, generator = 128, 64, torch.Generator().manual_seed(0)
    x, gate = random(tokens, hidden, seed=1).to(device), random(6, hidden, seed=2).to(device)
    b13, b2 = (random(6, n, seed=n).to(device) for n in (2 * width, hidden))
    stored: list[tuple[Tensor, Tensor]] = []
    for n, k in ((2 * width, hidden), (hidden, width)):
        blocks = torch.randint(0, 256, (6, n, k // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 124, (6, n, k // 32), dtype=torch.uint8, generator=generator)
        stored.append((blocks.to(device), scales.to(device)))
    w13, w2 = (Mxfp4Matrices.pack(Mxfp4Weight.of(*pair)) for pair in stored)
    plain = [Mxfp4Weight.of(*pair).dequantize() for pair in stored]
    for packed, meant in zip((w13, w2), plain, strict=True):
        assert torch.equal(packed.dequantize(torch.float32), meant)
    swiglu = ClampedSwiglu(b13, b2, 1.702, 1.5)
    routed = route(x, gate, None, routing, new_counts(routing, device))
    got = expert_partials_mxfp4(x, w13, w2, routed, swiglu)
    want = expert_partials(x, *plain, routed, activation=swiglu)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="scales larger than 2"):
        Mxfp4Matrices.pack(Mxfp4Weight.of(stored[0][0], stored[0][1] + 10))


def test_experts_of_gpt_oss_stay_packed(device: torch.device) -> None:
    """A layer loaded from blocks and scales, against one that is loaded from what they mean."""
    routing = Routing(6, 2, norm_topk_prob=True, float32_logits=False)
    packed, plain = (
        GptOssMoE(128, 64, routing, WeightPlacement(torch.float32, device, allocate=packs))
        for packs in (False, True)
    )
    assert packed.experts.quantize(Mxfp4())
    generator, stored = torch.Generator(device).manual_seed(0), packed.quantized_weights()
    for name, view in plain.weights().items():
        if name in stored:
            codes = stored[name]
            assert isinstance(codes, Mxfp4Weight)
            codes.values.random_(0, 256, generator=generator)
            codes.scales.random_(120, 124, generator=generator)
            view.copy_(codes.dequantize().flatten(1, -2).transpose(1, 2).reshape(view.shape))
        else:
            view.normal_(generator=generator)
            packed.weights()[name].copy_(view)
    packed.prepare()
    plain.prepare()
    x = random(9, 128, seed=1).to(device)
    torch.testing.assert_close(packed(x).result(), plain(x).result(), rtol=1e-4, atol=1e-4)


def test_the_order_of_tokens_does_not_matter(device: torch.device) -> None:
    """Bit for bit on a GPU, below; NumPy's GEMM in the interpreter rounds by row."""
    routing = Routing(6, 3)
    x, gate = random(20, 64, seed=1).to(device), random(6, 64, seed=2, scale=0.2).to(device)
    w13 = random(6, 48, 64, seed=3, scale=0.2).to(device)
    w2 = random(6, 64, 24, seed=4, scale=0.2).to(device)

    def run(tokens: Tensor) -> Tensor:
        routed = route(tokens, gate, None, routing, new_counts(routing, device))
        return combine(expert_partials(tokens, w13, w2, routed), x.dtype)

    whole = run(x)
    torch.testing.assert_close(run(x[3:9].contiguous()), whole[3:9], rtol=1e-5, atol=1e-5)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1)).to(device)
    torch.testing.assert_close(run(x[order]), whole[order], rtol=1e-5, atol=1e-5)


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("tokens", [3, 128, 131])
def test_a_layer_and_the_norm_after_it(tokens: int, device: torch.device) -> None:
    """Routed and shared experts, residual and norm."""
    routing = Routing(6, 3, "sigmoid", True, 2.5, num_shared=2)
    place = WeightPlacement(torch.float32, device)
    moe, norm = SparseMoE(64, 24, routing, place), AddRMSNorm(64, 1e-6, place)
    parts: tuple[Module, ...] = (moe, norm)
    views = [view for part in parts for view in part.weights().values()]
    for seed, view in enumerate(views):
        view.copy_(random(*view.shape, seed=seed, scale=0.2))
    gate, w13, w2 = (w.cpu().clone() for w in (moe.gate.weight, moe.experts.w13, moe.experts.w2))
    stored = {name: view.cpu().clone() for name, view in moe.weights().items()}
    for part in parts:
        part.prepare()
    x, residual = random(tokens, 64, seed=90), random(tokens, 64, seed=91)
    moved = x.to(device)
    normed, total = norm(moe(moved), residual.to(device))
    routed = route_ref(x @ gate.T, None, replace(routing, num_shared=0))
    # As a checkpoint has them: one MLP of width 48.
    gates, ups, down = (
        stored[f"shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down")
    )
    act = torch.nn.functional.silu(x @ gates.reshape(48, 64).T) * (x @ ups.reshape(48, 64).T)
    always = act @ down.reshape(64, 48).T
    want = residual + always + expert_partials_ref(x, w13[:6], w2[:6], routed).sum(0)
    torch.testing.assert_close(total.cpu(), want, rtol=1e-4, atol=1e-4)
    scaled = torch.nn.functional.rms_norm(want, (64,), norm.norm.weight.cpu(), 1e-6)
    assert isinstance(normed, Tensor)
    torch.testing.assert_close(normed.cpu(), scaled, rtol=1e-4, atol=1e-4)
    result = moe(moved).result()
    torch.testing.assert_close(result.cpu(), want - residual, rtol=1e-4, atol=1e-4)


def test_slices_of_the_router_cover_its_columns() -> None:
    for hidden in (8, 128, 136, 2048, 4096, 5120, 7168):
        width = router_slice(hidden)
        assert width % 128 == 0 and 1 <= -(-hidden // width) <= 8


# --- on a GPU, at real sizes ----------------------------------------------------------------------


class Layer:
    """One MoE layer of Qwen3-30B-A3B, with random weights."""

    def __init__(self) -> None:
        self.routing = Routing(128, 8, norm_topk_prob=True, float32_logits=False)
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(*shape: int) -> Tensor:
            made = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
            return made * 0.02

        self.gate = normal(128, 2048)
        self.w13, self.w2 = normal(128, 1536, 2048), normal(128, 2048, 768)
        self.counts = new_counts(self.routing, torch.device("cuda"))
        self.x = normal(2048, 2048) * 50

    def run(self, x: Tensor) -> Tensor:
        routed = route(x, self.gate, None, self.routing, self.counts)
        return combine(expert_partials(x, self.w13, self.w2, routed), x.dtype)

    def run_ref(self, x: Tensor) -> Tensor:
        """In float32, one expert after the other, for the experts that the kernel chose."""
        routed = route(x, self.gate, None, self.routing, self.counts)
        out = torch.zeros(x.shape, device="cuda")
        for expert in range(128):
            token, choice = (routed.experts == expert).nonzero(as_tuple=True)
            gate, up = (x[token].float() @ self.w13[expert].float().T).chunk(2, 1)
            y = (torch.nn.functional.silu(gate) * up) @ self.w2[expert].float().T
            out.index_add_(0, token, y * routed.weights[token, choice, None])
        return out


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 8, 32, 64, 100, 128, 129, 512, 2048])
def test_real_sizes(tokens: int) -> None:
    layer = Layer()
    x = layer.x[:tokens].contiguous()
    got, want = layer.run(x).float(), layer.run_ref(x)
    assert (got - want).norm() / want.norm() < 0.01
    for _ in range(5):
        assert torch.equal(layer.run(x).float(), got)
    assert not layer.counts.any()
    scores = x.float() @ layer.gate.float().T
    chosen = route(x, layer.gate, None, layer.routing, layer.counts).experts
    rounded = route_ref(scores.bfloat16(), None, layer.routing).experts
    assert (chosen == rounded).float().mean() > 0.98  # near-ties aside


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64, 256])
def test_a_captured_layer_follows_its_input(tokens: int) -> None:
    layer = Layer()
    x = layer.x[:tokens].clone()
    layer.run(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.run(x)
    for first in (0, 300, 700):
        x.copy_(layer.x[first : first + tokens])
        graph.replay()
        assert torch.equal(out, layer.run(layer.x[first : first + tokens].contiguous()))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8, 512])
def test_nothing_waits_for_the_gpu(tokens: int) -> None:
    layer = Layer()
    x = layer.x[:tokens].contiguous()
    want = layer.run(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = layer.run(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got, want)


@pytest.mark.gpu
def test_a_token_has_the_same_result_in_any_batch_on_a_gpu() -> None:
    layer = Layer()
    whole = layer.run(layer.x[:64].contiguous())
    for tokens in (1, 2, 17, 48):
        assert torch.equal(layer.run(layer.x[:tokens].contiguous()), whole[:tokens])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 5, 16, 17, 32, 128, 129, 1024, 4096])
def test_shared_experts_at_the_sizes_of_deepseek_v2_lite(tokens: int) -> None:
    """Choices of a decode step, dense GEMMs beyond: against one MLP of twice the width."""
    device = torch.device("cuda")
    place = WeightPlacement(torch.bfloat16, device)
    moe = SparseMoE(2048, 1408, Routing(64, 6, num_shared=2), place)
    generator = torch.Generator(device).manual_seed(0)
    moe.experts.fused = True
    for view in moe.weights().values():
        view.normal_(0, 0.02, generator=generator)
    stored = {name: view.float() for name, view in moe.weights().items()}
    moe.prepare()
    x = torch.randn(tokens, 2048, generator=generator, device=device, dtype=torch.bfloat16)
    got = moe(x).result().float()
    routed = moe.gate(x)
    assert routed.num_shared == (2 if tokens <= 128 else 0)
    gate, up, down = (
        stored[f"shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down")
    )
    wide = x.float()
    act = torch.nn.functional.silu(wide @ gate.reshape(2816, 2048).T)
    want = (act * (wide @ up.reshape(2816, 2048).T)) @ down.reshape(2048, 2816).T
    for expert in range(64):
        token, choice = (routed.experts == expert).nonzero(as_tuple=True)
        gates, ups = (wide[token] @ moe.experts.w13[expert].float().T).chunk(2, 1)
        y = (torch.nn.functional.silu(gates) * ups) @ moe.experts.w2[expert].float().T
        want.index_add_(0, token, y * routed.weights[token, choice, None])
    assert (got - want).norm() / want.norm() < 0.01
    for _ in range(5):
        assert torch.equal(moe(x).result().float(), got)


@pytest.mark.gpu
@pytest.mark.parametrize("routing", [Routing(512, 10, norm_topk_prob=True), Routing(256, 8)])
@pytest.mark.parametrize("tokens", [1, 4, 5, 33, 128, 129, 1024])
def test_gated_shared_experts_at_the_sizes_of_qwen3_next(tokens: int, routing: Routing) -> None:
    """And of Qwen3.5-35B-A3B, whose experts choose by themselves for up to 4 tokens."""
    device = torch.device("cuda")
    place = WeightPlacement(torch.bfloat16, device)
    moe = SharedExpertMoE(2048, 512, 512, routing, place)
    generator = torch.Generator(device).manual_seed(0)
    moe.experts.fused = True
    for view in moe.weights().values():
        view.normal_(0, 0.02, generator=generator)
    stored = {name: view.float() for name, view in moe.weights().items()}
    for part in (
        moe.gate,
        moe.experts,
        moe.shared_expert.gate_up_proj,
        moe.shared_expert.down_proj,
    ):
        part.prepare()
    x = torch.randn(tokens, 2048, generator=generator, device=device, dtype=torch.bfloat16)
    got, routed, wide = moe(x).result().float(), moe.gate(x), x.float()
    gate, up, down = (
        stored[f"shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down")
    )
    act = torch.nn.functional.silu(wide @ gate.T) * (wide @ up.T)
    want = torch.sigmoid(wide @ stored["shared_expert_gate.weight"].T) * (act @ down.T)
    for expert in range(routing.num_experts):
        token, choice = (routed.experts == expert).nonzero(as_tuple=True)
        gates, ups = (wide[token] @ moe.experts.w13[expert].float().T).chunk(2, 1)
        y = (torch.nn.functional.silu(gates) * ups) @ moe.experts.w2[expert].float().T
        want.index_add_(0, token, y * routed.weights[token, choice, None])
    assert (got - want).norm() / want.norm() < 0.01
    for _ in range(5):
        assert torch.equal(moe(x).result().float(), got)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = moe(x).result()
    for _ in range(3):
        graph.replay()
        assert torch.equal(captured.float(), got)


@pytest.mark.gpu
@pytest.mark.parametrize("skew", [False, True])
@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts"),
    [
        (129, 8, 128),
        (1000, 8, 128),
        (8192, 8, 128),  # Qwen3-30B-A3B
        (8192, 6, 64),  # DeepSeek-V2-Lite
        (4099, 8, 256),  # DeepSeek-V3
        (2048, 8, 384),  # Kimi-K2
        (65536, 8, 512),
        (16384, 1, 1),
    ],
)
def test_tiles_are_those_of_the_reference_at_real_sizes(
    tokens: int, top_k: int, num_experts: int, skew: bool
) -> None:
    """`skew`: half of the experts have no pair."""
    among = torch.arange(num_experts, device="cuda")
    among = among[-max(top_k, num_experts // 2) :] if skew else among
    generator = torch.Generator("cuda").manual_seed(0)

    def draw() -> Tensor:
        scores = torch.rand(tokens, len(among), generator=generator, device="cuda")
        return among[scores.topk(top_k).indices].to(torch.int32)

    experts = draw()
    block_m = choose_moe(tokens, gpu_of(experts.device)).block_m
    made = align(experts, num_experts, block_m)
    assert same_tiles(made, align_ref(experts, num_experts, block_m))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = align(experts, num_experts, block_m)
    for _ in range(3):
        experts.copy_(draw())
        graph.replay()
        assert same_tiles(captured, align_ref(experts, num_experts, block_m))


@pytest.mark.gpu
@pytest.mark.parametrize("routing", [Routing(128, 8), Routing(64, 6, num_shared=2)])
@pytest.mark.parametrize("tokens", [129, 1024, 8192])
def test_tiles_of_routed_tokens_at_real_sizes(routing: Routing, tokens: int) -> None:
    """The kernels in a row, as in a layer: every list is made of the choices just before it."""
    device = torch.device("cuda")
    counts = new_counts(routing, device)
    generator = torch.Generator(device).manual_seed(0)
    shape = (48, 1, tokens, routing.num_experts)  # 48 layers
    logits = torch.randn(shape, generator=generator, device=device)
    made = [top_k(partials, None, routing, counts) for partials in logits]
    for routed in made:
        assert routed.tiles is not None
        want = align_ref(routed.experts, routing.num_experts, routed.tiles.block_m)
        assert same_tiles(routed.tiles, want)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [129, 2048])
def test_the_norm_adds_up_the_experts_as_combine_does(tokens: int) -> None:
    """More tokens than a decode step has, in bfloat16. The sums are equal bit for bit.

    The norm has other numbers of warps, which add up squares in another order.
    """
    place = WeightPlacement(torch.bfloat16, torch.device("cuda"))
    moe, norm = SparseMoE(2048, 768, Routing(128, 8), place), AddRMSNorm(2048, 1e-6, place)
    generator = torch.Generator("cuda").manual_seed(0)
    parts: tuple[Module, ...] = (moe, norm)
    for part in parts:
        for view in part.weights().values():
            view.normal_(0, 0.02, generator=generator)
        part.prepare()
    x, residual = (
        torch.randn(tokens, 2048, generator=generator, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    got, total = norm(moe(x), residual)
    want, want_total = norm.norm.add(moe(x).result(), residual)
    assert isinstance(got, Tensor) and torch.equal(total, want_total)
    torch.testing.assert_close(got, want, rtol=2**-7, atol=0)  # the last bit of bfloat16
