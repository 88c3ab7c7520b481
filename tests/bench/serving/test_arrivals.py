"""The arrival process has the rate and the burstiness that were asked for."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from forerun_bench.serving.arrivals import arrival_times

RATES = st.floats(0.01, 1e4)
SHAPES = st.floats(0.05, 20)


@given(st.integers(1, 200), RATES, SHAPES, st.integers(0, 2**32 - 1))
def test_times_start_at_zero_and_never_go_back(
    count: int, rate: float, burstiness: float, seed: int
) -> None:
    times = arrival_times(count, rate, burstiness, seed)
    assert len(times) == count
    assert times[0] == 0
    assert all(a <= b < math.inf for a, b in pairwise(times))
    assert times == arrival_times(count, rate, burstiness, seed)
    if count > 1:
        assert times != arrival_times(count, rate, burstiness, seed + 1)


@given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 1000))
def test_a_higher_rate_is_the_same_process_faster(rate: int, factor: int, seed: int) -> None:
    slow, fast = arrival_times(50, rate, 1.0, seed), arrival_times(50, rate * factor, 1.0, seed)
    assert np.asarray(fast) * factor == pytest.approx(np.asarray(slow))


@pytest.mark.parametrize("rate", [0.5, 40.0])
@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_distribution(rate: float, burstiness: float) -> None:
    """Kolmogorov-Smirnov, and the standard error of the mean. Seeds are fixed: it cannot flake."""
    gaps = np.diff(arrival_times(20_001, rate, burstiness, seed=3))
    expected = stats.gamma(burstiness, scale=1 / (rate * burstiness))
    assert stats.kstest(gaps, expected.cdf).pvalue > 1e-3
    error = 1 / (rate * math.sqrt(burstiness * len(gaps)))
    assert abs(gaps.mean() - 1 / rate) < 4 * error
    other = stats.gamma(2 * burstiness, scale=1 / (rate * 2 * burstiness))
    assert stats.kstest(gaps, other.cdf).pvalue < 1e-6  # the test can tell


def test_gaps_are_independent() -> None:
    gaps = np.diff(arrival_times(20_001, 3.0, 1.0, seed=4))
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 4 / math.sqrt(len(gaps))


def test_without_a_rate_all_come_at_once() -> None:
    assert arrival_times(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]
