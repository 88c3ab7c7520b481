"""SUFFIX in the engine: what it learns from other requests, what it forgets, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from forerun import LLM
from forerun.core.errors import ConfigError
from tests.golden_engine import CASES, GOLDEN, golden_llm

PROMPT, OTHER = CASES[0]["prompt"], CASES[1]["prompt"]
GREEDY = {"temperature": 0.0, "max_new_tokens": 60, "ignore_eos": True}


def tokens_per_step(llm: LLM, prompt: list[int]) -> float:
    out = llm.generate(input_ids=prompt, sampling_params=GREEDY)
    return float(out.meta_info["spec_accept_length"])


@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
def test_an_answer_that_comes_again_takes_few_steps(overlap_depth: int) -> None:
    with golden_llm("SUFFIX", overlap_depth=overlap_depth, disable_radix_cache=True) as llm:
        first = tokens_per_step(llm, PROMPT)
        assert tokens_per_step(llm, PROMPT) > 12 > first


def test_without_a_corpus_only_the_own_text_is_known() -> None:
    with golden_llm("SUFFIX", speculative_suffix_max_cached_requests=0) as llm:
        assert tokens_per_step(llm, PROMPT) == tokens_per_step(llm, PROMPT)


def test_the_oldest_texts_make_room() -> None:
    """With as many texts as requests that run, other outputs push the first one out."""
    small = {"speculative_suffix_max_cached_requests": 1, "max_running_requests": 1}
    with golden_llm("SUFFIX", **small) as llm:
        first = tokens_per_step(llm, PROMPT)
        assert tokens_per_step(llm, PROMPT) > first
        tokens_per_step(llm, OTHER)
        assert tokens_per_step(llm, PROMPT) == first


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculative_suffix_max_tree_depth": 0}, "max_tree_depth must be between 1 and 64"),
        ({"speculative_suffix_max_tree_depth": 65}, "max_tree_depth must be between 1 and 64"),
        ({"speculative_suffix_max_cached_requests": -1}, "must be between 0 and 1048576, got -1"),
        ({"speculative_suffix_max_spec_factor": -0.5}, "must be between 0 and 256, got -0.5"),
        ({"speculative_suffix_min_token_prob": 1.5}, "must be between 0 and 1, got 1.5"),
        (
            {"speculative_suffix_min_token_prob": float("nan")},
            "min_token_prob must be finite, got nan",
        ),
        ({"speculative_num_draft_tokens": 1}, "must be between 2 and 128, got 1"),
        ({"speculative_draft_model_path": "x"}, "drop speculative_draft_model_path"),
    ],
    ids=str,
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        golden_llm("SUFFIX", **settings)


def test_two_algorithms_take_the_better_draft() -> None:
    """The first time no fewer tokens a step than the draft model alone; then what came before."""
    with golden_llm("DFLASH") as llm:
        alone = tokens_per_step(llm, PROMPT)
    with golden_llm("DFLASH,SUFFIX") as llm:
        first, again = tokens_per_step(llm, PROMPT), tokens_per_step(llm, PROMPT)
    assert first > 0.9 * alone
    assert again > 2 * alone


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("DFLASH,NOTHING", "Unknown speculative_algorithm 'NOTHING'"),
        ("SUFFIX,DFLASH", "drop speculative_draft_model_path"),
        ("DDTREE,SUFFIX", "choose one without trees"),
    ],
)
def test_what_cannot_be_joined_is_refused(algorithm: str, message: str) -> None:
    draft = {"speculative_draft_model_path": str(GOLDEN / "draft")}
    with pytest.raises(ConfigError, match=message):
        golden_llm(algorithm, **draft)
