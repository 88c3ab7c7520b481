"""The benchmarks' recorder sees every GEMM of ours, kernel or reference."""

from __future__ import annotations

import pytest
import torch

from forerun.bench.gemms import recording
from forerun.kernels.gemm import gemm as own
from forerun.kernels.gemm.config import TritonGemmConfig
from forerun.kernels.gemm.gemm import DeferredNorm, GemmWeight
from forerun.kernels.gemm.int4 import Int4Weight
from forerun.layers.gemm import Int4Gemm


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


@pytest.mark.parametrize("tokens", [3, 130])
def test_packed_weights_count_their_bytes(tokens: int, device: torch.device) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weight = Int4Weight.empty(64, 128, device)
    weight.quantise_(torch.randn(64, 128, device=device))
    linear, x = Int4Gemm(weight, None), torch.randn(tokens, 128, device=device).to(dtype)
    with torch.inference_mode(), recording() as gemms:
        x = x.clone()  # made in the step
        linear(x)
        linear.silu_and_mul(x)
    assert [(g.n, g.k, g.tokens) for g in gemms] == [(64, 128, tokens)] * 2
    assert gemms[0].weight_bytes == linear.weight.packed.nbytes
