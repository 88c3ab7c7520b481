"""The trained DeepSeek-shaped toy: transformers' texts, and the accept length of its MTP layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM
from forerun.attention.select import BACKENDS as BACKEND_CLASSES
from tests.golden_engine import poison_on_release
from tests.support_cells import passed

TOY = Path(__file__).resolve().parent.parent / "golden" / "deepseek-toy"
CASES: list[dict[str, Any]] = json.loads((TOY / "cases.json").read_text())
PROMPTS = [case["prompt"] for case in CASES]
TEXTS = [case["output"] for case in CASES]
PARAMS = {"temperature": 0.0, "max_new_tokens": len(TEXTS[0]), "ignore_eos": True}
ONE_STEP: dict[str, Any] = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 1}
BACKENDS = ["triton", "fa3", "flashinfer_mla", "flashmla"]


def toy(**settings: Any) -> LLM:
    settings = {"dtype": "float32", "speculative_adaptive": False, **settings}
    llm = LLM(TOY, skip_tokenizer_init=True, **settings)
    poison_on_release(llm)
    return llm


def accept_length(lengths: list[list[int]]) -> float:
    """Tokens per step, over all texts."""
    return sum(map(sum, lengths)) / sum(map(len, lengths))


def test_the_file_is_small_and_the_acceptance_real() -> None:
    assert (TOY / "model.safetensors").stat().st_size < 6 << 20
    assert accept_length([case["accept"] for case in CASES]) >= 1.6


def test_plain_decoding_gives_the_texts_of_transformers() -> None:
    with toy() as llm:
        outs = llm.generate(input_ids=PROMPTS, sampling_params=PARAMS)
        assert [out.output_ids for out in outs] == TEXTS


@pytest.mark.exhaustive
def test_nextn_accepts_what_the_reference_accepts() -> None:
    """Step by step, cold and warm; the checkpoint itself has the draft."""
    with toy(**ONE_STEP, chunked_prefill_size=16, page_size=64) as llm:
        for asked in (PROMPTS, PROMPTS[-2:]):  # cold, warm
            outs = llm.generate(input_ids=asked, sampling_params=PARAMS)
            for out, case in zip(outs, CASES[-len(asked) :], strict=True):
                assert out.output_ids == case["output"]
                ours = out.meta_info["spec_accept_lengths"]  # the last step may be cut short
                assert ours[:-1] == case["accept"][: len(ours) - 1]
            if asked is PROMPTS:
                assert accept_length([o.meta_info["spec_accept_lengths"] for o in outs]) >= 1.6
        assert all(out.meta_info["cached_tokens"] >= 64 for out in outs)
        llm.engine.check()


def test_a_chain_runs_the_layer_over_its_own_output() -> None:
    """Three drafts: more tokens per step than one draft could ever give."""
    with toy(**{**ONE_STEP, "speculative_num_steps": 3}) as llm:
        outs = llm.generate(input_ids=PROMPTS[:3], sampling_params=PARAMS)
        assert [out.output_ids for out in outs] == TEXTS[:3]
        assert accept_length([o.meta_info["spec_accept_lengths"] for o in outs]) > 2.0


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_on_a_gpu(backend: str, overlap_depth: int, graph: bool) -> None:
    """In bfloat16 texts may part at near ties; acceptance may not change much."""
    if missing := BACKEND_CLASSES[backend]().why_missing():
        pytest.skip(missing[0])
    settings: dict[str, Any] = {
        "device": "cuda",
        "dtype": "bfloat16",
        "attention_backend": backend,
        "speculative_draft_attention_backend": backend,
        "page_size": 64,
        "max_running_requests": 8,
        "overlap_depth": overlap_depth,
        "disable_cuda_graph": not graph,
    }
    with toy(**ONE_STEP, **settings) as llm:
        outs = llm.generate(input_ids=PROMPTS, sampling_params=PARAMS)
        assert accept_length([o.meta_info["spec_accept_lengths"] for o in outs]) >= 1.55
        llm.engine.check()
        begin = 16
        equal = [o.output_ids[:begin] == text[:begin] for o, text in zip(outs, TEXTS, strict=True)]
        assert sum(equal) > len(equal) / 2
        passed(llm, __file__)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_in_float32_on_a_gpu(graph: bool) -> None:
    settings = {"device": "cuda", "attention_backend": "triton", "disable_cuda_graph": not graph}
    with toy(**ONE_STEP, **settings, max_running_requests=8) as llm:
        outs = llm.generate(input_ids=PROMPTS, sampling_params=PARAMS)
        assert [out.output_ids for out in outs] == TEXTS
