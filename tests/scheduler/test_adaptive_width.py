"""Adaptive width: throughput, exploration, and the correction of step costs."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

import pytest

from forerun.core.request import Request
from forerun.core.sampling_params import SamplingParams
from forerun.core.widths import verify_widths
from forerun.scheduler.adaptive_width import (
    AdaptiveWidth,
    FixedWidth,
    VerifyOutcome,
    WidthChoice,
)

WIDTHS = (1, 4, 8, 16)
# Verified tokens are nearly free for small batches and cost in proportion for large ones.
COSTS = {b: [1.0 + b * w / 64 for w in WIDTHS] for b in (1, 2, 4, 8, 16, 32, 64, 128)}


def request(**params: object) -> Request:
    return Request("r", (1,), SamplingParams(max_new_tokens=10**6, **params), 0, frozenset())


def throughput(
    policy: AdaptiveWidth,
    batch: int,
    rate: float,
    steps: int,
    costs: dict[int, list[float]] = COSTS,
) -> float:
    """Tokens per second if each draft is accepted with probability `rate`, given those before."""
    rng, requests = random.Random(0), [request() for _ in range(batch)]
    tokens = seconds = 0.0
    for _ in range(steps):
        width = policy.choose(requests).width
        seconds += costs[batch][policy.widths.index(width)]
        outcomes = []
        for r in requests:
            accepted = 0
            while accepted < width - 1 and rng.random() < rate:
                accepted += 1
            outcomes.append(VerifyOutcome(r, width - 1, accepted))
            tokens += accepted + 1
        policy.record_outcomes(outcomes)
    return tokens / seconds


@pytest.mark.parametrize(
    ("full", "flexible", "want"),
    [
        (1, True, (1,)),
        (2, True, (1, 2)),
        (3, True, (1, 2, 3)),
        (16, True, (1, 2, 4, 8, 16)),
        (16, False, (1, 16)),
        (10, True, (1, 2, 4, 10)),
        (33, True, (1, 2, 4, 8, 16, 33)),
    ],
)
def test_verify_widths(full: int, flexible: bool, want: tuple[int, ...]) -> None:
    assert verify_widths(full, flexible) == want


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("rate", [0.02, 0.2, 0.6, 0.85, 0.97])
@pytest.mark.parametrize("batch", [1, 8, 32, 128])
def test_throughput_is_near_that_of_the_best_fixed_width(batch: int, rate: float) -> None:
    costs = COSTS[batch]
    best = max(sum(rate**k for k in range(w)) / c for w, c in zip(WIDTHS, costs, strict=True))
    assert throughput(AdaptiveWidth(WIDTHS, COSTS), batch, rate, 3000 // batch + 200) > 0.95 * best


# With n-grams as drafts on a CPU: a second token is nearly free, more are not.
CHEAP_PAIRS = {1: [1.0, 1.05, 1.5, 2.2, 4.0]}


@pytest.mark.parametrize(("rate", "most"), [(0.02, 1), (0.3, 2), (0.9, 8)])
def test_one_draft_is_verified_where_it_pays(rate: float, most: int) -> None:
    """`most`: the width of most steps. Better than with none of width 2, where that is best."""
    policy = AdaptiveWidth(verify_widths(16, True), CHEAP_PAIRS)
    got = throughput(policy, 1, rate, 3000, CHEAP_PAIRS)
    assert policy.chosen[most] > 2400
    tokens = [sum(rate**k for k in range(w)) for w in policy.widths]
    rates = [t / cost for t, cost in zip(tokens, CHEAP_PAIRS[1], strict=True)]
    assert got > 0.95 * max(rates)
    if most == 2:
        others = (1, 4, 8, 16)
        wide = {1: [CHEAP_PAIRS[1][policy.widths.index(w)] for w in others]}
        assert got > 1.1 * throughput(AdaptiveWidth(others, wide), 1, rate, 3000, wide)


def test_exploration_looks_further_than_one_draft() -> None:
    """One accepted draft in a row says nothing of the second; a limit of the request holds."""
    for limit, explored in ((None, 4), (1, 2), (2, 4)):
        policy = AdaptiveWidth((1, 2, 4, 8), {1: [1.0, 1.5, 1.6, 1.7]})
        requests = [request(max_draft_tokens=limit)]
        for _ in range(600):
            width = policy.choose(requests).width
            policy.record_outcomes([VerifyOutcome(requests[0], width - 1, 0)])
            if policy.as_dict()["exploration_steps"]:
                break
        assert width == explored
    pair = AdaptiveWidth((1, 2), {1: [1.0, 1.5]})
    throughput(pair, 1, 0.0, 1500, {1: [1.0, 1.5]})
    assert 0 < pair.as_dict()["exploration_steps"] < 100


# Milliseconds on one H200, Qwen3-8B shapes and a draft of 5 layers: measured at start (too high for
# plain steps of small batches), real ones, and those of an engine without a draft.
MEASURED = {
    1: [4.340, 5.095, 5.217, 5.266],
    4: [4.579, 5.290, 5.650, 5.800],
    16: [4.359, 6.315, 7.260, 8.471],
    32: [4.714, 7.990, 10.37, 15.21],
    64: [5.193, 12.28, 18.27, 30.52],
    128: [6.665, 21.86, 35.45, 65.43],
}
ACTUAL = {
    1: [4.081, 5.095, 5.217, 5.263],
    4: [4.197, 5.290, 5.650, 5.810],
    16: [4.377, 6.315, 7.260, 9.740],
    32: [4.752, 7.990, 10.37, 16.67],
    64: [5.224, 12.28, 18.27, 31.70],
    128: [6.564, 21.86, 35.45, 62.10],
}
PLAIN = {1: 4.065, 4: 4.180, 16: 4.360, 32: 4.733, 64: 5.203, 128: 6.534}


def generate(
    policy: AdaptiveWidth, batch: int, mean: float, tokens: int, outliers: bool = False
) -> float:
    """Tokens per millisecond until every request has its `tokens`.

    Accept lengths are simulated with the given mean, with an offset per request. Results arrive one
    step later, as with overlap scheduling. With `outliers`, some steps are reported to take 60 ms.
    """
    params = SamplingParams(max_new_tokens=tokens)
    requests = [Request("r", (1,), params, 0, frozenset()) for _ in range(batch)]
    have, in_flight, ms, step = [1] * batch, [], 0.0, 0
    while min(have) < tokens:
        width = policy.choose(requests).width
        cost = ACTUAL[batch][WIDTHS.index(width)]
        at = range(step, step + batch)
        new = [min(int((i + 1) * mean + 1e-6) - int(i * mean + 1e-6), width) for i in at]
        in_flight.append(
            [VerifyOutcome(r, width - 1, n - 1) for r, n in zip(requests, new, strict=True)]
        )
        if len(in_flight) > 1:
            policy.record_outcomes(in_flight.pop(0))
        policy.record_step_time(
            batch, WidthChoice(width), (60.0 if outliers and step % 19 == 11 else cost) / 1000
        )
        have = [h + n for h, n in zip(have, new, strict=True)]
        ms, step = ms + cost, step + 1
    return (sum(have) - batch) / ms


@pytest.mark.exhaustive
@pytest.mark.covering(0)
@pytest.mark.parametrize("outliers", [False, True])
def test_no_slower_than_the_better_of_plain_and_full(outliers: bool) -> None:
    """One policy throughout, as in `forerun bench widths`: a first run that does not count lets
    it adapt to each new accept length."""
    policy = AdaptiveWidth(WIDTHS, {b: [ms / 1000 for ms in row] for b, row in MEASURED.items()})
    for batch in sorted(MEASURED):
        for mean in (1.2, 3.0, 6.5):
            generate(policy, batch, mean, 128, outliers)
            policy.chosen.clear()
            best = max(batch / PLAIN[batch], batch * mean / ACTUAL[batch][3])
            speed = sum(generate(policy, batch, mean, 128, outliers) for _ in range(2)) / 2
            assert speed > 0.98 * best, (batch, mean, policy.chosen)


def test_exploration_of_rejected_drafts_costs_at_most_two_per_cent() -> None:
    policy = AdaptiveWidth(WIDTHS, COSTS)
    throughput(policy, 32, 0.0, 100)
    policy.chosen.clear()
    assert throughput(policy, 32, 0.0, 2000) > 0.98 * 32 / COSTS[32][0]
    assert 0 < policy.chosen[4] < 100  # exploration
    assert policy.chosen[8] == policy.chosen[16] == 0


def test_drafts_resume_when_acceptance_rises() -> None:
    policy = AdaptiveWidth(WIDTHS, COSTS)
    requests = [request()]
    for _ in range(300):
        policy.record_outcomes([VerifyOutcome(requests[0], policy.choose(requests).width - 1, 0)])
    policy.chosen.clear()
    for _ in range(3000):
        width = policy.choose(requests).width
        policy.record_outcomes([VerifyOutcome(requests[0], width - 1, width - 1)])
    assert policy.chosen[16] > 2000


def test_a_new_request_is_drafted_soon_after_a_beginning_without_acceptance() -> None:
    """No draft of the first 40 tokens is accepted, then all are; the fifth such request."""
    costs = {1: [7.0, 12.0, 13.4, 15.6]}  # milliseconds on a CPU
    policy = AdaptiveWidth(WIDTHS, costs)
    for _ in range(5):
        policy.chosen.clear()
        r, at = request(), 0
        while at < 160:
            width = policy.choose([r]).width
            accepted = width - 1 if at >= 40 else 0
            policy.record_outcomes([VerifyOutcome(r, width - 1, accepted)])
            at += accepted + 1
    assert policy.chosen[1] < 40 + 25


def test_a_new_request_is_drafted_soon_after_requests_without_acceptance() -> None:
    """Short requests, as a CPU serves them; drafts of the last one are all accepted."""
    policy = AdaptiveWidth(WIDTHS, {1: [0.7, 1.4, 1.6, 2.3]})

    def serve(acceptance: int) -> None:
        policy.chosen.clear()
        r = Request("r", (1,), SamplingParams(max_new_tokens=128), 0, frozenset())
        at = 0
        while at < 90:
            width = policy.choose([r]).width
            accepted = min(acceptance, width - 1)
            policy.record_outcomes([VerifyOutcome(r, width - 1, accepted)])
            at += accepted + 1

    for _ in range(4):
        serve(0)
    assert policy.chosen[1] >= 88  # at most two steps of exploration
    serve(15)
    assert policy.chosen[1] < 4


def test_measured_costs_are_corrected_while_running() -> None:
    policy = AdaptiveWidth(WIDTHS, COSTS)
    for _ in range(200):
        policy.record_step_time(8, WidthChoice(16), 30.0)
        policy.record_step_time(6, WidthChoice(4), 3.0)  # between the measured 4 and 8
    assert policy.costs[8][3] == pytest.approx(30.0, rel=0.01)
    assert policy.costs[6][1] == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize("wrong", range(4))
def test_an_outlier_of_the_measurement_is_corrected(wrong: int) -> None:
    """All drafts are accepted and width costs little, but one width was measured as expensive."""
    costs = {1: [1.0, 1.1, 1.2, 1.3]}
    costs[1][wrong] = 300.0
    policy, requests = AdaptiveWidth(WIDTHS, costs), [request()]
    for _ in range(500):
        width = policy.choose(requests).width
        policy.record_outcomes([VerifyOutcome(requests[0], width - 1, width - 1)])
        policy.record_step_time(1, WidthChoice(width), [1.0, 1.1, 1.2, 1.3][WIDTHS.index(width)])
    policy.chosen.clear()
    for _ in range(100):
        policy.record_outcomes([VerifyOutcome(requests[0], policy.choose(requests).width - 1, 15)])
    assert policy.chosen[16] + policy.chosen[8] == 100


def test_a_width_measured_too_slow_is_run_again_while_another_pays() -> None:
    """Neither width 4, which pays, nor plain steps say what width 8 costs."""
    real = {1: [1.0, 1.3, 1.5, 3.5]}
    policy, rng = AdaptiveWidth(WIDTHS, {1: [1.0, 1.3, 3.0, 3.5]}), random.Random(0)
    requests = [request()]
    seconds = []
    for _ in range(1000):
        width = policy.choose(requests).width
        seconds.append(real[1][WIDTHS.index(width)])
        accepted = next((i for i in range(width - 1) if rng.random() > 0.85), width - 1)
        policy.record_outcomes([VerifyOutcome(requests[0], width - 1, accepted)])
        policy.record_step_time(1, WidthChoice(width), seconds[-1])
    assert policy.chosen[8] > 900
    lost = sum(1 for each in seconds[100:] if each > 1.5) * (3.5 - 1.5)  # at width 16
    assert lost < 0.01 * sum(seconds)


def test_a_single_outlier_does_not_change_a_cost() -> None:
    policy = AdaptiveWidth(WIDTHS, COSTS)
    for _ in range(5):
        policy.record_step_time(8, WidthChoice(16), 1000.0)
        policy.record_step_time(8, WidthChoice(16), COSTS[8][3])
    assert policy.costs[8][3] == COSTS[8][3]


def test_a_cost_that_was_far_too_low_is_corrected_with_other_steps_in_between() -> None:
    policy = AdaptiveWidth(WIDTHS, COSTS)
    for _ in range(200):
        policy.record_step_time(8, WidthChoice(4), 3 * COSTS[8][1])
        policy.record_step_time(16, WidthChoice(4), COSTS[16][1])
        policy.record_step_time(8, WidthChoice(1), COSTS[8][0])
    assert policy.costs[8][1] == pytest.approx(3 * COSTS[8][1], rel=0.01)
    assert policy.costs[16][1] == COSTS[16][1]


def test_costs_are_the_mean_of_varying_step_times() -> None:
    """Every 16th plain step takes longer: it runs the deferred observe."""
    policy, rng = AdaptiveWidth(WIDTHS, COSTS), random.Random(0)
    costs = []
    for step in range(3000):
        policy.record_step_time(
            8, WidthChoice(1), COSTS[8][0] * rng.gauss(1.2 if step % 16 == 0 else 1.0, 0.01)
        )
        costs.append(policy.costs[8][0])
    mean = COSTS[8][0] * (1 + 0.2 / 16)
    assert sum(costs[100:]) / len(costs[100:]) == pytest.approx(mean, rel=0.004)


def test_costs_above_the_largest_batch_size_are_proportional() -> None:
    policy = AdaptiveWidth(WIDTHS, {4: [1.0, 2.0, 3.0, 4.0]})
    assert policy.costs[8] == [2.0, 4.0, 6.0, 8.0]
    assert policy.costs[2] == [1.0, 2.0, 3.0, 4.0]


def test_requests_limit_the_width() -> None:
    fixed = FixedWidth(WIDTHS)
    assert fixed.choose([request()]).width == 16
    assert fixed.choose([request(speculative=False)]).width == 1
    assert fixed.choose([request(speculative=False), request(max_draft_tokens=2)]).width == 4
    assert fixed.choose([request(max_draft_tokens=0)]).width == 1
    adaptive = AdaptiveWidth(WIDTHS, {1: [1.0, 1.0, 1.0, 1.0]})
    assert adaptive.choose([request(max_draft_tokens=5)]).width <= 8
    assert adaptive.choose([request(speculative=False)]).width == 1


def test_remaining_tokens_limit_the_width() -> None:
    adaptive = AdaptiveWidth(WIDTHS, {1: [1.0, 1.1, 1.2, 1.3]})
    short = Request("r", (1,), SamplingParams(max_new_tokens=2), 0, frozenset())
    assert adaptive.choose([short]).width == 4


# --- trees ------------------------------------------------------------------------------------

BUDGETS = verify_widths(64, True)


def best_first(ranks: Sequence[float], nodes: int, depth: int) -> dict[tuple[int, ...], int]:
    """The `nodes` most probable paths of ranks, where each depth has these probabilities."""
    tree: dict[tuple[int, ...], int] = {}
    ahead = [(-p, (r,)) for r, p in enumerate(ranks)]
    while len(tree) < nodes and ahead:
        score, path = heapq.heappop(ahead)
        tree[path] = len(tree) + 1
        if len(path) < depth:
            for r, p in enumerate(ranks):
                heapq.heappush(ahead, (score * p, (*path, r)))
    return tree


class Trees:
    """Texts of a tree drafter: a token has rank r at its depth with probability `ranks[r]`."""

    def __init__(self, ranks: Sequence[float], depth: int = 8) -> None:
        self.ranks, self.rng = ranks, random.Random(0)
        self.nodes = best_first(ranks, BUDGETS[-1] - 1, depth)

    def accepted(self, width: int) -> list[int]:
        path: tuple[int, ...] = ()
        nodes: list[int] = []
        while True:
            left = 1 - sum(self.ranks)
            weights = [*self.ranks, left]
            path = (*path, self.rng.choices(range(len(weights)), weights)[0])
            node = self.nodes.get(path, width)
            if node >= width:
                return nodes
            nodes.append(node)

    def mean_tokens(self, width: int, steps: int = 4000) -> float:
        return sum(1 + len(self.accepted(width)) for _ in range(steps)) / steps

    def throughput(self, policy: AdaptiveWidth, costs: dict[int, list[float]], steps: int) -> float:
        requests, tokens, seconds = [request() for _ in range(next(iter(costs)))], 0, 0.0
        for _ in range(steps):
            width = policy.choose(requests).width
            seconds += costs[len(requests)][policy.widths.index(width)]
            paths = [self.accepted(width) for _ in requests]
            outcomes = [
                VerifyOutcome(r, width - 1, len(path), path)
                for r, path in zip(requests, paths, strict=True)
            ]
            policy.record_outcomes(outcomes)
            tokens += sum(1 + len(path) for path in paths)
        return tokens / seconds


KINDS = {
    "sure": [0.9, 0.05],
    "fair": [0.5, 0.2, 0.1, 0.05],
    "wide": [0.2, 0.15, 0.1, 0.1, 0.1, 0.05],
    "hopeless": [0.01, 0.01],
}


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per_token", [0.001, 0.02, 0.1, 0.5])
@pytest.mark.parametrize("batch", [1, 8])
def test_the_budget_of_a_tree_is_near_the_best(kind: str, per_token: float, batch: int) -> None:
    """`per_token`: the cost of a verified token, in plain steps."""
    costs = {batch: [1 + per_token * (width - 1) for width in BUDGETS]}
    trees = Trees(KINDS[kind])
    means = [trees.mean_tokens(width) for width in BUDGETS]
    best = max(batch * n / cost for n, cost in zip(means, costs[batch], strict=True))
    policy = AdaptiveWidth(BUDGETS, costs, tree_depth=8)
    assert trees.throughput(policy, costs, 2000 // batch) > 0.93 * best


def test_the_budget_follows_the_costs() -> None:
    """The same text; the table of costs and later the measured ones say which tree pays."""
    trees = Trees(KINDS["fair"])
    free = {1: [1.0 + 0.001 * i for i in range(len(BUDGETS))]}
    steep = {1: [1.0, 1.05, 1.1, *[20.0] * (len(BUDGETS) - 3)]}
    for costs, want in ((free, BUDGETS[-1]), (steep, 4)):
        policy = AdaptiveWidth(BUDGETS, costs, tree_depth=8)
        trees.throughput(policy, costs, 600)
        assert policy.chosen.most_common(1)[0][0] == want
    policy = AdaptiveWidth(BUDGETS, free, tree_depth=8)
    for _ in range(400):
        for i, width in enumerate(BUDGETS):
            policy.record_step_time(1, WidthChoice(width), steep[1][i])
    trees.throughput(policy, steep, 600)
    assert policy.chosen.most_common(1)[0][0] == 4


def test_larger_trees_are_tried_again_when_the_text_changes() -> None:
    costs = {1: [1.0 + 0.02 * (width - 1) for width in BUDGETS]}
    policy = AdaptiveWidth(BUDGETS, costs, tree_depth=8)
    Trees(KINDS["hopeless"]).throughput(policy, costs, 500)
    policy.chosen.clear()
    trees = Trees(KINDS["wide"])
    best = max(trees.mean_tokens(w) / c for w, c in zip(BUDGETS, costs[1], strict=True))
    trees.throughput(policy, costs, 500)
    assert trees.throughput(policy, costs, 1500) > 0.93 * best


def test_a_limit_on_drafts_does_not_limit_the_nodes_of_a_tree() -> None:
    policy = AdaptiveWidth(BUDGETS, {1: [1.0 + 0.001 * i for i in range(7)]}, tree_depth=8)
    limited, none = request(max_draft_tokens=2), request(max_draft_tokens=0)
    for _ in range(30):
        policy.record_outcomes([VerifyOutcome(limited, 63, 2, [3, 40])])
    assert policy.choose([limited]).width == 64
    assert policy.choose([none]).width == 1


def test_expected_tokens_of_a_tree_are_limited_by_its_depth() -> None:
    policy = AdaptiveWidth((1, 33), {1: [1.0, 6.5]}, tree_depth=5)
    r = request()
    for _ in range(50):
        policy.record_outcomes([VerifyOutcome(r, 32, 5, range(1, 6))])  # a full path in every step
    assert policy.choose([r]).width == 1  # 6 tokens for 6.5
    policy = AdaptiveWidth((1, 33), {1: [1.0, 5.5]}, tree_depth=5)
    for _ in range(50):
        policy.record_outcomes([VerifyOutcome(r, 32, 5, range(1, 6))])
    assert policy.choose([r]).width == 33
