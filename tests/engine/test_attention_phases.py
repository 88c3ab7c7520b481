"""Which backend runs in which pass of a real step: two backends that differ by name alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from forerun import LLM
from forerun.attention.base import AttentionBatch, AttentionSpec, Buffers, Plan
from forerun.attention.capabilities import Mask
from forerun.attention.select import BACKENDS
from forerun.attention.torch_native import NativePlan, TorchNative
from forerun.core.errors import ConfigError
from tests.golden_engine import CASES, golden_llm

PROMPT = CASES[0]["prompt"][:9]
W = 4
RAN: set[str] = set()  # "backend: pass"


class Recording(TorchNative):
    """Notes the shape of every forward that attends."""

    def plan(self, batch: AttentionBatch, buffers: Buffers | None = None) -> NativePlan:
        plan = super().plan(batch, buffers)
        shapes[id(plan)] = batch.q_len
        plans.append(plan)
        return plan

    def attend(self, plan: Plan, layer: int, spec: AttentionSpec, q: Tensor) -> Tensor:
        q_len, model = shapes[id(plan)], "target" if self.pools.layout.num_layers > 2 else "draft"
        what = "prefill" if q_len is None else "1 token" if q_len == 1 else "W tokens"
        if spec.mask.mask is Mask.BLOCK:
            what = "block"
        RAN.add(f"{self.name}: {model} {what}")
        return super().attend(plan, layer, spec, q)


shapes: dict[int, int | None] = {}
plans: list[NativePlan] = []  # keeps ids unique


class One(Recording):
    name = "one"


class Two(Recording):
    name = "two"


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for kind in (One, Two):
        monkeypatch.setitem(BACKENDS, kind.name, lambda k=kind: k)
    RAN.clear()
    yield
    shapes.clear()
    plans.clear()


def ran(llm: LLM, width: int | None = None) -> set[str]:
    """What ran for a prompt; drafts are limited to none for the last tokens."""
    sampling = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
    with llm:
        llm.generate(input_ids=PROMPT, sampling_params=sampling)
    return set(RAN)


ONE_TWO: dict[str, Any] = {
    "prefill_attention_backend": "one",
    "decode_attention_backend": "two",
    "speculative_num_draft_tokens": W,
}


@pytest.mark.parametrize("mode", [None, "decode", "prefill"])
def test_a_draft_that_extends(chain_llm: Callable[..., LLM], mode: str | None) -> None:
    """Prefill, decode of a chain, verify, draft extend."""
    several = "one" if mode == "prefill" else "two"
    assert ran(chain_llm("EAGLE3", speculative_attention_mode=mode, **ONE_TWO)) == {
        "one: target prefill",
        "one: draft prefill",
        f"{several}: target W tokens",
        f"{several}: draft W tokens",
        "two: draft 1 token",
    }


@pytest.mark.parametrize("mode", [None, "prefill"])
def test_a_draft_of_blocks(mode: str | None) -> None:
    several = "one" if mode == "prefill" else "two"
    assert ran(golden_llm("DFLASH", speculative_attention_mode=mode, **ONE_TWO)) == {
        "one: target prefill",
        f"{several}: target W tokens",
        f"{several}: draft block",
    }


def test_plain_decoding() -> None:
    settings = {k: v for k, v in ONE_TWO.items() if not k.startswith("speculative")}
    assert ran(golden_llm(**settings)) == {"one: target prefill", "two: target 1 token"}


def test_a_draft_with_a_backend_of_its_own(chain_llm: Callable[..., LLM]) -> None:
    llm = chain_llm(
        "NEXTN",
        attention_backend="one",
        speculative_draft_attention_backend="two",
        speculative_num_draft_tokens=W,
    )
    assert ran(llm) == {
        "one: target prefill",
        "one: target W tokens",
        "two: draft prefill",
        "two: draft W tokens",
        "two: draft 1 token",
    }


@pytest.mark.usefixtures("without_cpu_kernels")
def test_what_a_backend_cannot_serve_runs_on_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    causal = replace(One.capabilities, masks=frozenset({Mask.CAUSAL}))
    monkeypatch.setattr(One, "capabilities", causal)
    assert ran(golden_llm("DFLASH", attention_backend="one")) == {
        "one: target prefill",
        "one: target W tokens",
    }
    phases = "prefill, decode, verify, draft extend of the draft (it has no block mask)"
    assert f"attention_backend one does not serve {phases}; torch_native does." in caplog.text
    with pytest.raises(ConfigError, match=r"of the draft: it has no block mask\. These can"):
        golden_llm("DFLASH", speculative_draft_attention_backend="one")


def test_settings_without_speculation(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="speculative_attention_mode is set without"):
        golden_llm(speculative_attention_mode="prefill")
