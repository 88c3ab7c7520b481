"""Engines on FlashInfer's kernels, in bfloat16, on a GPU: the bundled pair, whose heads fit them.

A token is right if, after the tokens before it, a float32 model gives it nearly the highest logit.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import pytest
import torch

from forerun import LLM
from forerun.evals.prompts import held_out
from forerun.llm.bundled import bundled
from tests.support_cells import passed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python is not installed"
    ),
]

CLOSE = 0.5  # logits; bfloat16 moves them by about 0.1 in this model
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 32, "ignore_eos": True}
# Means of these prompts in float32: 1.8 and 2.8. Wrong attention in a draft leaves little over 1.
LEAST_ACCEPTED = {"DFLASH": 1.4, "EAGLE3": 1.8}


@cache
def prompts() -> list[list[int]]:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(bundled("target"))
    return [tokenizer(row["prompt"]).input_ids for row in held_out()[:5]]


@cache
def reference() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(
        bundled("target"), dtype=torch.float32
    ).eval()


@torch.inference_mode()
def behind(prompt: list[int], output: list[int]) -> float:
    """How far a generated token's logit is below the highest, at most."""
    logits = reference()(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
    return float((logits.amax(1) - chosen).max())


def test_the_measure_can_fail() -> None:
    assert behind(prompts()[0], [prompts()[0][0]] * 4) > 4 * CLOSE


@pytest.mark.covering(2, 3)
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize(("page_size", "chunk"), [(16, 7), (64, 512)])
@pytest.mark.parametrize("algorithm", [None, "NGRAM", "DFLASH", "DDTREE", "EAGLE3"])
@pytest.mark.parametrize("backend", ["flashinfer", "trtllm_mha"])
def test_every_token_is_nearly_the_most_likely(
    backend: str,
    algorithm: str | None,
    page_size: int,
    chunk: int,
    overlap_depth: int,
    graph: bool,
) -> None:
    with LLM(
        speculative_algorithm=algorithm,
        device="cuda",
        dtype="bfloat16",
        speculative_adaptive=False,
        attention_backend=backend,
        page_size=page_size,
        chunked_prefill_size=chunk,
        overlap_depth=overlap_depth,
        disable_cuda_graph=not graph,
        max_running_requests=6,
    ) as llm:
        assert llm.explain()["attention"]["decode"] == f"{backend}: chosen"
        for _ in range(2):  # then with cached prefixes
            outputs = llm.generate(input_ids=prompts(), sampling_params=GREEDY)
            for prompt, output in zip(prompts(), outputs, strict=True):
                assert behind(prompt, output.output_ids) < CLOSE
        if algorithm in LEAST_ACCEPTED:  # wrong attention in the draft costs acceptance alone
            lengths = [out.meta_info["spec_accept_length"] for out in outputs]
            assert sum(lengths) / len(lengths) > LEAST_ACCEPTED[algorithm]
        llm.engine.check()
        passed(llm, __file__)
