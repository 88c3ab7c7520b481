"""Engines on backends over stand-ins of other libraries' calls: the text of plain decoding."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV2Config

from forerun import LLM
from tests.attention import stand_ins
from tests.engine.test_matrix import GREEDY, SEEDED, hold, params
from tests.engine.test_windows import windowed
from tests.golden_engine import poison_on_release
from tests.models.support import _COMMON, _DENSE, random_hf, save

KINDS = stand_ins.stand_ins()


@pytest.mark.exhaustive
@pytest.mark.covering(0, 2)
@pytest.mark.parametrize(
    ("name", "algorithm", "page", "chunk", "tight"),
    [
        ("fa3-vllm", "DFLASH", 16, 4, True),
        ("fa3-upstream", "NGRAM", 1, 512, False),
        pytest.param("fa3-sgl", None, 16, 4, False, marks=pytest.mark.exhaustive),
        pytest.param("fa3-vllm", "NGRAM", 16, 512, True, marks=pytest.mark.exhaustive),
        pytest.param("fa3-sgl", "DFLASH", 1, 4, False, marks=pytest.mark.exhaustive),
    ],
)
def test_the_text_is_that_of_plain_decoding(
    name: str, algorithm: str | None, page: int, chunk: int, tight: bool
) -> None:
    stand_ins.calls.clear()
    with stand_ins.registered(KINDS[name]) as backend:
        hold(algorithm, page, chunk, 1, tight, attention_backend=backend, device="cpu")
    assert "fwd" in stand_ins.calls


@pytest.mark.exhaustive
def test_windows_whose_pages_are_reused() -> None:
    """What lies behind a window is not there any more."""
    stand_ins.calls.clear()
    with stand_ins.registered(KINDS["fa3-vllm"]) as backend:
        own = {"attention_backend": backend, "device": "cpu"}
        hold("NGRAM", 16, 4, 1, False, **windowed("target", "NGRAM"), **own)
    assert "fwd" in stand_ins.calls


# --- MLA ---------------------------------------------------------------------------------------

DEEPSEEK: dict[str, Any] = {
    **_COMMON,
    **_DENSE,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 128,  # with 64 and 128: what the kernels for prompts are compiled for
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_hf(DeepseekV2Config(**DEEPSEEK)), tmp_path_factory.mktemp("mla") / "model")


@cache
def latent_prompts() -> list[list[int]]:
    """Two prompts with a common prefix of more than a page of 64, and two short ones."""
    draw = random.Random(3)
    stem = [draw.randrange(DEEPSEEK["vocab_size"]) for _ in range(110)]
    return [stem[:104], stem[:81], stem[5:8], stem[9:10]]


def latent_texts(folder: Path, algorithm: str | None = None, **settings: Any) -> list[list[int]]:
    with LLM(
        folder,
        device="cpu",
        dtype="float32",
        speculative_algorithm=algorithm,
        speculative_adaptive=False,
        skip_tokenizer_init=True,
        **settings,
    ) as llm:
        poison_on_release(llm)
        kinds = [params(kind, i) for kind in (GREEDY, SEEDED) for i in range(len(latent_prompts()))]
        cold, warm = (
            [
                o.output_ids
                for o in llm.generate(input_ids=latent_prompts() * 2, sampling_params=kinds)
            ]
            for _ in range(2)
        )
        llm.engine.check()
    assert cold == warm
    return cold


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize(
    ("name", "algorithm", "chunk"),
    [
        ("fa3-vllm", "NGRAM", 48),
        ("flashmla", "NGRAM", 512),
        pytest.param("flashmla", None, 48, marks=pytest.mark.exhaustive),
        pytest.param("fa4", "NGRAM", 48, marks=pytest.mark.exhaustive),
    ],
)
def test_latent(name: str, algorithm: str | None, chunk: int, deepseek: Path) -> None:
    want = latent_texts(deepseek, disable_radix_cache=True)
    stand_ins.calls.clear()
    with stand_ins.registered(KINDS[name]) as backend:
        settings: dict[str, Any] = {"chunked_prefill_size": chunk, "page_size": 64}
        assert latent_texts(deepseek, algorithm, attention_backend=backend, **settings) == want
    called = {"fa3-vllm": {"fwd"}, "fa4": {"cute"}, "flashmla": {"fwd", "get_mla_metadata"}}
    assert called[name].issubset(stand_ins.calls)
