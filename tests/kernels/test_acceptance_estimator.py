"""Estimates of survival: what they learn, and their kernels against the reference."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from forerun.speculative.ragged.estimator import (
    FRACTION,
    INITIAL_RATE,
    PLAIN_FADE,
    Estimator,
    StepOutcome,
)

CPU = torch.device("cpu")
NO_LIMIT = torch.full((64,), 99, dtype=torch.int32)


def copy(estimator: Estimator, device: torch.device) -> Estimator:
    return Estimator(
        **{each.name: vars(estimator)[each.name].clone().to(device) for each in fields(estimator)}
    )


def hold(got: Estimator, want: Estimator, batch: int) -> None:
    """A rate at the edge of a bin may round to either side, and sums of rates by a few."""
    for each in fields(want):
        mine, reference = vars(got)[each.name].cpu(), vars(want)[each.name]
        if each.name == "counts":
            assert mine.sum(0)[:2].tolist() == reference.sum(0)[:2].tolist()
            assert abs(int(mine.sum(0)[2] - reference.sum(0)[2])) < 100 * batch
        else:
            torch.testing.assert_close(mine, reference, msg=each.name)


def drawn(rates: Tensor, widths: Tensor, generator: torch.Generator) -> Tensor:
    """Tokens committed [B] if each draft is accepted with its rate [B, K], given those before."""
    hits = (torch.rand(rates.shape, generator=generator) < rates).int()
    return torch.minimum(hits.cumprod(1).sum(1) + 1, widths).int()


@pytest.mark.parametrize("with_confidence", [False, True])
@pytest.mark.parametrize(("batch", "drafts"), [(1, 1), (5, 7), (40, 15)])
def test_kernels_equal_their_reference(
    batch: int, drafts: int, with_confidence: bool, each_device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(batch)
    want = Estimator.new(48, drafts, CPU)
    got = copy(want, each_device)
    limits = torch.randint(0, drafts + 2, (49,), generator=generator, dtype=torch.int32)
    limits[48] = 0
    for step in range(5):
        slots = torch.randperm(48, generator=generator)[:batch]
        slots[batch // 2 + 1 :: 3] = 48  # the padding slot
        confidence = None
        if with_confidence:
            confidence = torch.rand(batch, drafts, generator=generator)
            confidence[0, 0] = (0.0, 1.0, torch.nan, 0.5, 0.5)[step]
        widths = torch.randint(1, drafts + 2, (batch,), generator=generator, dtype=torch.int32)
        committed = drawn(torch.full((batch, drafts), 0.8), widths, generator)
        given = slots, limits, confidence
        on_device = [None if x is None else x.to(each_device) for x in given]
        survival = want.survival_ref(*given)
        torch.testing.assert_close(got.survival(*on_device).cpu(), survival)
        assert ((survival[:, 1:] <= survival[:, :-1]) & (survival[:, 1:] >= 0)).all()
        drafting = None if step % 2 else max(batch // 2, 1)
        rest = {"limits": limits, "num_drafting": drafting} if step > 1 else {}
        want.update_ref(StepOutcome(slots, widths, committed, confidence, **rest))
        inputs = [x.to(each_device) for x in (slots, widths, committed)]
        rest |= {"limits": on_device[1]} if rest else {}
        got.update(StepOutcome(*inputs, on_device[2], **rest))
        hold(got, want, batch)
        assert not want.count[48].any() and not got.count[48].any()


@pytest.mark.parametrize("width", [1, 3])
def test_one_width_of_all_requests(width: int, each_device: torch.device) -> None:
    """Also a plain step, in which what is known loses weight."""
    want = Estimator.new(3, 2, CPU)
    want.count.fill_(8.0)
    want.count[-2] = 0.0  # of padding
    got, slots = copy(want, each_device), torch.tensor([0, 2])
    committed = torch.full((2,), width, dtype=torch.int32)
    got.update(StepOutcome(slots.to(each_device), width, committed.to(each_device)))
    want.update_ref(StepOutcome(slots, torch.full_like(committed, width), committed))
    for each in fields(want):
        torch.testing.assert_close(vars(got)[each.name].cpu(), vars(want)[each.name])
    if width == 1:
        faded = torch.tensor([8 * PLAIN_FADE, 8, 8 * PLAIN_FADE])
        torch.testing.assert_close(want.count[:3, 1], faded)
        torch.testing.assert_close(want.count[-1], torch.full((2,), 8 * PLAIN_FADE))


def test_a_step_may_have_fewer_drafts(each_device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    want, slots = Estimator.new(3, 7, CPU), torch.tensor([2, 0])
    got = copy(want, each_device)
    limits, widths = torch.full((4,), 7).int(), torch.tensor([4, 2]).int()
    for committed in ([3, 2], [4, 1]):
        counts = torch.tensor(committed).int()
        confidence = torch.rand(2, 3, generator=generator)
        filled = torch.cat((confidence, torch.full((2, 4), 0.5)), 1)
        mine = [each.to(each_device) for each in (slots, widths, counts, confidence)]
        got.update(StepOutcome(*mine))
        want.update_ref(StepOutcome(slots, widths, counts, filled))
        hold(got, want, len(slots))
        survival = got.survival(mine[0], limits.to(each_device), mine[3]).cpu()
        torch.testing.assert_close(survival, want.survival_ref(slots, limits, filled))


def test_drafts_that_were_not_compared() -> None:
    """Beyond a request's limit, and of requests that another one drafts for."""
    limits = torch.tensor([9, 1, 9, 0], dtype=torch.int32)
    widths = torch.tensor([4, 4, 4], dtype=torch.int32)
    step = StepOutcome(torch.arange(3), widths, widths, limits=limits, num_drafting=2)
    assert step.compared.tolist() == [4, 2, 1]
    assert widths.tolist() == [4, 4, 4]


def test_nothing_is_known_at_first() -> None:
    estimator = Estimator.new(4, 3, CPU)
    want = torch.tensor([[INITIAL_RATE, INITIAL_RATE**2, INITIAL_RATE**3]])
    torch.testing.assert_close(estimator.survival_ref(torch.tensor([2]), NO_LIMIT), want)


def test_limits_of_requests() -> None:
    estimator, limits = Estimator.new(3, 3, CPU), torch.tensor([0, 2, 3, 0], dtype=torch.int32)
    survival = estimator.survival_ref(torch.tensor([0, 1, 2, 3]), limits)
    assert (survival > 0).sum(1).tolist() == [0, 2, 3, 0]


def test_each_request_has_its_own_rates_and_a_new_one_those_of_all() -> None:
    generator = torch.Generator().manual_seed(0)
    estimator, slots = Estimator.new(8, 4, CPU), torch.arange(6)
    rates = torch.tensor([0.1, 0.9] * 3).unsqueeze(1).expand(6, 4)
    widths = torch.full((6,), 5, dtype=torch.int32)
    for _ in range(200):
        estimator.update_ref(StepOutcome(slots, widths, drawn(rates, widths, generator)))
    survival = estimator.survival_ref(torch.arange(7), NO_LIMIT)
    assert (survival[[0, 2, 4], 0] < 0.3).all() and (survival[[1, 3, 5], 0] > 0.75).all()
    assert (survival[[1, 3, 5], 3] > 0.45).all()
    assert 0.4 < survival[6, 0] < 0.6  # a slot without observations
    # Positions after the first are tested by the easy ones: their rates over all are higher.
    assert (estimator.prior[1:] > 0.75).all()
    for table in estimator.by_slot:  # another request is admitted
        table[1] = 0.0
    assert estimator.survival_ref(torch.tensor([1]), NO_LIMIT)[0, 0] == survival[6, 0]


@pytest.mark.exhaustive
def test_what_is_not_tested_fades() -> None:
    """A text that was hard is tried again; drafts beyond a prefix that holds become likely."""
    estimator, slots = Estimator.new(2, 4, CPU), torch.arange(2)
    wide, ones = torch.full((2,), 5, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    for _ in range(40):  # the first is always rejected, the second always accepted
        estimator.update_ref(StepOutcome(slots, wide, torch.tensor([1, 5]).int()))
    hard = estimator.survival_ref(slots, NO_LIMIT)[0, 0]
    for _ in range(600):
        estimator.update_ref(StepOutcome(slots, ones, ones))
    assert hard < 0.1 and estimator.survival_ref(slots, NO_LIMIT)[0, 0] > 2 * hard
    estimator = Estimator.new(2, 4, CPU)
    for _ in range(40):
        estimator.update_ref(StepOutcome(slots, wide, torch.tensor([3, 3]).int()))
    beyond = estimator.survival_ref(slots, NO_LIMIT)[0, 2]
    narrow = torch.full((2,), 3, dtype=torch.int32)
    for _ in range(120):
        estimator.update_ref(StepOutcome(slots, narrow, narrow))
    assert beyond < 0.15 and estimator.survival_ref(slots, NO_LIMIT)[0, 2] > 0.5


@pytest.mark.covering(0)
@pytest.mark.parametrize("scale", [0.4, 1.0, 2.0])
def test_confidences_are_scaled_and_shifted_to_what_is_accepted(scale: float) -> None:
    """A head that is biased, and too sure of itself or not sure enough."""
    generator = torch.Generator().manual_seed(1)
    estimator, slots = Estimator.new(16, 3, CPU), torch.arange(16)
    widths = torch.full((16,), 4, dtype=torch.int32)
    errors: list[float] = []
    for step in range(400):
        logit = 1.5 * torch.randn(16, 3, generator=generator)
        rates = (logit + 0.5).sigmoid()
        confidence = (logit / scale - 1.0).sigmoid()
        if step >= 200:
            got = estimator.survival_ref(slots, NO_LIMIT, confidence)
            errors.append((got - rates.cumprod(1)).abs().mean().item())
        committed = drawn(rates, widths, generator)
        estimator.update_ref(StepOutcome(slots, widths, committed, confidence))
    assert estimator.slope[0].item() == pytest.approx(scale, rel=0.3)
    blind = estimator.survival_ref(slots, NO_LIMIT)
    assert sum(errors) / len(errors) < 0.5 * (blind - rates.cumprod(1)).abs().mean()


def test_counts_show_how_well_rates_are_estimated() -> None:
    generator = torch.Generator().manual_seed(2)
    estimator, slots = Estimator.new(32, 4, CPU), torch.arange(32)
    rates = torch.rand(32, 1, generator=generator).expand(32, 4)
    widths = torch.full((32,), 5, dtype=torch.int32)
    for _ in range(50):
        estimator.update_ref(StepOutcome(slots, widths, drawn(rates, widths, generator)))
    before = estimator.counts.clone()
    for _ in range(200):
        estimator.update_ref(StepOutcome(slots, widths, drawn(rates, widths, generator)))
    tested, hits, total = (estimator.counts - before).double().unbind(1)
    assert tested.sum() > 10_000 and (tested > 300).sum() > 6
    error = (hits - total / FRACTION).abs().sum() / tested.sum()
    assert error < 0.05


@pytest.mark.gpu
def test_a_captured_step_learns(device: torch.device) -> None:
    want, slots = Estimator.new(8, 7, CPU), torch.arange(8)
    got = copy(want, device)
    limits = torch.full((9,), 7, dtype=torch.int32, device=device)
    widths = torch.full((8,), 8, dtype=torch.int32)
    static = StepOutcome(*(x.to(device) for x in (slots, widths, torch.ones_like(widths))))
    copy(want, device).update(static)
    got.survival(static.slots, limits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        survival = got.survival(static.slots, limits)
        got.update(static)
    for committed in (3, 8, 1, 5):
        static.num_committed.fill_(committed)
        before = want.survival_ref(slots, limits.cpu())
        want.update_ref(StepOutcome(slots, widths, static.num_committed.cpu()))
        graph.replay()
        torch.testing.assert_close(survival.cpu(), before)
        torch.testing.assert_close(got.count.cpu(), want.count)
