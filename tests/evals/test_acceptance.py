"""The tally of accepted drafts, against a brute-force count over simulated steps."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.evals.acceptance import Acceptance

DRAFTS = 7  # offered by every step


def meta_info(accepted: list[int]) -> dict[str, Any]:
    """Of a request whose i-th verify step accepted `accepted[i]` drafts, as `LLM` reports it."""
    return {
        "completion_tokens": 1 + sum(a + 1 for a in accepted),
        "spec_verify_ct": len(accepted),
        "spec_num_proposed_drafts": DRAFTS * len(accepted),
        "spec_correct_drafts_histogram": [
            accepted.count(n) for n in range(max(accepted, default=-1) + 1)
        ],
    }


runs = st.lists(st.lists(st.integers(0, DRAFTS), max_size=12), min_size=1, max_size=5)


@given(runs)
def test_total_is_the_count_over_all_steps(requests: list[list[int]]) -> None:
    total = Acceptance.total(Acceptance.of(meta_info(accepted)) for accepted in requests)
    steps = [a for accepted in requests for a in accepted]
    assert total.verify_ct == sum(total.histogram) == len(steps)
    assert total.correct == sum(steps)
    assert total.completion_tokens == len(requests) + sum(a + 1 for a in steps)
    if steps:
        assert total.accept_length == total.completion_tokens / len(steps)
        assert total.accept_rate == sum(steps) / (DRAFTS * len(steps))
        expected = [sum(a >= k for a in steps) / len(steps) for k in range(1, DRAFTS + 1)]
        assert total.per_position == pytest.approx(expected)


@given(runs)
def test_accepted_drafts_a_step_is_the_sum_over_positions(requests: list[list[int]]) -> None:
    total = Acceptance.total(Acceptance.of(meta_info(accepted)) for accepted in requests)
    if total.verify_ct:
        assert sum(total.per_position) == pytest.approx(total.correct / total.verify_ct)
        assert total.per_position == sorted(total.per_position, reverse=True)


def test_nothing_drafted_has_no_rates() -> None:
    none = Acceptance.total([])
    assert none.accept_length is None
    assert none.accept_rate is None
    assert none.per_position == []
    plain = Acceptance.of(
        {
            "completion_tokens": 4,
            "spec_verify_ct": 3,
            "spec_num_proposed_drafts": 0,
            "spec_correct_drafts_histogram": [3],
        }
    )
    assert plain.accept_rate is None
    assert plain.per_position == []
