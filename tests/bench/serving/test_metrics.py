"""Figures from known times."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun_bench.serving.client import Outcome
from forerun_bench.serving.http import RequestFailed
from forerun_bench.serving.load import Load
from forerun_bench.serving.metrics import PERCENTILES, Acceptance, Run, Stats


def outcome(*chunks: tuple[float, int], due: float = 0.0, sent: float = 0.0) -> Outcome:
    """(time, tokens) of every chunk; the answer ends 1 s after the last."""
    return Outcome(
        due=due,
        sent=sent,
        ended=chunks[-1][0] + 1,
        chunk_times=[time for time, _ in chunks],
        chunk_tokens=[tokens for _, tokens in chunks],
        output_tokens=sum(tokens for _, tokens in chunks),
        counted=True,
        prompt_tokens=10,
    )


def failed(kind: str) -> Outcome:
    return Outcome(due=0.0, sent=0.0, ended=9.0, failure=RequestFailed(kind, "why"))


def run(*outcomes: Outcome, rate: float = 2.0, goals: dict[str, float] | None = None) -> Run:
    load = Load(list(outcomes), started=0.0, ended=10.0, peak=2, lags=[0.001] * 99 + [0.2])
    return Run(rate, load, True, goals or {})


FAST = outcome((1.0, 1), (2.0, 4), (4.0, 2))
SLOW = outcome((3.0, 1), (7.0, 1), sent=1.0, due=0.5)


def test_every_latency() -> None:
    measured = run(FAST, SLOW)
    assert measured.values("ttft") == [1.0, 2.0]
    assert measured.values("e2e") == [5.0, 7.0]
    assert measured.values("tpot") == [0.5, 4.0]  # 3 s over 6 tokens
    assert measured.values("chunk_itl") == [1.0, 2.0, 4.0]
    assert measured.values("itl") == [0.25] * 4 + [1.0] * 2 + [4.0]
    assert measured.send_delays == [0.0, 0.5]


def test_the_dictionary_has_sglangs_keys() -> None:
    figures = run(FAST, SLOW, failed("HTTP 429")).as_dict()
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert figures["errors"] == {"HTTP 429": 1}
    assert figures["first_error"] == "HTTP 429: why"
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (20, 9)
    assert figures["request_throughput"] == pytest.approx(0.2)
    assert figures["input_throughput"] == pytest.approx(2.0)
    assert figures["output_throughput"] == pytest.approx(0.9)
    assert figures["concurrency"] == pytest.approx(1.2)
    assert figures["mean_ttft_ms"] == pytest.approx(1500)
    assert figures["median_e2e_latency_ms"] == pytest.approx(6000)
    assert figures["p99_itl_ms"] == pytest.approx(1000 * np.percentile([0.25] * 4 + [1, 1, 4], 99))
    assert figures["client_p99_send_delay_ms"] == pytest.approx(
        1000 * np.percentile([0, 0.5, 0], 99)
    )
    assert figures["total_cached_tokens"] is None
    assert figures["accept_length"] is None


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50))
def test_percentiles_are_numpys(values: list[float]) -> None:
    stats = Stats.of(values)
    assert stats is not None
    assert list(stats.percentiles) == list(PERCENTILES)
    assert list(stats.percentiles.values()) == pytest.approx(np.percentile(values, PERCENTILES))
    assert stats.mean == pytest.approx(np.mean(values))


def test_itl_per_token_is_left_out_where_the_server_does_not_tell() -> None:
    unknown = outcome((1.0, 0), (2.0, 0))
    unknown.output_tokens = 8
    measured = run(FAST, unknown)
    assert measured.values("itl") == []
    assert measured.values("chunk_itl") == [1.0, 2.0, 1.0]
    assert "mean_itl_ms" not in measured.as_dict()
    assert "mean_chunk_itl_ms" in measured.as_dict()


def test_goodput_counts_requests_that_meet_every_goal() -> None:
    goals = {"ttft": 1.0, "tpot": 0.5, "e2e": 5.0}
    assert run(FAST, SLOW, failed("timeout"), goals=goals).good == 1
    for name in goals:
        assert run(FAST, goals={**goals, name: goals[name] - 0.01}).good == 0
    assert run(FAST, SLOW, failed("timeout"), goals=goals).as_dict()["goodput"] == 0.1
    assert run(FAST).good is None
    assert run(outcome((1.0, 1)), goals={"tpot": 0.1}).good == 1  # one token: no TPOT to miss


def test_the_clients_delay_is_the_larger_of_both() -> None:
    measured = run(FAST, SLOW)
    assert measured.client_delay == pytest.approx(np.percentile([0.0, 0.5], 99))
    at_once = run(FAST, SLOW, rate=math.inf)  # all are due at once: only the loop's counts
    assert at_once.client_delay == pytest.approx(np.percentile([0.001] * 99 + [0.2], 99))


def test_nothing_completed() -> None:
    figures = run(failed("timeout"), failed("HTTP 500"), failed("HTTP 500")).as_dict()
    assert list(figures["errors"].items()) == [("HTTP 500", 2), ("timeout", 1)]
    assert figures["request_throughput"] == figures["output_throughput"] == 0
    assert "mean_ttft_ms" not in figures


def test_details_have_an_entry_for_every_request() -> None:
    details = run(FAST, failed("timeout")).details()
    assert {len(values) for values in details.values()} == {2}
    assert details["itls"] == [[1.0, 2.0], []]
    assert details["errors"] == ["", "timeout: why"]


def test_acceptance_is_reported_with_its_source() -> None:
    load = run(FAST).load
    figures = Run(2.0, load, True, {}, Acceptance(3.5, "counters")).as_dict()
    assert (figures["accept_length"], figures["accept_length_source"]) == (3.5, "counters")
