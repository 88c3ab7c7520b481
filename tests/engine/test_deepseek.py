"""A small random DeepSeek-V3 (latent K/V, experts, MTP layer) in the equality matrix."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM
from tests.chain_models import write
from tests.covering import some_of
from tests.engine.test_matrix import GREEDY, SEEDED, generate, params
from tests.golden_engine import poison_on_release
from tests.models.test_dflash import VOCAB, ZLAB, random_weights
from tests.models.test_nextn import checkpoint
from tests.ragged import SETTINGS, divide_at_random
from tests.toy_algorithms import Oracle, register_toys

NAME = "deepseek-v3"
ALGORITHMS = [None, "NGRAM", "NEXTN", "DFLASH", "DDTREE", "TOY-ORACLE-TREES"]
DRAFT_FOLDERS = ("DFLASH", "DDTREE")
FOLDERS: dict[str, Path] = {}


@pytest.fixture(scope="module", autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Target with its MTP layer, and a dense DFlash draft of it; all weights are random."""
    register_toys()
    made = tmp_path_factory.mktemp("deepseek")
    checkpoint(made / "target", NAME)
    layers = {**ZLAB["dflash_config"], "target_layer_ids": [0, 2]}
    config = {**ZLAB, "num_target_layers": 3, "dflash_config": layers}
    write(made / "draft", config, random_weights())
    FOLDERS["target"], FOLDERS["draft"] = made / "target", made / "draft"


def deepseek(algorithm: str | None = None, **settings: Any) -> LLM:
    if algorithm in DRAFT_FOLDERS:
        settings["speculative_draft_model_path"] = str(FOLDERS["draft"])
    settings = {"dtype": "float32", "speculative_adaptive": False, **settings}
    llm = LLM(
        FOLDERS["target"], speculative_algorithm=algorithm, skip_tokenizer_init=True, **settings
    )
    poison_on_release(llm)
    return llm


@cache
def prompts() -> list[list[int]]:
    """Three prompts with a common prefix of some pages, and two short ones."""
    draw = random.Random(3)
    stem = [draw.randrange(VOCAB) for _ in range(60)]
    return [stem[:54], stem[:37], stem[:50], stem[5:8], stem[9:10]]


@cache
def reference(sampled: bool, device: str = "cpu") -> list[list[int]]:
    """Plain decoding, one prompt at a time, without prefix cache."""
    kind = SEEDED if sampled else GREEDY
    with deepseek(disable_radix_cache=True, device=device) as llm:
        return [
            llm.generate(input_ids=p, sampling_params=params(kind, i)).output_ids
            for i, p in enumerate(prompts())
        ]


def test_plain_decoding_equals_transformers() -> None:
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(FOLDERS["target"], dtype=torch.float32).eval()
    outputs = reference(False)
    for prompt, output in zip(prompts(), outputs, strict=True):
        with torch.no_grad():
            logits = hf(torch.tensor([prompt + output])).logits[0]
        assert output == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert len({token for output in outputs for token in output}) > 10  # a text, not one token


@pytest.mark.exhaustive
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("chunk", [4, 512])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_output_equals_plain_decoding(
    algorithm: str | None,
    page_size: int,
    chunk: int,
    overlap_depth: int,
    tight: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"page_size": page_size, "chunked_prefill_size": chunk}
    hold(algorithm, tight, monkeypatch, overlap_depth=overlap_depth, **settings)


@pytest.mark.exhaustive
@pytest.mark.parametrize("algorithm", some_of([(name,) for name in ALGORITHMS[1:]], 4))
def test_output_of_ragged_passes(algorithm: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    division = divide_at_random(monkeypatch)
    # Room for two requests with the largest trees.
    settings = {"page_size": 16, "chunked_prefill_size": 4, "max_total_tokens": 224, **SETTINGS}
    hold(algorithm, True, monkeypatch, overlap_depth=1, **settings)
    assert any(len(set(widths)) > 1 for widths in division.seen)


@pytest.mark.gpu
@pytest.mark.covering(2, 3)
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("chunk", [4, 512])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_output_on_a_gpu(
    algorithm: str | None,
    chunk: int,
    overlap_depth: int,
    graph: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"page_size": 16, "chunked_prefill_size": chunk, "overlap_depth": overlap_depth}
    own = {"device": "cuda", "disable_cuda_graph": not graph, "max_running_requests": 6}
    hold(algorithm, chunk == 4, monkeypatch, **settings, **own)


def hold(
    algorithm: str | None, tight: bool, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> None:
    """One cell of the matrix."""
    page_size, device = settings["page_size"], settings.get("device", "cpu")
    if tight:
        settings.setdefault("max_total_tokens", 160)
    asked = prompts()
    with deepseek(algorithm, **settings) as llm:
        preempted = 0
        for sampled, chosen in enumerate((GREEDY, SEEDED)):
            want = reference(bool(sampled), device)
            answers = {tuple(p): o for p, o in zip(asked, want, strict=True)}
            monkeypatch.setattr(Oracle, "answers", answers)
            kinds = [params(chosen, i) for i in range(len(asked))]
            llm.engine.flush_cache()
            for warm in (False, True):
                got = generate(llm, asked, kinds, tight)
                assert [o[0] for o in got] == want
                preempted += sum(o[1] for o in got)
                if warm and not tight:
                    assert all(o[2] >= len(p) - page_size for o, p in zip(got, asked, strict=True))
        assert (preempted > 0) == tight
        llm.engine.check()


@pytest.mark.parametrize(
    ("algorithm", "token_bytes"),
    [(None, 3 * 32 * 4), ("NEXTN", 4 * 32 * 4), ("DFLASH", 3 * 32 * 4 + 3 * 2 * 2 * 16 * 4)],
)
def test_memory_per_token(algorithm: str | None, token_bytes: int) -> None:
    """Latent rows of 24 + 8 values per layer (with the MTP layer's), beside a dense draft's K/V."""
    with deepseek(algorithm, max_total_tokens=640, page_size=16) as llm:
        told, step = llm.explain(), llm.engine.executor.step
        pools = [a.pools for a in (step.attention, step.draft_attention) if a is not None]
        held = sum(data.nbytes for pool in pools for data in pool.paged.values())
        pages = told["kv_pages"] + 1  # and the null page
        assert told["kv_bytes_per_token"] == token_bytes
        assert held == pages * 16 * token_bytes
        assert told["kv"] == f"640 tokens, {640 * token_bytes / 2**20:.0f} MiB"
        memory = told["memory_bytes"]
        assert memory["kv_target"] + memory.get("kv_draft", 0) == held
