"""Which backend serves which phase, for named backends and defaults: on CUDA, ROCm and a CPU.

Needs and capabilities are values, so no GPU is needed. The toy backends stand for kinds of kernels:
`gen` decodes only (W tokens, masks by architecture), `chunks` prefills only.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from forerun.attention.base import AttentionBackend, AttentionNeed, LayerMask, Mask
from forerun.attention.capabilities import PER_STEP, Capabilities, HostLengths, Phase
from forerun.attention.select import BACKENDS, choose_page_size
from forerun.attention.torch_native import TorchNative
from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.executor.attention_setup import DRAFT, TARGET, ModelNeed, choose_backends
from forerun.kvcache.layouts import ModelLayout

pytest.importorskip("triton")

H200 = AttentionNeed(
    "cuda", torch.bfloat16, 128, 32, 8, frozenset({LayerMask()}), graph=True, arch="sm_90"
)
B200 = replace(H200, arch="sm_100")
MI300 = replace(H200, arch="gfx942")
CPU = replace(H200, device="cpu", arch=None, graph=False)
BLOCK = frozenset({LayerMask(Mask.BLOCK)})
LAYOUT = ModelLayout.dense(1, 8, 128, torch.bfloat16)


class Toy(AttentionBackend):
    plan = write = attend = None  # type: ignore[assignment]


class Gen(Toy):
    """As TRTLLM's decode kernels: causal only on one architecture, any mask on the other."""

    name = "gen"
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        archs=frozenset({"sm_90", "sm_100"}),
        phases=frozenset(PER_STEP),
        page_sizes=(32, 64),
    )

    @classmethod
    def why_unfit(cls, need: AttentionNeed) -> list[str]:
        causal = all(mask.mask is Mask.CAUSAL for mask in need.masks)
        extra = [] if need.arch == "sm_90" or causal else ["on sm_100 it is causal only"]
        return [*super().why_unfit(need), *extra]


class Chunks(Toy):
    name = "chunks"
    capabilities = Capabilities(
        archs=frozenset({"sm_90"}),
        phases=frozenset({Phase.PREFILL, Phase.VERIFY}),
        masks=frozenset({Mask.CAUSAL}),
        page_sizes=(64, 128),
    )


class Planned(Toy):
    """Plans on the host."""

    name = "planned"
    capabilities = Capabilities(
        archs=frozenset({"sm_90"}),
        masks=frozenset({Mask.CAUSAL}),
        page_sizes=(1, 16),
        host_lengths=HostLengths.EXACT,
    )


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch, _interpreter: None) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    own = {name: BACKENDS[name] for name in ("triton", "torch_native")}
    own["fa4"] = BACKENDS["fa4"]
    monkeypatch.setattr(BACKENDS["fa4"](), "why_missing", classmethod(lambda cls: []))
    toys = {kind.name: lambda kind=kind: kind for kind in (Gen, Chunks, Planned)}
    monkeypatch.setattr("forerun.attention.select.BACKENDS", own | toys)
    for order in ("PREFILL_ORDER", "STEP_ORDER"):
        monkeypatch.setattr(f"forerun.attention.select.{order}", ("triton",))
    monkeypatch.setattr("forerun.attention.select._sm90_kernel_serves", lambda need: False)


def served(
    need: AttentionNeed,
    draft: frozenset[LayerMask] | None = None,
    trees: frozenset[LayerMask] = frozenset(),
    **settings: object,
) -> dict[str, str]:
    """Backend by "model phase": a target, and a draft with these masks."""
    phases = (Phase.PREFILL, Phase.DECODE, Phase.VERIFY)
    models = [ModelNeed(TARGET, LAYOUT, need, phases, trees)]
    if draft is not None:
        models.append(ModelNeed(DRAFT, LAYOUT, replace(need, masks=draft), tuple(Phase)))
    setups = choose_backends(EngineConfig(**settings), models)  # type: ignore[arg-type]
    out = {}
    for name, setup in zip(("target", "draft"), setups, strict=False):
        out |= {f"{name} {p.value}": c.backend.name for p, c in setup.choices.items()}
        short = setup.short_prefill
        out[f"{name} short"] = "-" if short is None else short.name
    return out


def of(target: str, draft: str | None = None) -> dict[str, str]:
    """From "prefill decode verify short" and "prefill decode verify extend short"."""
    out = dict(zip(("prefill", "decode", "verify", "short"), target.split(), strict=True))
    out = {f"target {phase}": name for phase, name in out.items()}
    if draft is not None:
        phases = ("prefill", "decode", "verify", "draft extend", "short")
        out |= {f"draft {phase}": name for phase, name in zip(phases, draft.split(), strict=True)}
    return out


TRITON = ("triton triton triton triton", "triton triton triton triton triton")
NATIVE = tuple(line.replace("triton", "torch_native") for line in TRITON)


@pytest.mark.parametrize("mode", [None, "prefill", "decode"])
@pytest.mark.parametrize(
    ("need", "expected"), [(H200, TRITON), (B200, TRITON), (MI300, TRITON), (CPU, NATIVE)]
)
def test_defaults_without_packages(
    need: AttentionNeed,
    expected: tuple[str, str],
    mode: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert served(need, BLOCK, speculative_attention_mode=mode) == of(*expected)
    assert not caplog.records


@pytest.mark.parametrize(
    ("need", "settings", "expected"),
    [
        # One name for everything: what it is not made for goes to the next one.
        (H200, {"attention_backend": "gen"}, of("triton gen gen triton")),
        (H200, {"attention_backend": "chunks"}, of("chunks triton chunks chunks")),
        (H200, {"attention_backend": "planned"}, of("planned planned planned -")),
        (
            H200,
            {"prefill_attention_backend": "chunks", "decode_attention_backend": "gen"},
            of("chunks gen gen chunks"),
        ),
        (
            H200,
            {
                "prefill_attention_backend": "chunks",
                "decode_attention_backend": "gen",
                "speculative_attention_mode": "prefill",
            },
            of("chunks gen chunks chunks"),
        ),
        # The mode follows the backend that serves prefill, also where that fell back.
        (
            H200,
            {"attention_backend": "gen", "speculative_attention_mode": "prefill"},
            of("triton gen triton triton"),
        ),
        (H200, {"prefill_attention_backend": "chunks"}, of("chunks triton triton chunks")),
        # Made for fewer phases on this GPU than on others.
        (H200, {"attention_backend": "fa4"}, of("fa4 triton triton -")),
        (B200, {"attention_backend": "fa4"}, of("fa4 fa4 fa4 fa4")),
    ],
)
def test_named_backends_of_the_target(
    need: AttentionNeed, settings: dict[str, str], expected: dict[str, str]
) -> None:
    assert served(need, **settings) == expected


@pytest.mark.parametrize(
    ("need", "settings", "expected"),
    [
        # A block draft takes over the target's backend where its masks allow.
        (
            H200,
            {"attention_backend": "gen"},
            of("triton gen gen triton", "triton gen gen gen triton"),
        ),
        (
            B200,
            {"attention_backend": "gen"},
            of("triton gen gen triton", "triton triton triton triton triton"),
        ),
        (
            B200,
            {"attention_backend": "gen", "speculative_draft_attention_backend": "triton"},
            of("triton gen gen triton", "triton triton triton triton triton"),
        ),
        (
            H200,
            {"speculative_draft_attention_backend": "gen"},
            of("triton triton triton triton", "triton gen gen gen triton"),
        ),
        (
            H200,
            {
                "speculative_draft_attention_backend": "gen",
                "speculative_attention_mode": "prefill",
            },
            of("triton triton triton triton", "triton gen triton triton triton"),
        ),
    ],
)
def test_the_draft(need: AttentionNeed, settings: dict[str, str], expected: dict[str, str]) -> None:
    assert served(need, BLOCK, **settings) == expected


def test_a_default_that_falls_back_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "forerun")
    served(B200, BLOCK, attention_backend="gen")
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == (
        "attention_backend gen does not serve prefill of the target (it does not serve prefill);"
        " triton does."
    )
    assert (
        "attention_backend gen does not serve decode, verify, draft extend of the draft"
        " (on sm_100 it is causal only); triton does."
    ) in said
    assert len(said) == 3  # and prefill of the draft


@pytest.mark.parametrize(
    ("need", "trees", "settings", "says"),
    [
        (
            MI300,
            False,
            {"attention_backend": "gen"},
            r"attention_backend gen cannot serve decode of the target: it runs on sm_100 and sm_90,"
            r" not gfx942\. These can: triton\.$",
        ),
        (
            CPU,
            False,
            {"decode_attention_backend": "gen"},
            r"cuda, not cpu\. These can: torch_native",
        ),
        (
            B200,
            True,
            {"decode_attention_backend": "gen"},
            r"verify of the target: on sm_100 it is causal only\. These can: triton\.$",
        ),
        (
            H200,
            False,
            {"prefill_attention_backend": "gen"},
            r"prefill_attention_backend gen cannot serve prefill of the target: it does not serve"
            r" prefill\. These can: triton, torch_native, fa4, chunks, planned\.$",
        ),
        (
            H200,
            True,
            {"prefill_attention_backend": "chunks", "speculative_attention_mode": "prefill"},
            r"speculative_attention_mode prefill: chunks cannot serve verify of the target: it has"
            r" no custom mask\. These can: triton, gen\.$",
        ),
    ],
)
def test_a_named_backend_is_refused_with_what_would_work(
    need: AttentionNeed, trees: bool, settings: dict[str, str], says: str
) -> None:
    masks = frozenset({LayerMask(Mask.CUSTOM)}) if trees else frozenset[LayerMask]()
    with pytest.raises(ConfigError, match=says):
        served(need, trees=masks, **settings)


def test_a_named_draft_backend_is_refused_too() -> None:
    with pytest.raises(ConfigError, match=r"^speculative_draft_attention_backend gen cannot serve"):
        served(B200, BLOCK, speculative_draft_attention_backend="gen")


def test_defaults_make_way_for_the_pages_of_what_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A faster default whose pages do not fit is passed over; names are an error."""
    monkeypatch.setattr("forerun.attention.select.PREFILL_ORDER", ("chunks", "triton"))
    assert served(H200)["target prefill"] == "chunks"
    assert served(H200, page_size=16)["target prefill"] == "triton"
    chosen = served(H200, decode_attention_backend="planned")
    assert (chosen["target prefill"], chosen["target decode"]) == ("triton", "planned")
    need = ModelNeed(TARGET, LAYOUT, H200, (Phase.PREFILL, Phase.DECODE))
    names = {"prefill_attention_backend": "chunks", "decode_attention_backend": "planned"}
    (setup,) = choose_backends(EngineConfig(**names), [need])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no page size in common"):
        choose_page_size(list(setup.choices.values()), None)


def test_exact_lengths_count_only_in_decode_steps() -> None:
    need = ModelNeed(TARGET, LAYOUT, H200, (Phase.PREFILL, Phase.DECODE))
    for phase, exact in (("prefill", False), ("decode", True)):
        names = {f"{phase}_attention_backend": "planned"}
        (setup,) = choose_backends(EngineConfig(**names), [need])  # type: ignore[arg-type]
        assert setup.needs_exact_lengths == exact


def test_pages_that_do_not_fit_are_a_reason() -> None:
    need = replace(H200, page_sizes=frozenset({16, 128}))
    assert Gen.why_not(need) == ["it has pages of 32, 64 tokens, not of 16, 128"]
    assert Gen.why_not(replace(need, page_sizes=frozenset({16, 64}))) == []
    assert TorchNative.why_not(replace(need, graph=False)) == []
