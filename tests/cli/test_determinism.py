"""`forerun doctor --determinism`: it passes where bits are equal, and names what differs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.attention.base import AttentionSpec, Plan
from forerun.attention.cpu import CpuAttention
from forerun.doctor import determinism
from forerun.doctor.determinism import Sizes, Way, check_determinism
from forerun.doctor.observer import fingerprints
from forerun.kernels.cpu import library
from forerun.layers.embedding import LMHead
from forerun.layers.gemm import CpuGemm
from tests.determinism import hold_bits
from tests.golden_engine import GOLDEN
from tests.ragged import SETTINGS as RAGGED
from tests.ragged import divide_at_random

pytestmark = pytest.mark.skipif(
    library.compiled().library is None, reason="kernels in plain PyTorch round by shape"
)
SMALL = Sizes(requests=3, tokens=40)
TARGET = {"model_path": str(GOLDEN / "target"), "device": "cpu"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bits_of_the_golden_target(dtype: str, with_cpu_kernels: None) -> None:
    report = hold_bits(SMALL, **TARGET, dtype=dtype)
    ways = {way["name"]: way for way in report["ways"]}
    assert ways["prefix hits"]["cached_tokens"] > 0
    assert not [name for name, way in ways.items() if way["refused"]]
    assert max(way["accept_length"] or 0 for way in ways.values()) > 1.1


def test_bits_of_ragged_passes(monkeypatch: pytest.MonkeyPatch, with_cpu_kernels: None) -> None:
    division = divide_at_random(monkeypatch)
    some = [Way("ragged", {"speculative_algorithm": "NGRAM", **RAGGED})]
    monkeypatch.setattr(determinism, "ways", lambda settings, sizes: some)
    hold_bits(SMALL, **TARGET, dtype="bfloat16")
    assert any(len(set(widths)) > 1 for widths in division.seen)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "settings",
    [{"dtype": "bfloat16"}, {"dtype": "float32"}, {"dtype": "float32", "quantization": "int8"}],
    ids=["bfloat16", "float32", "int8"],
)
def test_bits_of_the_bundled_pair(settings: dict[str, str], with_cpu_kernels: None) -> None:
    report = hold_bits(Sizes(), device="cpu", **settings)
    assert sum(way["preemptions"] for way in report["ways"]) > 0
    assert max(way["accept_length"] or 0 for way in report["ways"]) > 2


def test_log_probabilities_of_drafted_text_are_those_of_scoring_it(with_cpu_kernels: None) -> None:
    """What trainers rely on: rollouts and a later pass over the same text agree, bit for bit."""
    from forerun import LLM

    settings: dict[str, Any] = {**TARGET, "dtype": "bfloat16", "skip_tokenizer_init": True}
    with LLM(**settings, speculative_algorithm="NGRAM") as llm:
        ask = {"return_logprob": True, "top_logprobs_num": 3}
        params = {"temperature": 0.7, "max_new_tokens": 40, "ignore_eos": True}
        prompt = [5, 6, 7, 5, 6, 7, 5, 6]
        out = llm.generate(input_ids=prompt, sampling_params=params, **ask)
        assert out.meta_info["spec_verify_ct"] < 40
        whole = {"input_ids": prompt + out.output_ids, "logprob_start_len": len(prompt) - 1}
        scored = llm.generate(**whole, sampling_params={"max_new_tokens": 0}, **ask)
    for what in ("token_logprobs", "top_logprobs"):
        generated, again = out.meta_info[f"output_{what}"], scored.meta_info[f"input_{what}"]
        assert again[1:] == generated


def few_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch, and drafts."""
    some = [Way("batches"), Way("NGRAM", {"speculative_algorithm": "NGRAM"})]
    monkeypatch.setattr(determinism, "ways", lambda settings, sizes: some)


def rounded_by_rows(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A kernel that rounds otherwise for several tokens."""

    def call(self: Any, x: Tensor) -> Tensor:
        return real(self, x) if len(x) == 1 else real(self, x) * (1 + 2**-6)

    return call


def found(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    few_ways(monkeypatch)
    report = check_determinism({**TARGET, "dtype": "bfloat16"}, Sizes(requests=2, tokens=16))
    assert not report["deterministic"]
    return [way["first"] for way in report["ways"] if not way["equal"]]


@pytest.mark.exhaustive
def test_it_names_a_gemm(monkeypatch, with_cpu_kernels: None) -> None:
    monkeypatch.setattr(CpuGemm, "silu_and_mul", rounded_by_rows(CpuGemm.silu_and_mul))
    for first in found(monkeypatch):
        assert first["part"] == "model.layers.0.mlp.gate_up_proj (CpuGemm.silu_and_mul)"
        assert first["after"].startswith("model.layers.0.")
        assert "x 1 tokens" not in first["forward"]


@pytest.mark.exhaustive
def test_it_names_an_attention_kernel(monkeypatch, with_cpu_kernels: None) -> None:
    real = CpuAttention.attend

    def attend(
        self: CpuAttention, plan: Plan, layer: int, spec: AttentionSpec, q: Tensor
    ) -> Tensor:
        out = real(self, plan, layer, spec, q)
        return out * (1 + 2**-6) if layer == 1 and len(q) > 1 else out

    monkeypatch.setattr(CpuAttention, "attend", attend)
    for first in found(monkeypatch):
        assert first["part"] == "model.layers.1.self_attn.attn (attention backend cpu)"


@pytest.mark.exhaustive
def test_it_knows_the_lm_head(monkeypatch, with_cpu_kernels: None) -> None:
    monkeypatch.setattr(LMHead, "__call__", rounded_by_rows(LMHead.__call__))
    assert {first["part"] for first in found(monkeypatch)} == {"LM head or log-probabilities"}


def test_fingerprints_are_of_bits() -> None:
    rows = torch.randn(4, 7, dtype=torch.bfloat16)
    same = rows.clone()
    assert fingerprints(rows) == fingerprints(same)
    same[1, 3] = same[1, 3] * (1 + 2**-6)
    same[2] = same[2].roll(1)
    rows[3, 0], same[3, 0] = 0.0, -0.0
    equal = [a == b for a, b in zip(fingerprints(rows), fingerprints(same), strict=True)]
    assert equal == [True, False, False, False]


def test_the_command(forerun, monkeypatch, with_cpu_kernels: None) -> None:
    arguments = ("--model-path", TARGET["model_path"], "--dtype", "bfloat16", "--requests", "2")
    arguments = ("doctor", "--determinism", *arguments, "--tokens", "16", "--device", "cpu")
    few_ways(monkeypatch)
    result = forerun(*arguments)
    assert result.code == 0 and "all bits are equal" in result.out
    monkeypatch.setattr(CpuGemm, "silu_and_mul", rounded_by_rows(CpuGemm.silu_and_mul))
    result = forerun(*arguments, "--json")
    report = json.loads(result.out)
    assert result.code == 1 and not report["deterministic"]
    assert report["dtype"] == "bfloat16" and report["requests"] == 2
    shown = " ".join(forerun(*arguments).out.split())
    assert "first differs model.layers.0.mlp.gate_up_proj" in shown and "bits differ" in shown


def test_bad_input_is_one_line(forerun) -> None:
    result = forerun("doctor", "--dtype", "float32")
    assert result.code == 2 and "--dtype is set without --determinism" in result.err
    result = forerun("doctor", "--determinism", "--tokens", "3")
    assert result.code == 2 and "tokens must be >= 16, got 3." in result.err
    result = forerun("doctor", "--determinism", "--ways", "tensor")
    assert result.code == 2 and "No way has tensor in its name; there are: batches;" in result.err


def test_chosen_ways() -> None:
    sizes = Sizes(ways=["pages", "NGRAM, pre"])
    names = [way.name for way in determinism.ways(TARGET, sizes)]
    assert names == [
        "pages of 1 token",
        "pages of 64 tokens",
        "NGRAM, preemption, chunks of 16",
    ]
