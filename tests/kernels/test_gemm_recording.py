"""The benchmarks' recorder sees every GEMM of ours, kernel or reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from forerun.kernels.gemm import gemm as own
from forerun.kernels.gemm.config import TritonGemmConfig
from forerun.kernels.gemm.gemm import DeferredNorm, GemmWeight
from forerun.kernels.gemm.int4 import Int4Weight
from forerun.kernels.gemm.quantized import Fp8Weight
from forerun.kernels.moe.config import choose_moe
from forerun.kernels.moe.routing import Routing, align_ref, route_ref
from forerun.kernels.runtime.gpu import gpu_of
from forerun.layers.experts_fp8 import pack_fp8_experts
from forerun.layers.gemm_quantized import Int4Gemm
from forerun.layers.norm import RMSNorm
from forerun.plan.work import touched_experts
from forerun_bench.gemms import recording


def all_epilogues(w: GemmWeight, x: torch.Tensor, config: TritonGemmConfig) -> list[object]:
    n = w.weight.shape[0]
    residual, norm = x.new_zeros(x.shape[0], n), x.new_ones(n)
    sum_of_squares = torch.ones(1, x.shape[0], device=x.device)
    return [
        own.gemm(x, w, config),
        own.gemm(DeferredNorm(x, sum_of_squares, 1e-6), w, config),
        own.gemm_add(x, w, residual, config),
        own.gemm_add_deferred_norm(x, w, residual, norm, 1e-6, config),
        own.gemm_silu_mul(x, w, config),
        own.gemm_argmax(x, w, config),
        own.gemm_partials(x, w, config),
    ]


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "reference"])
def test_every_entry_point_counts_once(
    kernels: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        device = torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(3, 64, device=device).to(dtype)
    w = GemmWeight.from_tensor(torch.randn(64, 64, device=device).to(dtype))
    config = TritonGemmConfig(32, 32, num_ctas=2)
    with torch.inference_mode(), recording() as gemms:
        made = all_epilogues(w, x, config)
    assert [(g.n, g.k, g.tokens) for g in gemms] == [(64, 64, 3)] * len(made)


@pytest.mark.exhaustive
@pytest.mark.parametrize("k", [128, 1024])
@pytest.mark.parametrize("tokens", [3, 130])
def test_packed_weights_count_their_bytes(tokens: int, k: int, device: torch.device) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weight = Int4Weight.empty(64, k, device)
    weight.quantize_(torch.randn(64, k, device=device))
    linear, x = Int4Gemm(weight, None), torch.randn(tokens, k, device=device).to(dtype)
    with torch.inference_mode(), recording() as gemms:
        x = x.clone()  # made in the step
        linear(x)
        linear.silu_and_mul(x)
        linear.add_rms_norm(x, x.new_zeros(tokens, 64), RMSNorm.of(x.new_ones(64), 1e-6), None)
    assert [(g.n, g.k, g.tokens) for g in gemms] == [(64, k, tokens)] * 3
    assert gemms[0].weight_bytes == linear.weight.packed.nbytes


def test_experts_in_fp8_count_their_bytes(device: torch.device) -> None:
    """Those of the experts that so many tokens are expected to touch."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    w13, w2 = (Fp8Weight.stack(shape, device, None) for shape in ((6, 256, 256), (6, 256, 128)))
    for weight in (w13, w2):
        weight.quantize_(torch.randn(weight.shape, device=device))
    experts = pack_fp8_experts(w13, w2, 6)
    routed = route_ref(torch.randn(3, 6, device=device), None, Routing(6, 2))
    tiles = align_ref(routed.experts, 6, choose_moe(3, gpu_of(device)).block_m)
    tiles = replace(tiles, progress=torch.zeros(64, dtype=torch.int32, device=device))
    x = torch.randn(3, 256, device=device).to(dtype)
    with torch.inference_mode(), recording() as gemms:
        experts.partials(x, replace(routed, tiles=tiles), None, None)
    assert [(g.n, g.k, g.tokens) for g in gemms] == [(256, 256, 6), (256, 128, 6)]
    touched = touched_experts(3, 2, 6) / 6
    wanted = [round(touched * weight.nbytes) for weight in (w13, w2)]
    assert [g.weight_bytes for g in gemms] == wanted
