"""NaN or infinite logits end a request with an error that says so, and no other request."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun import LLM
from forerun.llm.output import RequestOutput
from tests import chain_models
from tests.golden_engine import CASES, GOLDEN

TARGET = GOLDEN / "target"
NEW = 12
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True}
SAMPLED: dict[str, Any] = {**GREEDY, "temperature": 0.8, "top_p": 0.9, "sampling_seed": 3}
MESSAGE = "the target produced NaN or infinite logits; check its weights and the dtype."
Weights = dict[str, Tensor]


def write_target(folder: Path, change: Callable[[Weights], None]) -> Path:
    """The golden target with other weights, and an LM head of its own."""
    shutil.copytree(TARGET, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    change(weights)
    save_file(weights, folder / "model.safetensors")
    return folder


def make_llm(target: Path, algorithm: str | None = None, **settings: Any) -> LLM:
    if algorithm in ("DFLASH", "DDTREE"):
        settings["speculative_draft_model_path"] = str(GOLDEN / "draft")
    settings = {"dtype": "float32", "skip_tokenizer_init": True, "page_size": 16, **settings}
    return LLM(target, speculative_algorithm=algorithm, **settings)


def check_failed(out: RequestOutput, num_tokens: int) -> None:
    reason = out.meta_info["finish_reason"]
    assert reason["type"] == "abort"
    assert reason["message"] == f"Output token {num_tokens + 1}: {MESSAGE}"
    assert len(out.output_ids) == num_tokens


def set_entry(name: str, row: int, value: float, weights: Weights) -> None:
    weights[name][row] = value


@pytest.fixture(scope="module")
def nan_weight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One NaN in the second layer."""
    name = "model.layers.1.mlp.down_proj.weight"
    return write_target(
        tmp_path_factory.mktemp("nan") / "target", partial(set_entry, name, 3, torch.nan)
    )


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("overlap_depth", [0, 1])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("algorithm", [None, "NGRAM", "DFLASH", "DDTREE", "EAGLE3"])
def test_a_nan_weight_ends_every_request_with_an_error(
    nan_weight: Path,
    tmp_path: Path,
    algorithm: str | None,
    params: dict[str, Any],
    overlap_depth: int,
) -> None:
    settings: dict[str, Any] = {"overlap_depth": overlap_depth}
    if algorithm == "EAGLE3":
        draft = chain_models.eagle3(tmp_path / "draft")
        settings["speculative_draft_model_path"] = str(draft)
    with make_llm(nan_weight, algorithm, **settings) as llm:
        outs = llm.generate(input_ids=[c["prompt"] for c in CASES[:3]], sampling_params=params)
        for out in outs:
            check_failed(out, num_tokens=0)
        llm.engine.check()


def test_infinite_logits_end_a_request(tmp_path: Path) -> None:
    infinite = partial(set_entry, "lm_head.weight", 7, torch.inf)
    with make_llm(write_target(tmp_path / "target", infinite)) as llm:
        check_failed(llm.generate(input_ids=CASES[0]["prompt"], sampling_params=GREEDY), 0)


def broken_token() -> tuple[int, int, dict[str, Any], dict[str, Any]]:
    """(token, its place in an output, that case, a case without it)."""
    for case in CASES:
        for place, token in enumerate(case["output"][: NEW - 2]):
            if place < 3 or token in [*case["prompt"], *case["output"][:place]]:
                continue
            for other in CASES:
                if token not in [*other["prompt"], *other["output"][:NEW]]:
                    return token, place, case, other
    raise AssertionError("the golden cases changed")


@pytest.fixture(scope="module")
def nan_token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedding of one token is NaN: a text is right up to this token."""
    change = partial(set_entry, "model.embed_tokens.weight", broken_token()[0], torch.nan)
    return write_target(tmp_path_factory.mktemp("token") / "target", change)


@pytest.mark.covering(1)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("overlap_depth", [0, 1])
def test_the_tokens_before_stay_and_other_requests_go_on(
    nan_token: Path, overlap_depth: int, page_size: int
) -> None:
    """Pages that held NaN are used again."""
    token, place, failing, other = broken_token()
    settings = {"overlap_depth": overlap_depth, "page_size": page_size, "max_total_tokens": 256}
    with make_llm(nan_token, **settings) as llm:
        for i in range(6):  # the pool is small: pages are used again
            broken = [*other["prompt"][: i + 1], token, *other["prompt"]]
            outs = llm.generate(
                input_ids=[failing["prompt"], other["prompt"], broken], sampling_params=GREEDY
            )
            check_failed(outs[0], num_tokens=place + 1)
            assert outs[0].output_ids == failing["output"][: place + 1]
            assert outs[1].output_ids == other["output"][:NEW]
            check_failed(outs[2], num_tokens=0)
        llm.engine.check()


def test_the_prefix_cache_takes_no_invalid_prompt(nan_token: Path) -> None:
    token, _, failing, _ = broken_token()
    with make_llm(nan_token, page_size=1) as llm:
        for prompt, cached in (
            ([token, 1, 2, 3], 0),
            (failing["prompt"], len(failing["prompt"]) - 1),
        ):
            for _ in range(2):
                out = llm.generate(input_ids=prompt, sampling_params=GREEDY)
            assert out.meta_info["cached_tokens"] == cached


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("algorithm", ["NGRAM", "DFLASH", "DDTREE"])
def test_with_drafts_the_tokens_before_stay(nan_token: Path, algorithm: str) -> None:
    """A draft may propose the broken token earlier: then the text ends earlier, and is right."""
    _, place, failing, _ = broken_token()
    with make_llm(nan_token, algorithm) as llm:
        out = llm.generate(input_ids=failing["prompt"], sampling_params=GREEDY)
        assert len(out.output_ids) <= place + 1
        assert out.output_ids == failing["output"][: len(out.output_ids)]
        check_failed(out, num_tokens=len(out.output_ids))
        llm.engine.check()


def test_penalties_and_logprobs_of_the_tokens_before(nan_token: Path) -> None:
    """Penalties leave invalid logits invalid."""
    _, place, failing, other = broken_token()
    tiny = {**GREEDY, "presence_penalty": 1e-6, "repetition_penalty": 1 + 1e-6}
    with make_llm(nan_token) as llm:
        outs = llm.generate(
            input_ids=[failing["prompt"], other["prompt"]],
            sampling_params=tiny,
            return_logprob=True,
            top_logprobs_num=2,
        )
        check_failed(outs[0], num_tokens=place + 1)
        assert len(outs[0].meta_info["output_top_logprobs"]) == place + 1
        assert len(outs[1].meta_info["output_token_logprobs"]) == NEW
        llm.engine.check()
