"""Experts with weights in e4m3: grouped GEMMs and Hopper's kernel against dequantized weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forerun.kernels.elementwise.quantize_fp8 import (
    deinterleave,
    quantize_groups,
    quantize_groups_ref,
)
from forerun.kernels.gemm.quantized import Fp8Weight
from forerun.kernels.moe.align import of_experts
from forerun.kernels.moe.config import (
    MAX_DECODE_TOKENS,
    SM90_FP8_DECODE,
    SM90_FP8_ONE_TOKEN,
    Fp8MoeConfig,
    GroupedGemmConfig,
    choose_moe,
    choose_moe_fp8,
    choose_moe_fp8_sm90,
)
from forerun.kernels.moe.experts import expert_partials_ref
from forerun.kernels.moe.experts_fp8 import expert_partials_fp8
from forerun.kernels.moe.fp8_matrices import Fp8Matrices
from forerun.kernels.moe.router import new_counts
from forerun.kernels.moe.routing import Routed, Routing, align_ref, route_ref
from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import GpuInfo, gpu_of
from forerun.layers.communication import WeightPlacement
from forerun.layers.moe import SparseMoE
from forerun.models.formats.fp8 import Fp8Blocks, Fp8Rows

GROUPS = [None, 128]
KINDS = ["rows", "groups", "blocks"]
H200 = GpuInfo(132, amd=False, capability=90)


def weight(shape: tuple[int, ...], kind: str, seed: int, device: torch.device) -> Fp8Weight:
    """[E, N, K], of rows and groups that are not equally large."""
    generator = torch.Generator(device).manual_seed(seed)
    made = Fp8Weight.stack(shape, device, None if kind == "rows" else 128)
    plain = torch.randn(shape, generator=generator, device=device) * 0.05
    plain *= torch.rand(shape[:2], generator=generator, device=device).unsqueeze(2) + 0.1
    made.quantize_(plain)
    if kind == "blocks":
        blocks = made.scales.unflatten(1, (-1, 128))
        blocks.copy_(blocks.amax(2, keepdim=True))
    return made


def matrices(
    kind: str, device: torch.device, interleaved: bool = False
) -> tuple[Fp8Matrices, Fp8Matrices]:
    """Of 6 experts, hidden size 256, width 256."""
    shapes = (6, 512, 256), (6, 256, 256)
    w13, w2 = (
        Fp8Matrices.pack(weight(shape, kind, i, device), interleaved)
        for i, shape in enumerate(shapes)
    )
    assert w13.scale_kind == w2.scale_kind == KINDS.index(kind)
    return w13, w2


def routed_tokens(tokens: int, device: torch.device) -> tuple[Tensor, Routed]:
    """x and the choices of 2 of 6 experts, with tiles."""
    generator = torch.Generator().manual_seed(tokens)
    x, logits = (torch.randn(tokens, n, generator=generator).to(device) for n in (256, 6))
    routed = route_ref(logits, None, Routing(6, 2))
    block_m = choose_moe(tokens, gpu_of(device)).block_m
    return x, replace(routed, tiles=align_ref(routed.experts, 6, block_m))


def config(tokens: int, device: torch.device, quantize_x: bool, block_n: int = 64) -> Fp8MoeConfig:
    """Tiles that are not the same for both GEMMs; `block_n`: of gate/up."""
    tiles = choose_moe(tokens, gpu_of(device))
    gate_up, down = (GroupedGemmConfig(n, 64, 8, num_stages=2) for n in (block_n, 192 - block_n))
    return Fp8MoeConfig(replace(tiles, gate_up=gate_up, down=down), quantize_x)


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 9, 40])
def test_w8a16_is_the_dequantized_weight(kind: str, tokens: int, device: torch.device) -> None:
    """In float32, where the hardware's decoding, which is bfloat16's, does not serve."""
    if device.type == "cuda":
        pytest.skip("W8A16 on a GPU has x in bfloat16")
    (w13, w2), (x, routed) = matrices(kind, device), routed_tokens(tokens, device)
    plain = w13.dequantize(torch.float32), w2.dequantize(torch.float32)
    shared = torch.randn(tokens, 256)
    for more in (None, shared):
        got = expert_partials_fp8(x, w13, w2, routed, more, config(tokens, device, False))
        want = expert_partials_ref(x, *plain, routed, more)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("quantize_x", [False, True])
def test_parts_of_the_experts_add_up(quantize_x: bool, device: torch.device) -> None:
    """As ranks with `ep_size` compute them: other ranks' choices are zeros."""
    (w13, w2), (x, routed) = matrices("blocks", device), routed_tokens(9, device)
    x = x.bfloat16() if device.type == "cuda" else x
    how = config(9, device, quantize_x)
    want = expert_partials_fp8(x, w13, w2, routed, None, how)
    total = torch.zeros_like(want)
    for part in (range(2), range(2, 6)):
        own = [
            replace(w, values=w.values[part.start : part.stop].clone(),
                    scales=w.scales[part.start : part.stop].clone())
            for w in (w13, w2)
        ]  # fmt: skip
        got = expert_partials_fp8(x, *own, of_experts(routed, part), None, how)
        outside = (routed.experts < part.start) | (routed.experts >= part.stop)
        assert not got[outside.t()].any()
        total += got
    assert torch.equal(total, want)


def dequantized(x: Tensor, group: int | None) -> Tensor:
    """As a kernel of W8A8 sees it."""
    made = Fp8Weight.stack(tuple(x.shape), x.device, group)
    made.quantize_(x)
    return made.dequantize()


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("block_n", [64, 128])
def test_w8a8_rounds_tokens_and_activations(
    kind: str, interleaved: bool, block_n: int, device: torch.device
) -> None:
    """And nothing else: x and SiLU(gate) · up as `quantize_` rounds them. With all of a group in a
    CTA, gate/up rounds its results itself.
    """
    if device.type == "cuda" and gpu_of(device).capability < 90:
        pytest.skip("needs FP8 tensor cores")
    tokens = 9
    w13, w2 = matrices(kind, device, interleaved)
    x, routed = routed_tokens(tokens, device)
    group = None if kind == "rows" else 128
    got = expert_partials_fp8(x, w13, w2, routed, None, config(tokens, device, True, block_n))
    want = torch.empty_like(got)
    for expert in range(6):
        token, choice = (routed.experts == expert).nonzero(as_tuple=True)
        gate_up = dequantized(x, group)[token] @ w13.dequantize(torch.float32)[expert].T
        gate, up = gate_up.chunk(2, 1)
        act = dequantized(torch.nn.functional.silu(gate) * up, group)
        y = act @ w2.dequantize(torch.float32)[expert].T
        want[choice, token] = y * routed.weights[token, choice, None]
    # A value between two of e4m3 may be rounded either way, of activations that differ in float32.
    assert (got - want).norm() / want.norm() < 5e-3


@pytest.mark.parametrize("interleaved", [False, True])
def test_groups_of_tokens_are_quantized(interleaved: bool, device: torch.device) -> None:
    x = torch.randn(5, 384, generator=torch.Generator().manual_seed(0))
    x[1, 128:256], x[2, 3], x[3] = 0, torch.nan, x[3] * 1e-30
    values, scales = quantize_groups(x.to(device), interleaved)
    want, want_scales = quantize_groups_ref(x, interleaved)
    torch.testing.assert_close(scales.cpu(), want_scales, rtol=1e-6, atol=0, equal_nan=True)
    keep = [0, 1, 3, 4]  # what a NaN's scale makes of a token is not a number either
    assert torch.equal(values.cpu()[keep].float(), want[keep].float())
    assert scales[1, 1] == 1 and scales[2, 0].isnan() and not scales[2, 1:].isnan().any()
    plain = deinterleave(values) if interleaved else values
    meant = plain.float().cpu().unflatten(1, (3, 128)) * scales.cpu().unsqueeze(2)
    error = (meant.flatten(1) - x)[keep].abs()
    assert (error <= x[keep].abs() / 16 + scales.cpu()[keep].repeat_interleave(128, 1) / 512).all()


@pytest.mark.parametrize("kind", KINDS)
def test_packed_matrices_mean_the_weight(kind: str) -> None:
    for interleaved in (False, True):
        stored = weight((3, 128, 256), kind, 1, torch.device("cpu"))
        want = stored.dequantize()
        packed = Fp8Matrices.pack(stored, interleaved)
        assert torch.equal(packed.dequantize(torch.float32), want)
    assert Fp8Matrices.fits(stored)
    for n, k, size in ((128, 192, None), (64, 256, None), (128, 256, 64)):
        small = Fp8Weight.stack((2, n, k), torch.device("cpu"), size)
        assert not Fp8Matrices.fits(small)


def test_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "available", lambda: True)
    half = torch.bfloat16
    assert choose_moe_fp8_sm90(1, 2048, 768, half, H200) == SM90_FP8_ONE_TOKEN
    assert choose_moe_fp8_sm90(2, 2048, 768, half, H200) == SM90_FP8_DECODE
    assert choose_moe_fp8_sm90(MAX_DECODE_TOKENS + 1, 2048, 768, half, H200) is None
    assert choose_moe_fp8_sm90(1, 2048, 704, half, H200) is None  # interleaved by 128 columns
    assert choose_moe_fp8_sm90(1, 2048, 768, half, replace(H200, capability=80)) is None
    amd = GpuInfo(304, amd=True, warp_size=64)
    for gpu in (H200, replace(H200, capability=80), amd, GpuInfo(4, False, interpreted=True)):
        for tokens in (1, 64, 128, 129, 1024, 1025, 8192):
            chosen = choose_moe_fp8(tokens, gpu, tokens % 3)
            cores = not gpu.amd and gpu.capability >= 90
            assert chosen.tiles.block_m == choose_moe(tokens, gpu).block_m  # those of the routing
            assert chosen.quantize_x == (cores and tokens > MAX_DECODE_TOKENS)
    consumer = replace(H200, capability=120, smem_bytes=99 << 10)
    for tokens in (129, 2048, 8192):
        for kind in range(3):
            tiles = choose_moe_fp8(tokens, consumer, kind).tiles
            for tile, rows in ((tiles.gate_up, 2 * tiles.gate_up.block_n), (tiles.down, 0)):
                stage = (tiles.block_m + (rows or tile.block_n)) * tile.block_k
                assert tile.num_stages * stage <= consumer.smem_bytes


def moe_pair(
    group: int | None, num_shared: int, device: torch.device, dtype: torch.dtype
) -> tuple[SparseMoE, SparseMoE]:
    """A layer with weights in FP8, and one with what they mean; not prepared."""
    routing = Routing(6, 2, norm_topk_prob=True, num_shared=num_shared)
    kept, plain = (
        SparseMoE(256, 128, routing, WeightPlacement(dtype, device, allocate=allocate))
        for allocate in (False, True)
    )
    assert kept.experts.quantize(Fp8Rows() if group is None else Fp8Blocks(group, group))
    generator = torch.Generator(device).manual_seed(0)
    views, stored = plain.weights(), kept.quantized_weights()
    assert views.keys() == kept.weights().keys() | stored.keys()
    for name, view in views.items():
        if name in stored:
            made = torch.randn(view.shape, generator=generator, device=device) * 0.05
            stored[name].quantize_(made)
            view.copy_(stored[name].dequantize())
        else:
            view.copy_(torch.randn(view.shape, generator=generator, device=device))
            kept.weights()[name].copy_(view)
    return kept, plain


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("num_shared", [0, 2])
def test_a_layer_whose_weights_no_kernel_reads(group: int | None, num_shared: int) -> None:
    """In float32 it is dequantized, and computes the same to the last bit."""
    cpu = torch.device("cpu")
    kept, plain = moe_pair(group, num_shared, cpu, torch.float32)
    kept.prepare()
    plain.prepare()
    assert kept.experts.quantized_gemm == "dequantized when loaded"
    for tokens in (1, 7):
        x = torch.randn(tokens, 256)
        assert torch.equal(kept(x).result(), plain(x).result())


# --- on a GPU -------------------------------------------------------------------------------------


def need_hopper() -> None:
    gpu = gpu_of(torch.device("cuda"))
    if choose_moe_fp8_sm90(1, 2048, 768, torch.bfloat16, gpu) is None:
        pytest.skip("needs Hopper and NVRTC")


SHAPES = {  # experts, choices, hidden size, width
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "deepseek-v3, a part": (32, 8, 7168, 2048),
    "two groups": (10, 3, 256, 256),
}


class Layer:
    """Random weights; tokens choose experts without a router, which is not the same in any batch
    where the kernels for Hopper do not have it.
    """

    def __init__(self, shape: str, kind: str, interleaved: bool) -> None:
        self.experts, top_k, self.hidden, width = SHAPES[shape]
        device = torch.device("cuda")
        sizes = (self.experts, 2 * width, self.hidden), (self.experts, self.hidden, width)
        self.w13, self.w2 = (
            Fp8Matrices.pack(weight(size, kind, i, device), interleaved)
            for i, size in enumerate(sizes)
        )
        self.routing = Routing(self.experts, top_k, norm_topk_prob=True)
        self.counts = new_counts(self.routing, device)

    def tokens(self, count: int) -> tuple[Tensor, Tensor]:
        """x and scores of experts."""
        x = torch.randn(count, self.hidden, device="cuda", dtype=torch.bfloat16)
        return x, torch.randn(count, self.experts, device="cuda")

    def route(self, scores: Tensor) -> Routed:
        routed = route_ref(scores, None, self.routing)
        block_m = choose_moe(len(scores), gpu_of(scores.device)).block_m
        tiles = align_ref(routed.experts, self.experts, block_m)
        return replace(routed, tiles=replace(tiles, progress=self.counts[self.experts + 1 :]))

    def run(self, x: Tensor, routed: Routed) -> Tensor:
        return expert_partials_fp8(x, self.w13, self.w2, routed)


def partials_ref(layer: Layer, x: Tensor, routed: Routed) -> Tensor:
    """In float32, one expert after the other, rounded where the kernels round."""
    out = torch.zeros(routed.experts.shape[1], *x.shape, device="cuda")
    plain = layer.w13.dequantize(torch.float32), layer.w2.dequantize(torch.float32)
    for expert, (of13, of2) in enumerate(zip(*plain, strict=True)):
        token, choice = (routed.experts == expert).nonzero(as_tuple=True)
        gate, up = (x[token].float() @ of13.T).bfloat16().float().chunk(2, 1)
        act = (torch.nn.functional.silu(gate) * up).bfloat16().float()
        y = (act @ of2.T).bfloat16().float()
        out[choice, token] = y * routed.weights[token, choice, None]
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("interleaved", [False, True], ids=["Triton", "Hopper"])
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_steps_at_real_sizes(shape: str, interleaved: bool, kind: str) -> None:
    """Nothing but the weights is rounded, and a token is the same alone and among others."""
    if interleaved:
        need_hopper()
    layer = Layer(shape, kind, interleaved)
    x, scores = layer.tokens(128)
    whole = layer.run(x, layer.route(scores))
    for tokens in (1, 2, 4, 5, 33, 128):
        part, routed = x[-tokens:].contiguous(), layer.route(scores[-tokens:])
        got, want = layer.run(part, routed), partials_ref(layer, part, routed)
        assert (got - want).norm() / want.norm() < 2e-3
        assert torch.equal(got, whole[:, -tokens:])
        for _ in range(10):
            assert torch.equal(layer.run(part, routed), got)
    routed, total = layer.route(scores), torch.zeros_like(whole)
    for first, stop in ((0, 1), (1, layer.experts)):
        own = (
            replace(w, values=w.values[first:stop].clone(), scales=w.scales[first:stop].clone())
            for w in (layer.w13, layer.w2)
        )
        total += expert_partials_fp8(x, *own, of_experts(routed, range(first, stop)))
    assert torch.equal(total, whole)
    assert not layer.counts.any()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens", [129, 1024, 2048])
def test_prompts_at_real_sizes(tokens: int, interleaved: bool, kind: str) -> None:
    """The error of W8A8 is that of rounding x and the activations to three bits of mantissa."""
    device = torch.device("cuda")
    quantize_x = choose_moe_fp8(tokens, gpu_of(device)).quantize_x
    if interleaved and not quantize_x:
        pytest.skip("interleaved for Hopper only")
    layer = Layer("qwen3-30b-a3b", kind, interleaved)
    x, scores = layer.tokens(tokens)
    routed = layer.route(scores)
    got, want = layer.run(x, routed), partials_ref(layer, x, routed)
    assert (got - want).norm() / want.norm() < (0.05 if quantize_x else 5e-3)
    assert torch.equal(layer.run(x, routed), got)


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("tokens", [1, 4, 5, 128, 300])
def test_a_layer_with_shared_experts(tokens: int, group: int | None) -> None:
    """Its kernels choose the experts for few tokens, as those for bfloat16 weights do."""
    kept, plain = moe_pair(group, 2, torch.device("cuda"), torch.bfloat16)
    kept.prepare()
    plain.prepare()
    described = kept.experts.quantized_gemm
    assert described is not None and described.startswith("fp8 experts: up to 128 tokens W8A16")
    x = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16)
    got, want = kept(x).result().float(), plain(x).result().float()
    assert (got - want).norm() / want.norm() < (0.01 if tokens <= MAX_DECODE_TOKENS else 0.06)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kept(x).result()
    for _ in range(3):
        graph.replay()
        assert torch.equal(captured.float(), got)
