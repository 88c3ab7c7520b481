"""The policy of ragged steps: in a model of a server, and one rule at a time."""

from __future__ import annotations

import pytest

from forerun.core.request import Request
from forerun.core.sampling_params import SamplingParams
from forerun.core.widths import ragged_widths
from forerun.scheduler.adaptive_width import PLAIN, VerifyOutcome, WidthChoice
from forerun.scheduler.ragged_width import RaggedWidth
from tests.covering import some_of
from tests.scheduler.simulated_load import MIXES, Load, cell

WIDTHS = ragged_widths(8)
# Verified tokens cost in proportion, drafts too.
COSTS = {b: [1.0 + 0.01 * b * (w + (w > 1)) for w in WIDTHS] for b in (1, 4, 16, 64)}
DRAFTING = {8: {b: 0.01 * b for b in (1, 4, 16, 64)}}
# The same where a step may draft for fewer tokens of a request.
CUT = {w: {b: 0.01 * b * w / 8 for b in (1, 4, 16, 64)} for w in (2, 4, 8)}
EASY, HARD = [0.95**k for k in range(1, 8)], [0.05**k for k in range(1, 8)]


def request(**params: object) -> Request:
    return Request("r", (1,), SamplingParams(max_new_tokens=10**6, **params), 0, frozenset())


@pytest.mark.parametrize(
    ("batch", "over_plain"), some_of([(1, 0.99), (4, 2.0), (16, 2.0), (64, 1.6)], 0, 1)
)
def test_mixed_requests_get_what_each_needs(batch: int, over_plain: float) -> None:
    for means in MIXES.values():
        got = cell(Load(means, 16), batch, 1200 if batch == 1 else 150)
        assert got.ratio > 0.99 and got.ragged > over_plain * got.plain
        assert batch < 64 or got.ragged > 1.3 * max(got.single, got.full)


def test_requests_that_pay_draft_first() -> None:
    policy = RaggedWidth(WIDTHS, COSTS, DRAFTING)
    requests = [request() for _ in range(64)]
    policy.record_survivals(requests, [*([EASY] + [HARD] * 3) * 16, HARD])
    choice = policy.choose(requests)
    assert choice.width > 1 and choice.drafting is not None
    assert set(choice.drafting[:16]) == set(range(0, 64, 4))
    assert len(choice.drafting) < 32


def test_drafts_are_for_all_where_they_cannot_be_for_some() -> None:
    policy = RaggedWidth(WIDTHS, COSTS)
    requests = [request() for _ in range(16)]
    policy.record_survivals(requests, [*([EASY] * 8 + [HARD] * 8), HARD])
    choice = policy.choose(requests)
    assert choice.width > 1 and choice.drafting is None


def test_plain_steps_where_no_draft_pays() -> None:
    policy = RaggedWidth(WIDTHS, COSTS, DRAFTING)
    requests = [request() for _ in range(16)]
    policy.record_survivals(requests, [HARD] * 17)
    assert [policy.choose(requests) for _ in range(20)] == [PLAIN] * 20


def test_a_request_nothing_is_known_of_counts_as_a_new_one() -> None:
    policy = RaggedWidth(WIDTHS, COSTS, DRAFTING)
    known = [request() for _ in range(4)]
    policy.record_survivals(known, [[0.0] * 7] * 4 + [EASY])
    assert policy.choose(known) == PLAIN
    assert policy.choose([*known, *(request() for _ in range(4))]).width > 1


def test_limits_of_requests() -> None:
    """A request without drafts, and one that has a token left, get none."""
    policy = RaggedWidth(WIDTHS, COSTS, DRAFTING)
    last = Request("r", (1,), SamplingParams(max_new_tokens=1), 0, frozenset())
    for each in (request(speculative=False), last):
        policy.record_survivals([each], [EASY, EASY])
        assert policy.choose([each]) == PLAIN
    few = request(max_draft_tokens=2)
    policy.record_survivals([few], [EASY, EASY])
    assert policy.choose([few]).width <= 4


def test_costs_of_steps_that_draft_for_some_are_not_those_of_steps_that_draft_for_all() -> None:
    policy = RaggedWidth(WIDTHS, COSTS, DRAFTING)
    at = WIDTHS.index(4)
    for _ in range(50):
        policy.record_step_time(64, WidthChoice(4, tuple(range(16))), COSTS[64][at] - 0.48)
    assert policy.costs[64][at] == pytest.approx(COSTS[64][at])


def test_drafts_that_promise_nothing_are_not_made() -> None:
    """Of a request: all the others of its block cost too."""
    policy = RaggedWidth(WIDTHS, COSTS, CUT)
    requests = [request() for _ in range(16)]
    first_only = [0.95, *[0.01] * 6]
    policy.record_survivals(requests, [first_only] * 17)
    choice = policy.choose(requests)
    assert (choice.width, choice.most) == (2, 2)  # a uniform pass
    policy.record_survivals(requests, [*([EASY] + [first_only] * 3) * 4, HARD])
    wide = policy.choose(requests)
    assert wide.width > 2 and wide.most == 8
    whole = RaggedWidth(WIDTHS, COSTS, {8: CUT[8]})
    whole.record_survivals(requests, [first_only] * 17)
    assert whole.choose(requests).most is None
    assert policy._budgets[1] == whole._budgets[1]


def test_costs_of_steps_with_fewer_drafts_are_not_those_of_steps_with_all() -> None:
    policy = RaggedWidth(WIDTHS, COSTS, CUT)
    at = WIDTHS.index(2)
    for _ in range(50):  # the measured step drafts for all 8 tokens
        saved = CUT[8][16] - CUT[2][16]
        policy.record_step_time(16, WidthChoice(2, most=2), COSTS[16][at] - saved)
    assert policy.costs[16][at] == pytest.approx(COSTS[16][at])


def test_a_uniform_pass_has_the_same_width_for_all() -> None:
    """So an easy request gets no more than a hard one, which a ragged pass would promise."""
    requests, mixed = [request() for _ in range(4)], [EASY, HARD, HARD, HARD, HARD]
    ragged, uniform = (
        RaggedWidth(WIDTHS, COSTS, DRAFTING, is_uniform=lambda batch, small=small: batch <= small)
        for small in (0, 4)
    )
    for policy in (ragged, uniform):
        policy.record_survivals(requests, mixed)
        policy.choose(requests)
    assert set(uniform._budgets) == {1, 2, 4, 8}
    for width, budget in uniform._budgets.items():
        assert budget.tokens == 4 * width
        drafts = sum(sum(each[: int(width) - 1]) for each in mixed[:4])
        assert budget.expected == pytest.approx(4 + drafts)
        assert budget.seconds == pytest.approx(COSTS[4][WIDTHS.index(width)])
    assert ragged._budgets[4].expected > uniform._budgets[4].expected + 0.5


def test_a_uniform_pass_drafts_for_its_own_width() -> None:
    """Of the measured step drafts for all 8 tokens are taken off, and its own added."""
    policy = RaggedWidth(WIDTHS, COSTS, CUT, is_uniform=lambda batch: True)
    requests = [request() for _ in range(4)]
    policy.record_survivals(requests, [EASY] * 5)
    policy.choose(requests)
    for width in (2, 4, 8):
        measured = COSTS[4][WIDTHS.index(width)] - CUT[policy._most(4, width)][4]
        assert policy._budgets[width].seconds == pytest.approx(measured + CUT[width][4])


def test_drafts_are_explored_while_none_pays() -> None:
    policy = RaggedWidth(WIDTHS, COSTS, DRAFTING)
    requests = [request() for _ in range(16)]
    policy.record_survivals(requests, [HARD] * 17)
    for _ in range(2000):
        width = policy.choose(requests).width
        drafts = int(width) - 1
        policy.record_outcomes([VerifyOutcome(each, drafts, 0) for each in requests])
    assert 0 < policy.as_dict()["exploration_steps"] < 20
    assert policy.as_dict()["draft_costs"] == DRAFTING
