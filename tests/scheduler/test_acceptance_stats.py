"""Running means of acceptance, and the tokens expected from them."""

from __future__ import annotations

import random

import pytest

from forerun.scheduler.acceptance_stats import PRIOR, AcceptanceStats, tokens


def feed(
    rates: AcceptanceStats, chance: list[float], steps: int, drafts: int, seed: int = 0
) -> None:
    rng = random.Random(seed)
    for _ in range(steps):
        right = 0
        while right < drafts and rng.random() < chance[right]:
            right += 1
        rates.learn(drafts, right)


def test_nothing_known_is_tried() -> None:
    assert AcceptanceStats(3, 16).estimates() == [PRIOR] * 3
    assert AcceptanceStats(3, 16).estimates([0.1, 0.2, 0.3]) == pytest.approx([0.1, 0.2, 0.3])


def test_means_come_near_the_truth() -> None:
    chance = [0.9, 0.5, 0.8, 0.1]
    rates = AcceptanceStats(4, 1000)
    feed(rates, chance, 3000, 4)
    assert rates.estimates() == pytest.approx(chance, abs=0.06)


def test_what_was_never_reached_is_like_what_comes_before() -> None:
    rates = AcceptanceStats(5, 64)
    for _ in range(40):
        rates.learn(5, 0)
    estimates = rates.estimates()
    assert all(c == pytest.approx(estimates[0]) and c < 0.1 for c in estimates)


def test_a_few_observations_outweigh_the_first_guess() -> None:
    rates = AcceptanceStats(15, 16)
    for accepted in (0, 0, 1, 0, 0):
        rates.learn(15, accepted)
    assert tokens(rates.estimates(), [16])[0] < 2.0


def test_old_texts_are_forgotten() -> None:
    rates = AcceptanceStats(3, 16)
    feed(rates, [0.0] * 3, 200, 3)
    feed(rates, [1.0] * 3, 40, 3)
    assert min(rates.estimates()) > 0.8


def test_the_longer_ago_the_sooner_is_it_outweighed() -> None:
    fresh, stale = AcceptanceStats(3, 16), AcceptanceStats(3, 16)
    for rates in (fresh, stale):
        feed(rates, [0.0] * 3, 50, 3)
    for _ in range(300):
        stale.wait()
    for rates in (fresh, stale):
        rates.learn(3, 3)
    assert stale.estimates()[0] > fresh.estimates()[0] + 0.1


def test_drafts_behind_a_narrow_step_are_like_all_before_them() -> None:
    """They were wrong once; now a step of 4 rows cannot tell, and all of its drafts are right."""
    rates = AcceptanceStats(15, 16)
    feed(rates, [1.0, 1.0, 1.0, *[0.0] * 12], 100, 15)
    assert rates.estimates()[3] < 0.3
    feed(rates, [1.0] * 3, 60, 3)
    assert rates.estimates()[3] > 0.6


def test_tokens_of_a_step() -> None:
    assert tokens([0.5, 0.5, 1.0], [1, 2, 3, 4]) == pytest.approx((1.0, 1.5, 1.75, 2.0))
