"""A whole model with small-M GEMMs and fused norms and residuals, compared with plain layers.

On a CPU they run as their reference implementations; the kernels are held to those elsewhere.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forerun.kernels.gemm.config import TritonGemmConfig
from forerun.kernels.gemm.gemm import DeferredNorm
from forerun.kernels.runtime.gpu import GpuInfo
from forerun.layers import gemm
from forerun.layers.embedding import LMHead
from forerun.layers.linear import Linear
from forerun.models.loader import load_target
from tests.models.support import CPU, CPU_F32, Loop, family, save

pytestmark = pytest.mark.usefixtures("without_cpu_kernels")


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("name", ["qwen3-bias-sliding", "qwen2-sliding-tied"])
def test_same_logits_as_the_plain_layers(
    name: str, parts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if parts:  # split-K partials of every GEMM that a norm adds up
        monkeypatch.setattr(gemm, "choose_gemm", split_k)
    folder = save(family(name), tmp_path)
    ids = torch.randint(0, 96, (60,), generator=torch.Generator().manual_seed(3))
    plain = load_target(folder, torch.float32, CPU)
    monkeypatch.setattr(gemm, "onednn_serves", lambda weight: False)
    monkeypatch.setattr(gemm, "skinny_serves", lambda weight: True)
    fused = load_target(folder, torch.float32, CPU)
    loops = [Loop.of_model(model) for model in (plain, fused)]
    # One token, a full bucket, and more tokens than the kernels take.
    for start, end in ((0, 1), (1, 17), (17, 60)):
        capture = (0, 1)
        part = [(start, ids[start:end])]
        (want, want_aux), (got, got_aux) = (loop.ragged(part, capture) for loop in loops)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(got_aux, want_aux, rtol=1e-5, atol=2e-5)
        logits = plain.compute_logits(want)
        torch.testing.assert_close(fused.compute_logits(got), logits, rtol=1e-5, atol=5e-5)
    reader = fused.model.layers[0].mlp.gate_up_proj.gemm
    assert reader.accepts_deferred_norm(16) and not reader.accepts_deferred_norm(len(ids))


def split_k(
    n: int, k: int, num_tokens: int, gpu: GpuInfo, partials: bool
) -> TritonGemmConfig | None:
    return TritonGemmConfig(n, num_ctas=2, keep_partials=True) if num_tokens <= 32 else None


def test_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "skinny_serves", lambda weight: True)
    monkeypatch.setattr(gemm, "onednn_serves", lambda weight: False)
    head = LMHead(50, 16, CPU_F32, tied=None)
    head.weight.normal_()
    x = torch.randn(3, 16)
    want = (x @ head.weight.T).argmax(-1)
    assert torch.equal(head.argmax(x), want)
    head.prepare()
    assert isinstance(head.gemm, gemm.SkinnyGemm)
    assert torch.equal(head.argmax(x), want)


def test_a_plain_linear_refuses_a_deferred_norm() -> None:
    linear = Linear.of(torch.randn(8, 16))
    deferred = DeferredNorm(torch.randn(3, 16), torch.ones(1, 3), 1e-6)
    with pytest.raises(AssertionError, match="accepts_deferred_norm"):
        linear(deferred)
