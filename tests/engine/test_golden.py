"""The golden pair: outputs and every step's accept length of the reference implementation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from forerun import LLM
from tests.golden_engine import CASES, golden_llm


@pytest.fixture(scope="module")
def dflash() -> Iterator[LLM]:
    with golden_llm("DFLASH") as llm:
        yield llm
        llm.engine.check()


def params(case: dict[str, Any]) -> dict[str, Any]:
    return {
        "temperature": 0.0,
        "max_new_tokens": case["max_new_tokens"],
        "stop_token_ids": case["stop_token_ids"],
        "ignore_eos": True,
    }


@pytest.mark.parametrize("index", range(len(CASES)))
def test_outputs_and_accept_lengths_equal_the_reference(dflash: LLM, index: int) -> None:
    case = CASES[index]
    out = dflash.generate(input_ids=case["prompt"], sampling_params=params(case))
    assert out.output_ids == case["output"]
    ours, theirs = out.meta_info["spec_accept_lengths"], case["accept"]
    # The reference also counts accepted tokens past the end of the output in its last step.
    assert ours[:-1] == theirs[: max(len(ours) - 1, 0)]
    assert sum(ours) == len(out.output_ids) - 1 <= sum(theirs[: len(ours)])


def test_all_cases_in_one_batch(dflash: LLM) -> None:
    outs = dflash.generate(
        input_ids=[c["prompt"] for c in CASES], sampling_params=[params(c) for c in CASES]
    )
    assert [o.output_ids for o in outs] == [c["output"] for c in CASES]


def test_plain_decoding_gives_the_same_output(dflash: LLM) -> None:
    with golden_llm() as llm:
        outs = llm.generate(
            input_ids=[c["prompt"] for c in CASES], sampling_params=[params(c) for c in CASES]
        )
        assert [o.output_ids for o in outs] == [c["ar"] for c in CASES]


def test_acceptance_with_a_cached_prefix_equals_that_without(dflash: LLM) -> None:
    """Cached pages must include the draft's K/V (vLLM issue 47930)."""
    case = max(CASES, key=lambda c: len(c["prompt"]))
    dflash.engine.flush_cache()
    cold = dflash.generate(input_ids=case["prompt"], sampling_params=params(case))
    warm = dflash.generate(input_ids=case["prompt"], sampling_params=params(case))
    assert cold.meta_info["cached_tokens"] == 0
    assert warm.meta_info["cached_tokens"] >= len(case["prompt"]) - 17
    for key in ("spec_accept_lengths", "spec_correct_drafts_histogram"):
        assert warm.meta_info[key] == cold.meta_info[key]
    assert warm.output_ids == cold.output_ids


def test_meta_info_identities(dflash: LLM) -> None:
    case = CASES[4]
    out = dflash.generate(input_ids=case["prompt"], sampling_params=params(case))
    info = out.meta_info
    histogram = info["spec_correct_drafts_histogram"]
    assert sum(histogram) == info["spec_verify_ct"] == len(info["spec_accept_lengths"])
    assert sum(i * n for i, n in enumerate(histogram)) == info["spec_num_correct_drafts"]
    assert info["spec_num_proposed_drafts"] == 9 * info["spec_verify_ct"]
    rate = info["spec_num_correct_drafts"] / info["spec_num_proposed_drafts"]
    assert info["spec_accept_rate"] == pytest.approx(rate)
    assert info["completion_tokens"] == len(out.output_ids) == 1 + sum(info["spec_accept_lengths"])
    assert info["spec_accept_length"] == info["completion_tokens"] / info["spec_verify_ct"]
