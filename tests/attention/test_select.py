"""The choice of attention backends, and the errors if none can serve."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from forerun.attention.base import AttentionBackend, AttentionNeed, LayerMask, Mask
from forerun.attention.capabilities import Capabilities, Phase
from forerun.attention.select import (
    BACKENDS,
    BackendChoice,
    Wanted,
    choose_page_size,
    default_order,
    select,
    survey,
)
from forerun.attention.torch_native import TorchNative
from forerun.core.errors import ConfigError
from forerun.kernels.cpu import library
from forerun.kernels.runtime import nvrtc

pytest.importorskip("triton")

GPU = AttentionNeed("cuda", torch.bfloat16, 128, 32, 8, frozenset({LayerMask()}))
LATENT = replace(GPU, mla=True, dense=False, head_dim=576, latent_dim=512)


@pytest.fixture(autouse=True)
def _not_interpreted(monkeypatch: pytest.MonkeyPatch, _interpreter: None) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize("hip", [None, "7.0.0"])
def test_triton_is_the_default_on_every_gpu(
    hip: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    block = frozenset({LayerMask(Mask.BLOCK, 512), LayerMask(window=128)})
    for need in (GPU, replace(GPU, masks=block, graph=True)):
        assert select(need, Wanted()).backend.name == "triton"


HOPPER_PREFILL = replace(GPU, arch="sm_90", phase=Phase.PREFILL)


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ({}, "triton"),
        ({"dtype": torch.float16, "head_dim": 64, "kv_dtype": torch.float16}, "triton"),
        ({"page_sizes": frozenset({16, 64})}, "triton"),
        ({"page_sizes": frozenset({128})}, "triton"),
        ({"page_sizes": frozenset({1, 16, 32, 96})}, "fa3"),
        ({"head_dim": 96}, "fa3"),
        ({"dtype": torch.float32}, "fa3"),
        ({"kv_dtype": torch.float8_e4m3fn}, "fa3"),
        ({"arch": "sm_100"}, "fa3"),
        ({"arch": None}, "fa3"),
        ({"mla": True, "dense": False, "head_dim": 576, "latent_dim": 512}, "fa3"),
        ({"mla": True, "latent_dim": 64}, "fa3"),
    ],
)
def test_prefill_that_hoppers_own_kernel_computes_goes_to_triton_before_fa3(
    change: dict[str, Any], first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "available", lambda: True)
    need = replace(HOPPER_PREFILL, **change)
    order = default_order(need)
    assert order[:2] == [first, "fa3" if first == "triton" else "triton"]
    assert sorted(order) == sorted(BACKENDS)
    monkeypatch.setattr(nvrtc, "available", lambda: False)
    assert default_order(need)[:2] == ["fa3", "triton"]


HOPPER_MLA = replace(
    GPU, arch="sm_90", mla=True, dense=False, head_dim=576, latent_dim=512, num_kv_heads=1
)


@pytest.mark.parametrize("phase", [Phase.DECODE, Phase.VERIFY, Phase.EXTEND])
@pytest.mark.parametrize(
    ("change", "first"),
    [
        ({}, "triton"),
        ({"num_heads": 128, "graph": True}, "triton"),
        ({"page_sizes": frozenset({16, 64})}, "triton"),
        ({"page_sizes": frozenset({16, 128})}, "fa3"),
        ({"dtype": torch.float16}, "fa3"),
        ({"kv_dtype": torch.float8_e4m3fn}, "fa3"),
        ({"latent_dim": 448}, "fa3"),
        ({"arch": "sm_100"}, "fa3"),
        ({"arch": None}, "fa3"),
    ],
)
def test_mla_steps_that_hoppers_own_kernel_computes_go_to_triton_before_the_libraries(
    change: dict[str, Any], first: str, phase: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "available", lambda: True)
    need = replace(HOPPER_MLA, phase=phase, **change)
    ours, others = ["triton", "fa3", "flashmla"], ["fa3", "flashmla", "triton"]
    assert default_order(need)[:3] == (ours if first == "triton" else others)
    assert sorted(default_order(need)) == sorted(BACKENDS)
    monkeypatch.setattr(nvrtc, "available", lambda: False)
    assert default_order(need)[:3] == others


def test_torch_native_serves_a_cpu_without_a_compiler_and_is_selectable_on_a_gpu(
    without_cpu_kernels: None,
) -> None:
    choice = select(replace(GPU, device="cpu"), Wanted())
    assert choice.backend.name == "torch_native"
    assert "triton: it needs an NVIDIA or AMD GPU, not cpu" in choice.explain()
    assert select(GPU, Wanted("torch_native")).backend.name == "torch_native"


SLIDING_BLOCK = frozenset({LayerMask(Mask.SLIDING_BLOCK, 5)})


@pytest.mark.skipif(library.compiled().library is None, reason="no C++ compiler")
def test_our_kernels_are_the_default_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_load", library.compiled)
    need = replace(GPU, device="cpu")
    assert select(need, Wanted()).backend.name == "cpu"
    float8 = replace(need, kv_dtype=torch.float8_e4m3fn)
    assert select(float8, Wanted()).backend.name == "torch_native"
    assert survey(replace(need, num_heads=128, num_kv_heads=2))["cpu"] == [
        "64 query heads share a K/V head; it takes up to 32"
    ]


def test_graphs_and_trees_need_triton() -> None:
    tree = replace(GPU, masks=frozenset({LayerMask(Mask.CUSTOM)}), graph=True)
    reasons = survey(tree)
    assert reasons["triton"] == []
    assert len(reasons["torch_native"]) == 1
    with pytest.raises(ConfigError, match="attention_backend torch_native cannot serve"):
        select(tree, Wanted("torch_native"))


@pytest.mark.parametrize(
    ("need", "reason"),
    [
        (replace(GPU, head_dim=576), "head dim 576 is not within 16 to 512"),
        (replace(GPU, dtype=torch.float64), "not torch.float64"),
        (replace(GPU, kv_dtype=torch.float8_e5m2), "float8_e4m3fn, not torch.float8_e5m2"),
        (
            replace(GPU, mla=True, dense=False, head_dim=1088, latent_dim=1024),
            "latent rows of 1024",
        ),
        (
            replace(LATENT, sinks=True),
            "has no attention sinks",
        ),
        (replace(LATENT, logit_softcap=True), "latent (MLA) attention has no logit soft-cap"),
        (replace(LATENT, masks=frozenset({LayerMask(Mask.CUSTOM, 5)})), "trees have no window"),
        (replace(LATENT, masks=SLIDING_BLOCK), "latent (MLA) attention has no sliding block mask"),
        (replace(LATENT, uniform=False), "latent rows of one shape in all layers"),
    ],
)
def test_what_triton_refuses(need: AttentionNeed, reason: str) -> None:
    assert any(reason in said for said in survey(need)["triton"])


def test_who_has_windows_around_the_tokens_of_a_block() -> None:
    reasons = survey(replace(GPU, masks=SLIDING_BLOCK, phase=Phase.VERIFY))
    assert reasons["triton"] == reasons["torch_native"] == []
    for name in ("flashinfer", "trtllm_mha"):
        assert "its sliding block mask has no window" in reasons[name]
    for name in ("fa3", "fa4", "cpu"):
        assert not any("mask" in reason for reason in reasons[name])


def test_all_kv_dtypes_are_supported() -> None:
    for kv in (None, torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        reasons = survey(replace(GPU, kv_dtype=kv))
        assert reasons["triton"] == reasons["torch_native"] == []


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match="Unknown attention_backend 'tritn'"):
        select(GPU, Wanted("tritn"))


@pytest.mark.usefixtures("without_cpu_kernels")  # which would serve this
def test_every_reason_is_listed() -> None:
    need = replace(GPU, device="cpu", head_dim=512, sinks=True, phase=Phase.PREFILL)
    with pytest.raises(ConfigError) as refused:
        select(replace(need, graph=True), Wanted())
    said = str(refused.value)
    for reason in ("prefill of the target", "not cpu", "head dim 512", "sinks", "device graph"):
        assert reason in said


class Paged(AttentionBackend):
    """Supports some page sizes only."""

    name = "paged"
    capabilities = Capabilities(page_sizes=(64, 128), phases=frozenset({Phase.DECODE}))

    plan = write = attend = None  # type: ignore[assignment]


class Small(Paged):
    name = "small"
    capabilities = Capabilities(page_sizes=(1, 16))


def chosen(*kinds: type[AttentionBackend]) -> list[BackendChoice]:
    return [BackendChoice(kind, GPU, {}) for kind in kinds]


def test_the_page_size_is_one_that_all_chosen_backends_support() -> None:
    assert choose_page_size(chosen(TorchNative), None) == 16
    assert choose_page_size(chosen(Paged, TorchNative), None) == 128
    assert choose_page_size(chosen(TorchNative, Paged), None) == 128
    assert choose_page_size(chosen(TorchNative, Small), None) == 16
    assert choose_page_size(chosen(Paged, TorchNative), 64) == 64
    assert choose_page_size(chosen(TorchNative), 256) == 256
    with pytest.raises(ConfigError, match=r"page_size 16 does not fit.*paged supports 64, 128"):
        choose_page_size(chosen(Paged, TorchNative), 16)
    with pytest.raises(ConfigError, match=r"no page size in common: paged.*small supports 1, 16"):
        choose_page_size(chosen(Paged, Small), None)


def test_a_backend_may_serve_one_phase() -> None:
    assert Paged.why_not(GPU) == []
    assert Paged.why_not(replace(GPU, phase=Phase.PREFILL)) == ["it does not serve prefill"]
