"""A whole model over the few-row products, norms and residuals in them, against the plain layers.

On a CPU these products run as their plain-PyTorch twins; the kernels are held to those elsewhere.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forerun.kernels.gemm.config import TritonGemmConfig
from forerun.kernels.gemm.gemm import DeferredNorm
from forerun.kernels.runtime.gpu import GpuInfo
from forerun.layers import linear
from forerun.layers.linear import Linear
from forerun.models.loader import load_target
from tests.models.support import CPU, Loop, family, save


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("name", ["qwen3-bias-sliding", "qwen2-sliding-tied"])
def test_same_logits_as_the_plain_layers(
    name: str, parts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if parts:  # two partial sums of every product that is added up by a norm
        monkeypatch.setattr(linear, "choose_gemm", in_parts)
    folder = save(family(name), tmp_path)
    ids = torch.randint(0, 96, (60,), generator=torch.Generator().manual_seed(3))
    plain = load_target(folder, torch.float32, CPU)
    monkeypatch.setattr(linear, "can_pack", lambda weight: False)
    monkeypatch.setattr(linear, "can_stream", lambda weight: True)
    fused = load_target(folder, torch.float32, CPU)
    loops = [Loop.of_model(model) for model in (plain, fused)]
    # One row, a full bucket, and more rows than the kernels take.
    for start, end in ((0, 1), (1, 17), (17, 60)):
        capture = (0, 1)
        part = [(start, ids[start:end])]
        (want, features), (got, seen) = (loop.ragged(part, capture) for loop in loops)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(seen, features, rtol=1e-5, atol=2e-5)
        logits = plain.lm_head(want)
        torch.testing.assert_close(fused.lm_head(got), logits, rtol=1e-5, atol=5e-5)
    assert fused.decoder.layers[0].mlp.gate_up.accepts_deferred_norm(ids[:16])
    assert not fused.decoder.layers[0].mlp.gate_up.accepts_deferred_norm(ids)


def in_parts(n: int, k: int, rows: int, gpu: GpuInfo) -> TritonGemmConfig | None:
    return TritonGemmConfig(n, num_ctas=2, keep_partials=True) if rows <= 32 else None


def test_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "can_stream", lambda weight: True)
    monkeypatch.setattr(linear, "can_pack", lambda weight: False)
    product = Linear.of(torch.randn(50, 16))
    x = torch.randn(3, 16)
    want = (x @ product.weight.T).argmax(-1)
    assert torch.equal(product.argmax(x), want)
    product.pack()
    assert product.accepts_deferred_norm(x)
    assert torch.equal(product.argmax(x), want)


def test_rows_short_of_their_norm_are_refused_where_nothing_finishes_it() -> None:
    product = Linear.of(torch.randn(8, 16))
    rows = DeferredNorm(torch.randn(3, 16), torch.ones(1, 3), 1e-6)
    with pytest.raises(AssertionError, match="accepts_deferred_norm"):
        product(rows)
