"""Calibration of confidences, against the streams that it is to describe."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.plan import CONFIDENCE_BINS, ConfidenceCounts
from forerun.scheduler.calibration import Calibration, reliability
from tests.property_examples import examples


def stream(slope: float, intercept: float, count: int, seed: int = 0) -> list[list[float]]:
    """Bins of drafts whose acceptance follows a logistic of their confidence."""
    rng = random.Random(seed)
    bins = [[0.0, 0.0, 0.0] for _ in range(CONFIDENCE_BINS)]
    for _ in range(count):
        confidence = rng.uniform(0.02, 0.98)
        x = slope * math.log(confidence / (1 - confidence)) + intercept
        row = bins[min(int(confidence * CONFIDENCE_BINS), CONFIDENCE_BINS - 1)]
        row[0] += 1
        row[1] += rng.random() < 1 / (1 + math.exp(-x))
        row[2] += confidence
    return bins


@pytest.mark.parametrize(("slope", "intercept"), [(1.0, 0.0), (0.5, 0.8), (1.6, -1.0)])
def test_a_stream_is_described(slope: float, intercept: float) -> None:
    fitted = Calibration.fit(stream(slope, intercept, 60_000))
    assert fitted.slope == pytest.approx(slope, abs=0.12)
    assert fitted.intercept == pytest.approx(intercept, abs=0.08)


def test_few_drafts_change_little() -> None:
    """An overconfident head, of which three drafts are known."""
    few = Calibration.fit([[3.0, 0.0, 2.7]])
    assert 0.6 < few(0.9) < 0.9
    assert Calibration.fit([]) == Calibration()
    assert Calibration()(0.3) == pytest.approx(0.3)


@examples(60)
@given(
    st.lists(
        st.tuples(st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 1)),
        min_size=1,
        max_size=CONFIDENCE_BINS,
    )
)
def test_any_counts_give_probabilities(rows: list[tuple[int, float, float]]) -> None:
    bins = [[float(n), math.floor(rate * n), n * mean] for n, rate, mean in rows]
    fitted = Calibration.fit(bins)
    for confidence in (0.0, 0.2, 0.5, 0.9, 1.0):
        assert 0.0 <= fitted(confidence) <= 1.0


def test_reliability_of_an_overconfident_head() -> None:
    counts = ConfidenceCounts(stream(0.5, -1.0, 20_000), stream(1.0, 0.0, 0), stream(1.0, 0.0, 0))
    (mode, found), *more = reliability(counts).items()
    assert mode == "greedy" and not more and found["drafts"] == 20_000
    assert found["expected_calibration_error"] > 0.1
    assert found["expected_calibration_error_calibrated"] < 0.02
    means = [row["mean_confidence"] for row in found["bins"]]
    assert means == sorted(means)
