"""The width of a step: what pays, from what was seen."""

from __future__ import annotations

import random

import pytest

from forerun.core.request import Request
from forerun.core.sampling_params import SamplingParams
from forerun.scheduler.adaptive_width import AdaptiveWidth, FixedWidth, VerifyOutcome, verify_widths

WIDTHS = (1, 4, 8, 16)
# A device on which rows are nearly free for few requests and cost in full for many.
COSTS = {b: [1.0 + b * w / 64 for w in WIDTHS] for b in (1, 2, 4, 8, 16, 32, 64, 128)}


def request(**params: object) -> Request:
    return Request("r", (1,), SamplingParams(max_new_tokens=10**6, **params), 0, frozenset())


def drawn_speed(policy: AdaptiveWidth, batch: int, rate: float, steps: int, seed: int = 0) -> float:
    """Tokens a second when every draft is right with probability `rate`, given those before."""
    rng, requests = random.Random(seed), [request() for _ in range(batch)]
    tokens = seconds = 0.0
    for _ in range(steps):
        width = policy.choose(requests)
        seconds += COSTS[batch][policy.widths.index(width)]
        outcomes = []
        for r in requests:
            right = 0
            while right < width - 1 and rng.random() < rate:
                right += 1
            outcomes.append(VerifyOutcome(r, width - 1, right))
            tokens += right + 1
        policy.learn(outcomes)
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
    assert verify_widths(full, flexible) == want


@pytest.mark.parametrize("rate", [0.02, 0.2, 0.6, 0.85, 0.97])
@pytest.mark.parametrize("batch", [1, 8, 32, 128])
def test_no_fixed_width_is_much_faster(batch: int, rate: float) -> None:
    costs = COSTS[batch]
    best = max(sum(rate**k for k in range(w)) / c for w, c in zip(WIDTHS, costs, strict=True))
    assert drawn_speed(AdaptiveWidth(WIDTHS, COSTS), batch, rate, 3000 // batch + 200) > 0.95 * best


# Milliseconds on one H200, Qwen3-8B shapes and a draft of 5 layers: what was measured at start
# (plain steps of small batches came out too dear), what steps took, and steps without drafts.
SEEN = {
    1: [4.340, 5.095, 5.217, 5.266],
    4: [4.579, 5.290, 5.650, 5.800],
    16: [4.359, 6.315, 7.260, 8.471],
    32: [4.714, 7.990, 10.37, 15.21],
    64: [5.193, 12.28, 18.27, 30.52],
    128: [6.665, 21.86, 35.45, 65.43],
}
TRUE = {
    1: [4.081, 5.095, 5.217, 5.263],
    4: [4.197, 5.290, 5.650, 5.810],
    16: [4.377, 6.315, 7.260, 9.740],
    32: [4.752, 7.990, 10.37, 16.67],
    64: [5.224, 12.28, 18.27, 31.70],
    128: [6.564, 21.86, 35.45, 62.10],
}
PLAIN = {1: 4.065, 4: 4.180, 16: 4.360, 32: 4.733, 64: 5.203, 128: 6.534}


def generate(
    policy: AdaptiveWidth, batch: int, mean: float, tokens: int, pauses: bool = False
) -> float:
    """Tokens a millisecond until the last request has its `tokens`. Lengths are forced to a mean,
    requests out of step with each other; results come a step late. `pauses`: now and then the
    machine seems to stand still for 60 ms; they do not count."""
    params = SamplingParams(max_new_tokens=tokens)
    requests = [Request("r", (1,), params, 0, frozenset()) for _ in range(batch)]
    have, late, ms, step = [1] * batch, [], 0.0, 0
    while min(have) < tokens:
        width = policy.choose(requests)
        taken = TRUE[batch][WIDTHS.index(width)]
        at = range(step, step + batch)
        new = [min(int((i + 1) * mean + 1e-6) - int(i * mean + 1e-6), width) for i in at]
        late.append(
            [VerifyOutcome(r, width - 1, n - 1) for r, n in zip(requests, new, strict=True)]
        )
        if len(late) > 1:
            policy.learn(late.pop(0))
        policy.timed(batch, width, (60.0 if pauses and step % 19 == 11 else taken) / 1000)
        have = [h + n for h, n in zip(have, new, strict=True)]
        ms, step = ms + taken, step + 1
    return (sum(have) - batch) / ms


@pytest.mark.parametrize("pauses", [False, True])
def test_no_slower_than_the_better_of_plain_and_full(pauses: bool) -> None:
    """One policy all the way, as in `forerun bench adaptive`: what it learnt of another length it
    may unlearn in a first run."""
    policy = AdaptiveWidth(WIDTHS, {b: [ms / 1000 for ms in row] for b, row in SEEN.items()})
    for batch in sorted(SEEN):
        for mean in (1.2, 3.0, 6.5):
            generate(policy, batch, mean, 128, pauses)
            policy.chosen.clear()
            best = max(batch / PLAIN[batch], batch * mean / TRUE[batch][3])
            speed = sum(generate(policy, batch, mean, 128, pauses) for _ in range(2)) / 2
            assert speed > 0.98 * best, (batch, mean, policy.chosen)


def test_hopeless_drafts_cost_next_to_nothing() -> None:
    policy = AdaptiveWidth(WIDTHS, COSTS)
    drawn_speed(policy, 32, 0.0, 100)
    policy.chosen.clear()
    assert drawn_speed(policy, 32, 0.0, 2000) > 0.98 * 32 / COSTS[32][0]
    assert 0 < policy.chosen[4] < 100  # it still looks
    assert policy.chosen[8] == policy.chosen[16] == 0


def test_it_comes_back_when_the_text_becomes_easy() -> None:
    policy = AdaptiveWidth(WIDTHS, COSTS)
    requests = [request()]
    for _ in range(300):
        policy.learn([VerifyOutcome(requests[0], policy.choose(requests) - 1, 0)])
    policy.chosen.clear()
    for _ in range(3000):
        width = policy.choose(requests)
        policy.learn([VerifyOutcome(requests[0], width - 1, width - 1)])
    assert policy.chosen[16] > 2000


def test_a_text_that_begins_hard_is_drafted_soon_after() -> None:
    """40 tokens of which none is foreseen, then all are; texts like it came before."""
    costs = {1: [7.0, 12.0, 13.4, 15.6]}  # a CPU, milliseconds
    policy = AdaptiveWidth(WIDTHS, costs)
    for _ in range(5):
        policy.chosen.clear()
        r, at = request(), 0
        while at < 160:
            width = policy.choose([r])
            right = width - 1 if at >= 40 else 0
            policy.learn([VerifyOutcome(r, width - 1, right)])
            at += right + 1
    assert policy.chosen[1] < 40 + 25


def test_a_measured_cost_is_corrected_while_running() -> None:
    policy = AdaptiveWidth(WIDTHS, COSTS)
    for _ in range(200):
        policy.timed(8, 16, 30.0)
        policy.timed(6, 4, 3.0)  # between the measured 4 and 8
    assert policy.costs(8)[3] == pytest.approx(30.0, rel=0.01)
    assert policy.costs(6)[1] == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize("wrong", range(4))
def test_a_pause_while_measuring_is_overcome(wrong: int) -> None:
    """All drafts are right and rows are nearly free, but one width was measured as very dear."""
    costs = {1: [1.0, 1.1, 1.2, 1.3]}
    costs[1][wrong] = 300.0
    policy, requests = AdaptiveWidth(WIDTHS, costs), [request()]
    for _ in range(500):
        width = policy.choose(requests)
        policy.learn([VerifyOutcome(requests[0], width - 1, width - 1)])
        policy.timed(1, width, [1.0, 1.1, 1.2, 1.3][WIDTHS.index(width)])
    policy.chosen.clear()
    for _ in range(100):
        policy.learn([VerifyOutcome(requests[0], policy.choose(requests) - 1, 15)])
    assert policy.chosen[16] + policy.chosen[8] == 100


def test_one_pause_does_not_look_like_a_dear_step() -> None:
    policy = AdaptiveWidth(WIDTHS, COSTS)
    for _ in range(5):
        policy.timed(8, 16, 1000.0)
        policy.timed(8, 16, COSTS[8][3])
    assert policy.costs(8)[3] == COSTS[8][3]


def test_a_cost_that_was_far_too_low_is_put_right_whatever_runs_between() -> None:
    policy = AdaptiveWidth(WIDTHS, COSTS)
    for _ in range(200):
        policy.timed(8, 4, 3 * COSTS[8][1])
        policy.timed(16, 4, COSTS[16][1])
        policy.timed(8, 1, COSTS[8][0])
    assert policy.costs(8)[1] == pytest.approx(3 * COSTS[8][1], rel=0.01)
    assert policy.costs(16)[1] == COSTS[16][1]


def test_costs_are_means_of_steps_that_vary() -> None:
    """Among plain steps every 16th is dearer, since it tells the draft what it missed."""
    policy, rng = AdaptiveWidth(WIDTHS, COSTS), random.Random(0)
    found = []
    for step in range(3000):
        policy.timed(8, 1, COSTS[8][0] * rng.gauss(1.2 if step % 16 == 0 else 1.0, 0.01))
        found.append(policy.costs(8)[0])
    mean = COSTS[8][0] * (1 + 0.2 / 16)
    assert sum(found[100:]) / len(found[100:]) == pytest.approx(mean, rel=0.004)


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


def test_a_tree_is_not_deeper_than_its_paths() -> None:
    policy = AdaptiveWidth((1, 33), {1: [1.0, 6.5]}, depth=5)
    r = request()
    for _ in range(50):
        policy.learn([VerifyOutcome(r, 32, 5)])  # every step accepts a whole path
    assert policy.choose([r]) == 1  # 6 tokens for 6.5
    policy = AdaptiveWidth((1, 33), {1: [1.0, 5.5]}, depth=5)
    for _ in range(50):
        policy.learn([VerifyOutcome(r, 32, 5)])
    assert policy.choose([r]) == 33
