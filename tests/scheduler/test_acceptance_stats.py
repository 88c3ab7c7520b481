"""Estimates of acceptance rates, and the expected tokens of a step."""

from __future__ import annotations

import random

import pytest

from forerun.scheduler.acceptance_stats import (
    INITIAL_RATE,
    AcceptanceStats,
    BestFirstTree,
    Chain,
)


def record(stats: AcceptanceStats, num_drafts: int, accepted: int) -> None:
    chain = Chain((1, num_drafts + 1))
    stats.record(*chain.observed(num_drafts, range(1, accepted + 1)))


def record_random(
    stats: AcceptanceStats, rates: list[float], steps: int, num_drafts: int, seed: int = 0
) -> None:
    rng = random.Random(seed)
    for _ in range(steps):
        accepted = 0
        while accepted < num_drafts and rng.random() < rates[accepted]:
            accepted += 1
        record(stats, num_drafts, accepted)


def test_estimates_without_observations_are_the_priors() -> None:
    stats, priors = AcceptanceStats(Chain((1, 4)), 16), [0.1, 0.2, 0.3]
    assert stats.estimates() == [INITIAL_RATE] * 3
    assert stats.estimates(priors) == pytest.approx(priors)


def test_estimates_converge_to_the_true_rates() -> None:
    rates = [0.9, 0.5, 0.8, 0.1]
    stats = AcceptanceStats(Chain((1, 5)), 1000)
    record_random(stats, rates, 3000, 4)
    assert stats.estimates() == pytest.approx(rates, abs=0.06)


def test_positions_never_tested_take_the_estimate_before_them() -> None:
    stats = AcceptanceStats(Chain((1, 6)), 64)
    for _ in range(40):
        record(stats, 5, 0)
    estimates = stats.estimates()
    assert all(c == pytest.approx(estimates[0]) and c < 0.1 for c in estimates)


def test_a_few_observations_outweigh_the_initial_rate() -> None:
    stats = AcceptanceStats(Chain((1, 16)), 16)
    for accepted in (0, 0, 1, 0, 0):
        record(stats, 15, accepted)
    assert Chain((1, 16)).expected_tokens(stats.estimates())[1] < 2.0


def test_old_observations_are_forgotten() -> None:
    stats = AcceptanceStats(Chain((1, 4)), 16)
    record_random(stats, [0.0] * 3, 200, 3)
    record_random(stats, [1.0] * 3, 40, 3)
    assert min(stats.estimates()) > 0.8


def test_plain_steps_reduce_the_weight_of_observations() -> None:
    fresh, stale = AcceptanceStats(Chain((1, 4)), 16), AcceptanceStats(Chain((1, 4)), 16)
    for stats in (fresh, stale):
        record_random(stats, [0.0] * 3, 50, 3)
    for _ in range(300):
        stale.record_plain_step()
    for stats in (fresh, stale):
        record(stats, 3, 3)
    assert stale.estimates()[0] > fresh.estimates()[0] + 0.1


def test_full_acceptance_of_narrow_steps_raises_the_estimates_of_later_positions() -> None:
    """Drafts 4 to 15 were rejected once; a step of width 4 does not test them."""
    stats = AcceptanceStats(Chain((1, 16)), 16)
    record_random(stats, [1.0, 1.0, 1.0, *[0.0] * 12], 100, 15)
    assert stats.estimates()[3] < 0.3
    record_random(stats, [1.0] * 3, 60, 3)
    assert stats.estimates()[3] > 0.6


def test_expected_tokens_of_a_step() -> None:
    tokens = Chain((1, 2, 3, 4)).expected_tokens([0.5, 0.5, 1.0])
    assert tokens == pytest.approx((1.0, 1.5, 1.75, 2.0))


WIDTHS = (1, 2, 4, 8, 33)


def test_a_tree_tests_all_smaller_ones() -> None:
    """The rates of what each width adds; wider ones than the step's are not tested."""
    tree = BestFirstTree(WIDTHS, 7)
    values, tested = tree.observed(7, [1, 2, 3, 6])
    assert (values, tested) == ([1.0, 2.0, 1.0], 3)
    assert tree.observed(32, [2, 3, 9, 32])[0][:3] == [0.0, 2.0, 0.0]
    assert tree.expected_tokens(values) == pytest.approx((1, 2, 4, 5))


def test_mean_observations_are_the_expected_tokens() -> None:
    rng, tree = random.Random(0), BestFirstTree(WIDTHS, 32)
    stats, tokens = AcceptanceStats(tree, 1e9), [0] * len(WIDTHS)
    for _ in range(20_000):
        nodes = sorted(rng.sample(range(1, 33), rng.randint(0, 6)))
        stats.record(*tree.observed(32, nodes))
        tokens = [
            total + 1 + sum(node < width for node in nodes)
            for total, width in zip(tokens, WIDTHS, strict=True)
        ]
    want = [total / 20_000 for total in tokens]
    assert tree.expected_tokens(stats.estimates()) == pytest.approx(want, rel=1e-3)


def test_expected_tokens_of_a_tree_are_limited_by_its_depth() -> None:
    assert BestFirstTree(WIDTHS, 3).expected_tokens([1.0, 1.0, 1.0, 1.0])[-1] == 4.0


def test_untested_trees_promise_as_much_per_doubling_as_the_last_tested_one() -> None:
    """Twice as much where all nodes are accepted: that may be a chain without an end."""
    tree = BestFirstTree((1, 2, 4, 8, 16), 8)
    stats, chain = AcceptanceStats(tree, 32), AcceptanceStats(tree, 32)
    for _ in range(4000):
        stats.record(*tree.observed(7, [1]))
        chain.record(*tree.observed(3, [1, 2, 3]))
    estimates = stats.estimates()
    assert estimates == pytest.approx([1.0, 0.0, 0.0, 0.0], abs=0.02)
    assert chain.estimates() == pytest.approx([1.0, 2.0, 4.0, 8.0], rel=0.02)
