"""The width of a step: what pays, from what was seen."""

from __future__ import annotations

import random

import pytest

from forerun.core.request import Request
from forerun.core.sampling_params import SamplingParams
from forerun.scheduler.width import AdaptiveWidth, FixedWidth, ladder

WIDTHS = (1, 4, 8, 16)
# A device on which rows are nearly free for few requests and cost in full for many.
COSTS = {b: [1.0 + b * w / 64 for w in WIDTHS] for b in (1, 2, 4, 8, 16, 32, 64, 128)}


def request(**params: object) -> Request:
    return Request("r", (1,), SamplingParams(max_new_tokens=10**6, **params), 0, frozenset())


def speed(policy: AdaptiveWidth, batch: int, rate: float, steps: int, seed: int = 0) -> float:
    """Tokens a second when every draft is right with probability `rate`, given those before."""
    rng, requests = random.Random(seed), [request() for _ in range(batch)]
    tokens = seconds = 0.0
    for _ in range(steps):
        width = policy.choose(requests)
        seconds += COSTS[batch][policy.widths.index(width)]
        for r in requests:
            right = 0
            while right < width - 1 and rng.random() < rate:
                right += 1
            policy.learn(r, width - 1, right)
            tokens += right + 1
    return tokens / seconds


@pytest.mark.parametrize(
    ("full", "flexible", "want"),
    [
        (1, True, (1,)),
        (2, True, (1, 2)),
        (16, True, (1, 4, 8, 16)),
        (16, False, (1, 16)),
        (10, True, (1, 4, 10)),
        (33, True, (1, 4, 8, 16, 33)),
    ],
)
def test_ladder(full: int, flexible: bool, want: tuple[int, ...]) -> None:
    assert ladder(full, flexible) == want


@pytest.mark.parametrize("rate", [0.02, 0.2, 0.6, 0.85, 0.97])
@pytest.mark.parametrize("batch", [1, 8, 32, 128])
def test_no_fixed_width_is_much_faster(batch: int, rate: float) -> None:
    costs = COSTS[batch]
    best = max(sum(rate**k for k in range(w)) / c for w, c in zip(WIDTHS, costs, strict=True))
    assert speed(AdaptiveWidth(WIDTHS, COSTS), batch, rate, 3000 // batch + 200) > 0.95 * best


def test_hopeless_drafts_cost_next_to_nothing() -> None:
    policy = AdaptiveWidth(WIDTHS, COSTS)
    speed(policy, 32, 0.0, 100)
    policy.chosen.clear()
    assert speed(policy, 32, 0.0, 2000) > 0.98 * 32 / COSTS[32][0]
    assert 0 < policy.chosen[4] < 100  # it still looks
    assert policy.chosen[8] == policy.chosen[16] == 0


def test_it_comes_back_when_the_text_becomes_easy() -> None:
    policy = AdaptiveWidth(WIDTHS, COSTS)
    requests = [request()]
    for _ in range(300):
        policy.learn(requests[0], policy.choose(requests) - 1, 0)
    policy.chosen.clear()
    for _ in range(3000):
        width = policy.choose(requests)
        policy.learn(requests[0], width - 1, width - 1)
    assert policy.chosen[16] > 2000


def test_a_measured_cost_is_corrected_while_running() -> None:
    policy = AdaptiveWidth(WIDTHS, COSTS)
    for _ in range(200):
        policy.timed(8, 16, 30.0)
        policy.timed(6, 4, 3.0)  # between the measured 4 and 8
    assert policy.costs(8)[3] == pytest.approx(30.0, rel=0.01)
    assert policy.costs(6)[1] == pytest.approx(3.0, rel=0.01)


def test_one_pause_does_not_look_like_a_dear_step() -> None:
    policy = AdaptiveWidth(WIDTHS, COSTS)
    policy.timed(8, 16, 1000.0)
    assert policy.costs(8)[3] < 1.2 * COSTS[8][3]


def test_costs_beyond_the_largest_are_in_proportion() -> None:
    policy = AdaptiveWidth(WIDTHS, {4: [1.0, 2.0, 3.0, 4.0]})
    assert policy.costs(8) == [2.0, 4.0, 6.0, 8.0]
    assert policy.costs(2) == [1.0, 2.0, 3.0, 4.0]


def test_requests_limit_the_width() -> None:
    fixed = FixedWidth(WIDTHS)
    assert fixed.choose([request()]) == 16
    assert fixed.choose([request(speculative=False)]) == 1
    assert fixed.choose([request(speculative=False), request(max_draft_tokens=2)]) == 4
    assert fixed.choose([request(max_draft_tokens=0)]) == 1
    adaptive = AdaptiveWidth(WIDTHS, {1: [1.0, 1.0, 1.0, 1.0]})
    assert adaptive.choose([request(max_draft_tokens=5)]) <= 8
    assert adaptive.choose([request(speculative=False)]) == 1


def test_the_end_of_a_request_is_near() -> None:
    adaptive = AdaptiveWidth(WIDTHS, {1: [1.0, 1.1, 1.2, 1.3]})
    short = Request("r", (1,), SamplingParams(max_new_tokens=2), 0, frozenset())
    assert adaptive.choose([short]) == 4
