"""Estimates of acceptance rates, and the expected tokens of a step."""

from __future__ import annotations

import random

import pytest

from forerun.scheduler.acceptance_stats import (
    INITIAL_RATE,
    AcceptanceStats,
    expected_tokens,
)


def record_random(
    stats: AcceptanceStats, rates: list[float], steps: int, num_drafts: int, seed: int = 0
) -> None:
    rng = random.Random(seed)
    for _ in range(steps):
        accepted = 0
        while accepted < num_drafts and rng.random() < rates[accepted]:
            accepted += 1
        stats.record(num_drafts, accepted)


def test_estimates_without_observations_are_the_priors() -> None:
    assert AcceptanceStats(3, 16).estimates() == [INITIAL_RATE] * 3
    assert AcceptanceStats(3, 16).estimates([0.1, 0.2, 0.3]) == pytest.approx([0.1, 0.2, 0.3])


def test_estimates_converge_to_the_true_rates() -> None:
    rates = [0.9, 0.5, 0.8, 0.1]
    stats = AcceptanceStats(4, 1000)
    record_random(stats, rates, 3000, 4)
    assert stats.estimates() == pytest.approx(rates, abs=0.06)


def test_positions_never_tested_take_the_estimate_before_them() -> None:
    stats = AcceptanceStats(5, 64)
    for _ in range(40):
        stats.record(5, 0)
    estimates = stats.estimates()
    assert all(c == pytest.approx(estimates[0]) and c < 0.1 for c in estimates)


def test_a_few_observations_outweigh_the_initial_rate() -> None:
    stats = AcceptanceStats(15, 16)
    for accepted in (0, 0, 1, 0, 0):
        stats.record(15, accepted)
    assert expected_tokens(stats.estimates(), [16])[0] < 2.0


def test_old_observations_are_forgotten() -> None:
    stats = AcceptanceStats(3, 16)
    record_random(stats, [0.0] * 3, 200, 3)
    record_random(stats, [1.0] * 3, 40, 3)
    assert min(stats.estimates()) > 0.8


def test_plain_steps_reduce_the_weight_of_observations() -> None:
    fresh, stale = AcceptanceStats(3, 16), AcceptanceStats(3, 16)
    for stats in (fresh, stale):
        record_random(stats, [0.0] * 3, 50, 3)
    for _ in range(300):
        stale.record_plain_step()
    for stats in (fresh, stale):
        stats.record(3, 3)
    assert stale.estimates()[0] > fresh.estimates()[0] + 0.1


def test_full_acceptance_of_narrow_steps_raises_the_estimates_of_later_positions() -> None:
    """Drafts 4 to 15 were rejected once; a step of width 4 does not test them."""
    stats = AcceptanceStats(15, 16)
    record_random(stats, [1.0, 1.0, 1.0, *[0.0] * 12], 100, 15)
    assert stats.estimates()[3] < 0.3
    record_random(stats, [1.0] * 3, 60, 3)
    assert stats.estimates()[3] > 0.6


def test_expected_tokens_of_a_step() -> None:
    assert expected_tokens([0.5, 0.5, 1.0], [1, 2, 3, 4]) == pytest.approx((1.0, 1.5, 1.75, 2.0))
