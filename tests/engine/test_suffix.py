"""SUFFIX in the engine: what it learns from other requests, what it forgets, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from forerun import LLM
from forerun.core.errors import ConfigError, RequestError
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


Answers = list[tuple[list[int], list[int]]]  # tokens, and how many each step committed


def answers(llm: LLM, tenants: list[int]) -> Answers:
    """Those of a batch, one request a tenant; all ask the same."""
    prompts = [PROMPT] * len(tenants)
    out = llm.generate(input_ids=prompts, sampling_params=GREEDY, tenant=tenants)
    return [(each.output_ids, each.meta_info["spec_accept_lengths"]) for each in out]


@pytest.mark.exhaustive
@pytest.mark.covering(0)
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
def test_a_tenant_is_as_fast_as_if_it_were_alone(overlap_depth: int) -> None:
    """Whoever else asked the same, before it or in the same batch."""
    settings = {"overlap_depth": overlap_depth, "disable_radix_cache": True}
    apart = {**settings, "speculative_suffix_per_key": True}
    with golden_llm(**settings) as llm:
        text = answers(llm, [0])[0][0]
    alone = []
    for tenant in (0, 7):
        with golden_llm("SUFFIX", **apart) as llm:
            alone.append([answers(llm, [tenant])[0] for _ in range(3)])
    first, second, third = alone[0]
    assert alone[0] == alone[1] and len(first[1]) > 3 * len(second[1])
    with golden_llm("SUFFIX", **apart) as llm:
        found = [answers(llm, tenants) for tenants in ([1], [2, 1], [0, 2, 2**31 - 1], [2, 0, 1])]
    assert found == [[first], [first, second], [first, second, first], [third, second, third]]
    assert {tuple(each[0]) for batch in found for each in batch} == {tuple(text)}


def test_by_default_tenants_share_their_texts() -> None:
    with golden_llm("SUFFIX", disable_radix_cache=True) as llm:
        first, second = answers(llm, [1])[0], answers(llm, [2])[0]
    assert first[0] == second[0] and len(first[1]) > 3 * len(second[1])


def test_tenants_are_kept_apart_in_joined_drafts() -> None:
    with golden_llm("DFLASH,SUFFIX", speculative_suffix_per_key=True) as llm:
        first, second, other = (answers(llm, [tenant])[0] for tenant in (1, 1, 2))
    assert first == other and first[0] == second[0] and len(second[1]) < len(first[1])


@pytest.mark.parametrize(
    ("tenant", "message"),
    [
        (-1, "tenant must be in \\[0, 2147483647\\], got -1"),
        (2**31, "tenant must be in"),
        ("alice", "tenant must be an integer"),
    ],
    ids=str,
)
def test_a_tenant_is_a_number(tenant: object, message: str) -> None:
    with golden_llm() as llm, pytest.raises(RequestError, match=message):
        llm.generate(input_ids=PROMPT, tenant=tenant)


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
        ("DFLASH,", "names one algorithm and a comma"),
        ("DFLASH,NONE", "one of the two drafts nothing"),
    ],
)
def test_what_cannot_be_joined_is_refused(algorithm: str, message: str) -> None:
    draft = {"speculative_draft_model_path": str(GOLDEN / "draft")}
    with pytest.raises(ConfigError, match=message):
        golden_llm(algorithm, **draft)
