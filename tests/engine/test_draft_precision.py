"""Drafts in 8 bits, weights or K/V: the text stays that of plain decoding, and few drafts fewer are
accepted."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM
from forerun.core.errors import ConfigError
from forerun.evals.acceptance import Acceptance
from forerun.evals.word_problems import problems
from forerun.kernels.cpu.gemm import Format
from forerun.layers.gemm import CpuGemm
from forerun.layers.linear import LinearBase, QKVLinear
from forerun.models.draft_base import quantize_draft
from tests.engine.test_algorithms import PROMPTS, rules
from tests.engine.test_chain_drafts import plain_texts
from tests.engine.test_gemma4_assistant import assisted, prompts, root, shared_kv  # noqa: F401
from tests.golden_engine import GOLDEN, golden_llm
from tests.models.support import CPU_F32

E4M3 = torch.float8_e4m3fn
QUANTIZED = {"speculative_draft_model_quantization": "fp8"}
KEPT = {"speculative_draft_kv_cache_dtype": "fp8_e4m3"}
NAMES = ["DFLASH", "DDTREE", "EAGLE3", "NEXTN", "STANDALONE"]


def folder_of(name: str, drafts: dict[str, Path]) -> str:
    return str(drafts.get(name, GOLDEN / "draft"))


@pytest.mark.covering(0)
@pytest.mark.parametrize("settings", [QUANTIZED | KEPT, QUANTIZED, KEPT], ids=["both", "w", "kv"])
@pytest.mark.parametrize("name", NAMES)
def test_output_equals_plain_decoding(
    name: str, settings: dict[str, str], drafts: dict[str, Path]
) -> None:
    own: dict[str, Any] = {"speculative_draft_model_path": folder_of(name, drafts), **settings}
    with golden_llm(name, **own) as llm:
        for sampled in (False, True):
            for _ in ("cold", "warm"):
                outs = llm.generate(input_ids=PROMPTS, sampling_params=rules(sampled))
                assert [o.output_ids for o in outs] == plain_texts()[sampled]
        assert max(max(o.meta_info["spec_accept_lengths"]) for o in outs) > 1
        draft = llm.engine.executor.step.draft_attention
        assert draft is not None
        kept = E4M3 if settings.get("speculative_draft_kv_cache_dtype") else torch.float32
        assert draft.pools.dense.dtype == kept
        assert llm.engine.executor.step.attention.pools.dense.dtype == torch.float32
        llm.engine.check()


def linears(name: str, llm: LLM) -> dict[str, LinearBase]:
    algorithm = vars(llm.engine.executor.step.algorithm.algorithm)
    draft = algorithm["_draft"] if name != "NEXTN" else algorithm["_modules"][0]._draft
    return dict(draft.named_modules(LinearBase))


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", NAMES)
def test_linears_are_quantized(name: str, drafts: dict[str, Path]) -> None:
    """All but the head's, and in DFlash drafts those whose rows make context K/V."""
    own: dict[str, Any] = {"speculative_draft_model_path": folder_of(name, drafts)}
    with golden_llm(name, **own, **QUANTIZED) as llm:
        found = linears(name, llm)
        assert len(found) >= 4
        for path, linear in found.items():
            context = name in ("DFLASH", "DDTREE") and isinstance(linear, QKVLinear)
            quantized = linear.quantized_gemm is not None
            assert quantized == (path != "lm_head." and not context), path
    with golden_llm(name, **own) as llm:
        assert not any(linear.quantized_gemm for linear in linears(name, llm).values())


ROUNDED = [
    ({"dtype": "auto"}, True),
    ({"dtype": "bfloat16"}, True),
    ({"dtype": "float32"}, False),  # the user's word for: nothing is rounded
    ({"dtype": "auto", "speculative_draft_model_quantization": "unquant"}, False),
    ({"dtype": "float32", "speculative_draft_model_quantization": "int8"}, True),
]


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
@pytest.mark.parametrize(("settings", "rounded"), ROUNDED)
def test_a_cpu_rounds_drafts_unless_float32_is_asked_for(
    settings: dict[str, str], rounded: bool, stored: str, tmp_path: Path
) -> None:
    """By the user, or by the target's files."""
    target = Path(shutil.copytree(GOLDEN / "target", tmp_path / "target"))
    config = json.loads((target / "config.json").read_text())
    config.pop("torch_dtype", None)
    (target / "config.json").write_text(json.dumps(config | {"dtype": stored}))
    own = {"speculative_draft_model_path": str(GOLDEN / "draft"), **settings}
    asked = {"device": "cpu", "skip_tokenizer_init": True, "max_running_requests": 1}
    with LLM(target, speculative_algorithm="DFLASH", **asked, **own) as llm:
        gemms = [linear.gemm for linear in linears("DFLASH", llm).values()]
    in_8_bits = {g.weight.format is Format.INT8 for g in gemms if isinstance(g, CpuGemm)}
    float32 = stored == "float32" and settings == {"dtype": "auto"}
    assert in_8_bits == {rounded and not float32}


def test_a_quantized_weight_is_that_of_e4m3() -> None:
    """Against the definition: a scale per row, its largest value / 448."""
    weight = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    linear = partial(LinearBase, 12, 5, False, CPU_F32)()
    linear.weight.copy_(weight)
    draft = type("Draft", (LinearBase,), {})(1, 1, False, CPU_F32)
    draft.part, draft.quantizable = linear, False
    quantize_draft(draft, "fp8")
    assert linear.quantized is not None
    scale = weight.abs().amax(1, keepdim=True) / 448
    want = (weight / scale).to(E4M3).float() * scale
    assert torch.equal(linear.quantized.dequantize(), want)
    assert not torch.equal(want, weight)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["DFLASH", "EAGLE3"])
def test_the_bundled_drafts_lose_little(name: str) -> None:
    """Tokens per step of the bundled pair over word problems."""
    chats = [[{"role": "user", "content": problem.question}] for problem in problems(60)]
    mean: dict[str, float] = {}
    for label, settings in {"plain": {}, "w": QUANTIZED, "kv": KEPT}.items():
        own: dict[str, Any] = {"dtype": "float32", "speculative_adaptive": False, **settings}
        with LLM(speculative_algorithm=name, **own) as llm:
            outs = llm.chat(chats, {"temperature": 0, "max_new_tokens": 96})
        steps = sum(sum(Acceptance.of(out.meta_info).histogram) for out in outs)
        mean[label] = sum(len(out.output_ids) for out in outs) / steps
    print(name, mean)
    assert min(mean.values()) > 0.95 * mean["plain"]


@pytest.mark.covering(0)
@pytest.mark.parametrize("form", ["plain", "centroids"])
def test_an_assistant_is_quantized(form: str, root: Path) -> None:  # noqa: F811
    texts = []
    ask = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
    for settings in ({}, QUANTIZED):
        with assisted(root, "gemma4", form, **settings) as llm:
            out = llm.generate(input_ids=prompts()[0], sampling_params=ask)
            texts.append(out.output_ids)
            draft = llm.engine.executor.step.algorithm.algorithm._draft
            kinds = {p: x.quantized_gemm for p, x in draft.named_modules(LinearBase)}
            assert (kinds["pre_projection."] is not None) == bool(settings)
            assert kinds.get("masked_embedding.centroids.") is None
    assert texts[0] == texts[1]


REFUSED = [
    (None, QUANTIZED, "quantization is set, but plain decoding has no draft that it"),
    ("NGRAM", QUANTIZED, "quantization is set, but NGRAM has no draft that it"),
    ("NGRAM", KEPT, "speculative_draft_kv_cache_dtype is set, but NGRAM has no K/V of a draft"),
    ("DFLASH", {"speculative_draft_model_quantization": "int4"}, "one of fp8, int8, unquant, got"),
    ("DFLASH", {"speculative_draft_kv_cache_dtype": "int8"}, "must be one of auto"),
]


@pytest.mark.parametrize(("name", "settings", "words"), REFUSED)
def test_settings_without_effect_are_refused(
    name: str | None, settings: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        golden_llm(name, **settings)
