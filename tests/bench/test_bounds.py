"""Lower bounds of a step, and the ceilings they are computed from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from forerun import LLM
from forerun.attention.base import LayerMask
from forerun.kernels.cpu import library
from forerun.kvcache.layouts import ModelLayout
from forerun.llm.bundled import PAIR
from forerun.plan.work import Gemm, Work, kv_bytes
from forerun_bench import ceilings
from forerun_bench.bounds import Bounds, step_work
from forerun_bench.ceilings import Ceilings, gemm_seconds

pytestmark = pytest.mark.skipif(
    not (PAIR / "target" / "model.safetensors").exists(), reason="the bundled pair is not there"
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def speculating() -> Iterator[LLM]:
    settings = {"speculative_algorithm": "DFLASH", "speculative_adaptive": False}
    with LLM(device="cpu", dtype="float32", **settings) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(device="cpu", dtype="float32") as llm:
        yield llm


def test_bytes_of_the_bundled_pair(plain: LLM, speculating: LLM) -> None:
    """Its checkpoints are in bfloat16, as which float32 engines keep packed weights."""
    work, both = step_work(plain.engine, 2, 100), step_work(speculating.engine, 2, 100)
    config = plain.engine.executor.step.model.config
    inner, hidden = config.intermediate_size, config.hidden_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = hidden * (2 * q + 2 * kv + 3 * inner)
    head, size = config.vocab_size * hidden, 4 if library.library() is None else 2
    assert work.weight_bytes == size * (config.num_layers * layer + head)
    assert work.kv_bytes == 2 * 100 * plain.explain()["kv_bytes_per_token"]
    assert both.kv_bytes == 2 * 100 * speculating.explain()["kv_bytes_per_token"]
    assert work.flops == 2 * 2 * work.weight_bytes // size  # one row a request, two requests
    assert both.weight_bytes > work.weight_bytes + size * head  # two heads


def test_windows_hide_keys() -> None:
    layout = ModelLayout.dense(num_layers=3, num_kv_heads=2, head_dim=4, dtype=torch.bfloat16)
    masks = (LayerMask(), LayerMask(window=10), LayerMask(window=500))
    assert kv_bytes(layout, masks, 100) == (100 + 10 + 100) * 2 * 2 * 4 * 2


def test_bounds_are_bytes_over_bandwidth() -> None:
    work = Work((Gemm(64, 32, torch.float32, 2), Gemm(16, 32, torch.float32, 2)), 1000)
    bounds = Bounds.of(work, Ceilings(1e6, 1e9, "float32"), CPU)
    assert bounds.floor_seconds == pytest.approx((4 * (64 * 32 + 16 * 32) + 1000) / 1e6)
    assert bounds.gemm_seconds > 0
    assert bounds.host_gap is None
    assert bounds.as_dict(2 * bounds.floor_seconds)["ratio_to_floor"] == pytest.approx(2)


def test_gemms_are_computed_at_their_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """More weights than the buffer holds: it is used again, from the start."""
    gemms = [Gemm(n, 8, torch.float32, 3) for n in (4, 16, 6, 16)]
    monkeypatch.setattr(ceilings, "ROTATED_BYTES", 4 * 8 * 20)
    seen: list[tuple[Any, Any, int]] = []
    mm = torch.mm

    def watch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        seen.append((tuple(a.shape), tuple(b.shape), b.storage_offset() // 8))
        mm(a, b, out=out)

    monkeypatch.setattr(torch, "mm", watch)
    gemm_seconds(gemms, CPU)
    shapes = [((3, 8), (8, p.n)) for p in gemms]
    assert [call[:2] for call in seen[:4]] == shapes
    assert [call[2] for call in seen[:4]] == [0, 4, 0, 0]


def test_ceilings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "READ_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(ceilings, "SQUARE", {"cpu": 64})
    found = Ceilings.measure(CPU, torch.float32)
    assert found.read_bytes_per_second > 1e6
    assert found.flops > 1e6
    assert "float32" in replace(found, flops=5e12).line()
    assert "5 TFLOP/s" in replace(found, flops=5e12).line()
