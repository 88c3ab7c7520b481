# mypy: allow-untyped-defs, allow-incomplete-defs
"""Running estimates of what drafts survive, per request and position, on the device.

Rate k of a request is the probability that draft k is accepted, given that those before it are. The
products of its rates are its survivals. A rate is the mean over the request's last steps, blended
with a prior that counts as `PRIOR_WEIGHT` observations: the rate over all requests, whose own prior
is the rate of the position before.

Where drafts come with a confidence c (of a trained head, or the draft's own probability), it says
how a draft differs from those before it:

    logit(rate) = logit(mean) + slope · (logit(c) - mean of logit(c))

with both means over the same drafts. The slope is fitted while running (Newton's method on the
logarithmic loss), so neither a constant bias of a head nor its scale matters.

Texts change, so an observation loses weight while its position goes untested.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from forerun.core.plan import CONFIDENCE_BINS
from forerun.kernels.cpu import library
from forerun.kernels.cpu import ragged as cpu
from forerun.kernels.runtime.jit import jit, tl, triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options

INITIAL_RATE = 0.8  # prior of the first rate; high, so that drafts are tried
PRIOR_WEIGHT = 2.0  # observations that a prior counts as
REQUEST_WINDOW = 24.0  # observations that a mean covers at most
GLOBAL_WINDOW = 32.0  # the same over all requests, or `MIN_GLOBAL_STEPS` of the batch
MIN_GLOBAL_STEPS = 2.0
PLAIN_FADE = 0.995  # weight that observations keep in a step without drafts
LARGEST_LOGIT = 12.0  # of a confidence
LARGEST_SHIFT = 6.0  # of a rate's logit, by its confidence
SMALLEST_RATE = 1e-3  # 1 - SMALLEST_RATE: the largest, as far as confidences shift it
INITIAL_SLOPE = 1.0  # what a calibrated confidence has
INITIAL_INFORMATION = 20.0  # Fisher information that the initial slope counts as
INFORMATION_FADE = 0.999  # per step
LARGEST_SLOPE = 4.0
FRACTION = 1 << 20  # of sums of rates in `Estimator.counts`

_CONSTANTS = {
    "PRIOR_WEIGHT": PRIOR_WEIGHT,
    "LARGEST_LOGIT": LARGEST_LOGIT,
    "LARGEST_SHIFT": LARGEST_SHIFT,
    "SMALLEST_RATE": SMALLEST_RATE,
}
_UPDATE_CONSTANTS = {
    "BINS": CONFIDENCE_BINS,
    "FRACTION": FRACTION,
    "WINDOW": REQUEST_WINDOW,
    "GLOBAL_WINDOW": GLOBAL_WINDOW,
    "GLOBAL_STEPS": MIN_GLOBAL_STEPS,
    "FADE": PLAIN_FADE,
    "INITIAL_RATE": INITIAL_RATE,
    "INFORMATION_FADE": INFORMATION_FADE,
    "LEAST_INFORMATION": INITIAL_INFORMATION,
    "LARGEST_SLOPE": LARGEST_SLOPE,
}
# The same for the kernels for CPUs: `EstimatorRule` in kernels/cpu/ragged.cpp.
ESTIMATOR_RULE = torch.tensor(
    [
        INITIAL_RATE, PRIOR_WEIGHT, REQUEST_WINDOW, GLOBAL_WINDOW, MIN_GLOBAL_STEPS, PLAIN_FADE,
        LARGEST_LOGIT, LARGEST_SHIFT, SMALLEST_RATE,
        INITIAL_INFORMATION, INFORMATION_FADE, LARGEST_SLOPE, CONFIDENCE_BINS, FRACTION,
    ]
)  # fmt: skip


@dataclass(frozen=True)
class StepOutcome:
    """What a step of B requests verified and committed."""

    slots: Tensor  # [B] int64
    widths: Tensor | int  # [B] int32, tokens verified, 1 … K + 1; or the same of all
    num_committed: Tensor  # [B] int32, 1 … `widths`
    confidence: Tensor | None = None  # [B, K] float32, or of fewer drafts; None: they have none
    limits: Tensor | None = None  # [slots + 1] int32, by slot: drafts that are compared at most
    num_drafting: int | None = None  # the first requests: others have no drafts; None: all

    @property
    def compared(self) -> Tensor:
        """[B] int32: the last token and the drafts of each that could be accepted, 1 … K + 1."""
        widths = self.widths
        if not isinstance(widths, Tensor):
            if widths == 1:
                return torch.ones_like(self.num_committed)
            widths = torch.full_like(self.num_committed, widths)
        if self.limits is not None:
            widths = torch.minimum(widths, 1 + self.limits[self.slots])
        if self.num_drafting is not None:
            widths = widths.clone()
            widths[self.num_drafting :] = 1
        return widths


@dataclass(frozen=True)
class Estimator:
    """Means by slot; the last row is over all requests, the one before it that of padding."""

    accepted: Tensor  # [R, K] float32, mean of 1 and 0 over tested drafts; R = slots + 2
    logit: Tensor  # [R, K] float32, mean logit of their confidences
    count: Tensor  # [R, K] float32, how many tested drafts a mean covers
    prior: Tensor  # [K] float32, the rates over all requests
    slope: Tensor  # [2] float32: the slope and its Fisher information
    # [CONFIDENCE_BINS, 3] int64, by estimated rate: tested drafts, accepted ones, sum of rates
    # times FRACTION. It only grows.
    counts: Tensor

    @classmethod
    def new(cls, slots: int, num_drafts: int, device: torch.device) -> Estimator:
        """Knows nothing yet of so many slots, of K = `num_drafts` >= 1 drafts each."""
        accepted, logit, count = torch.zeros(3, slots + 2, num_drafts, device=device)
        return cls(
            accepted=accepted,
            logit=logit,
            count=count,
            prior=torch.full((num_drafts,), INITIAL_RATE, device=device),
            slope=torch.tensor([INITIAL_SLOPE, INITIAL_INFORMATION], device=device),
            counts=torch.zeros(CONFIDENCE_BINS, 3, dtype=torch.int64, device=device),
        )

    @property
    def by_slot(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors whose rows are zeroed when a request is admitted to their slot."""
        return self.accepted, self.logit, self.count

    @property
    def _with_rule(self) -> tuple[Tensor, ...]:
        return ESTIMATOR_RULE, *self.by_slot, self.prior, self.slope, self.counts

    def survival(self, slots: Tensor, limits: Tensor, confidence: Tensor | None = None) -> Tensor:
        """The probabilities that drafts of each request are accepted with all those before them.

        Args:
            slots: [B] int64.
            limits: [slots + 1] int32, by slot: drafts that a request takes; 0 in the padding slot.
            confidence: [B, K] float32, or of the first drafts if a step has fewer; None: drafts
                have none, or are not made yet.

        Returns:
            [B, K] float32, not rising along a row; 0 beyond the limit.
        """
        confidence = self._of_all(confidence)
        if not use_triton(slots):
            if library.serves_tables(slots):
                return cpu.survival(self._with_rule, slots, limits, confidence)
            return self.survival_ref(slots, limits, confidence)
        num_drafts = self.prior.shape[0]
        out = torch.empty(len(slots), num_drafts, device=slots.device)
        _survival[(len(slots),)](
            slots, limits, confidence, self.accepted, self.logit, self.count, self.prior,
            self.slope, out, num_drafts, self.count.shape[0] - 1,
            0 if confidence is None else confidence.stride(0),
            DRAFTS=triton.next_power_of_2(num_drafts), **_CONSTANTS, num_warps=1,
            **pdl_options(slots),
        )  # fmt: skip
        return out

    def survival_ref(
        self, slots: Tensor, limits: Tensor, confidence: Tensor | None = None
    ) -> Tensor:
        """Reference implementation of `survival`."""
        rate, deviation = self._typical(slots, confidence)
        rate = self._shifted(rate, deviation)
        position = torch.arange(rate.shape[1], device=rate.device)
        return torch.where(position < limits[slots].unsqueeze(1), rate, 0.0).cumprod(1)

    def _typical(self, slots: Tensor, confidence: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Mean rates [B, K], and how far the logits of the confidences are from their means."""
        count = self.count[slots]
        weight = count + PRIOR_WEIGHT
        rate = (count * self.accepted[slots] + PRIOR_WEIGHT * self.prior) / weight
        if confidence is None:
            return rate, None
        mean = (count * self.logit[slots] + PRIOR_WEIGHT * self.logit[-1]) / weight
        return rate, torch.where(self.count[-1] > 0, _logit(confidence) - mean, 0.0)

    def _shifted(self, rate: Tensor, deviation: Tensor | None) -> Tensor:
        if deviation is None:
            return rate
        shift = (self.slope[0] * deviation).clamp(-LARGEST_SHIFT, LARGEST_SHIFT)
        return (rate.clamp(SMALLEST_RATE, 1 - SMALLEST_RATE).logit() + shift).sigmoid()

    def update(self, step: StepOutcome) -> None:
        """Learns from a step; may be captured. Deterministic, so all ranks learn the same."""
        num_drafts, confidence = self.prior.shape[0], self._of_all(step.confidence)
        if not use_triton(step.slots):
            return self._update_on_cpu(replace(step, confidence=confidence))
        _update[(1,)](
            step.slots, step.compared, step.num_committed, confidence,
            self.accepted, self.logit, self.count, self.prior, self.slope, self.counts,
            len(step.slots), num_drafts, self.count.shape[0] - 1,
            0 if confidence is None else confidence.stride(0),
            DRAFTS=triton.next_power_of_2(num_drafts), ROWS=16, **_UPDATE_CONSTANTS,
            **_CONSTANTS, num_warps=4, **pdl_options(step.slots),
        )  # fmt: skip
        return None

    def _of_all(self, confidence: Tensor | None) -> Tensor | None:
        """[B, K], where a step has fewer drafts: what is added is of drafts that are not tested."""
        missing = 0 if confidence is None else self.prior.shape[0] - confidence.shape[1]
        if confidence is None or not missing:
            return confidence
        return pad(confidence, (0, missing), value=0.5)

    def _update_on_cpu(self, step: StepOutcome) -> None:
        if not library.serves_tables(step.slots):
            return self.update_ref(step)
        batch, widths = len(step.slots), step.widths
        given = None if isinstance(widths, int) else widths
        tensors = step.slots, given, step.num_committed, step.limits
        width = widths if isinstance(widths, int) else 0
        drafting = batch if step.num_drafting is None else step.num_drafting
        cpu.learn(self._with_rule, tensors, step.confidence, width, drafting)
        return None

    def update_ref(self, step: StepOutcome) -> None:
        """Reference implementation of `update`."""
        slots, confidence = step.slots, step.confidence
        real = (slots < self.count.shape[0] - 2).unsqueeze(1)
        position = torch.arange(self.prior.shape[0], device=slots.device)
        drafts = (step.compared - 1).unsqueeze(1)
        accepted = torch.minimum((step.num_committed - 1).unsqueeze(1), drafts)
        tested = real & (position < drafts) & (position <= accepted)
        hit = (position < accepted) & tested
        logit = torch.zeros_like(tested, dtype=torch.float32)
        if confidence is not None:
            logit = _logit(confidence)
        self._calibrate(slots, confidence, tested, hit)
        seen = tested.float()
        fade = torch.where(drafts == 0, PLAIN_FADE, 1 - 1 / REQUEST_WINDOW)
        untested = real & (position >= drafts) & (accepted == drafts)
        count = self.count[slots]
        count = torch.where(untested, count * fade, (count + seen).clamp_max(REQUEST_WINDOW))
        share = seen / count.clamp_min(1.0)
        rows = slots.where(real.squeeze(1), self.count.shape[0] - 2)
        self.accepted[rows] += share * (hit.float() - self.accepted[slots])
        self.logit[rows] += share * (logit - self.logit[slots])
        self.count[rows] = count
        for table in self.by_slot:  # what padding has written
            table[-2].zero_()
        self._learn_prior(tested, hit, logit, (untested & (drafts > 0)).any(0))

    def _calibrate(
        self, slots: Tensor, confidence: Tensor | None, tested: Tensor, hit: Tensor
    ) -> None:
        """One step of the slope, and the counts by estimated rate, with the means before it."""
        typical, deviation = self._typical(slots, confidence)
        rate = self._shifted(typical, deviation)
        bins = (rate * CONFIDENCE_BINS).long().clamp(0, CONFIDENCE_BINS - 1)
        fixed = torch.floor(rate * FRACTION + 0.5).long()
        values = torch.stack((torch.ones_like(bins), hit.long(), fixed), -1)
        values = values * tested.unsqueeze(-1)
        self.counts.index_add_(0, bins.flatten(), values.flatten(0, 1))
        if deviation is None:
            return
        error = torch.where(tested, (hit.float() - rate) * deviation, 0.0).sum()
        gained = torch.where(tested, rate * (1 - rate) * deviation.square(), 0.0).sum()
        least = torch.tensor(INITIAL_INFORMATION, device=rate.device)
        information = torch.maximum(self.slope[1] * INFORMATION_FADE, least) + gained
        slope = (self.slope[0] + error / information).clamp(0.0, LARGEST_SLOPE)
        self.slope.copy_(torch.stack((slope, information)))

    def _learn_prior(self, tested: Tensor, hit: Tensor, logit: Tensor, outdated: Tensor) -> None:
        """`outdated` [K]: some request had so few drafts that all were accepted."""
        tests, hits = tested.float().sum(0), hit.float().sum(0)
        logits = torch.where(tested, logit, 0.0).sum(0)
        window = torch.clamp_min(tests, max(GLOBAL_WINDOW, MIN_GLOBAL_STEPS * len(tested)))
        before = self.count[-1].clone()
        faded = before * torch.where(outdated, 1 - 1 / GLOBAL_WINDOW, PLAIN_FADE)
        count = torch.where(tests > 0, torch.minimum(before + tests, window), faded)
        least = count.clamp_min(1.0)
        self.accepted[-1] += (hits - tests * self.accepted[-1]) / least
        self.logit[-1] += (logits - tests * self.logit[-1]) / least
        self.count[-1] = count
        rate = torch.tensor(INITIAL_RATE, device=count.device)
        for k in range(len(count)):
            known = count[k] * self.accepted[-1, k]
            rate = (known + PRIOR_WEIGHT * rate) / (count[k] + PRIOR_WEIGHT)
            self.prior[k] = rate


def _logit(confidence: Tensor) -> Tensor:
    return confidence.nan_to_num(0.5).logit().clamp(-LARGEST_LOGIT, LARGEST_LOGIT)


@jit
def _logit_of(p, LARGEST_LOGIT: tl.constexpr):
    p = tl.where(p == p, p, 0.5)
    logit = tl.log(tl.maximum(p, 1e-30)) - tl.log(tl.maximum(1.0 - p, 1e-30))
    return tl.minimum(tl.maximum(logit, -LARGEST_LOGIT), LARGEST_LOGIT)


@jit
def _shifted_rate(rate, deviation, slope, LARGEST_SHIFT: tl.constexpr, SMALLEST_RATE: tl.constexpr):
    rate = tl.minimum(tl.maximum(rate, SMALLEST_RATE), 1.0 - SMALLEST_RATE)
    shift = tl.minimum(tl.maximum(slope * deviation, -LARGEST_SHIFT), LARGEST_SHIFT)
    return 1.0 / (1.0 + (1.0 - rate) / rate * tl.exp(-shift))


@jit
def _product(a, b):
    return a * b


@jit
def _survival(
    slots, limits, confidence, accepted_ptr, logit_ptr, count_ptr, prior_ptr, slope_ptr, out,
    num_drafts, global_row, confidence_stride,
    DRAFTS: tl.constexpr, PRIOR_WEIGHT: tl.constexpr, LARGEST_LOGIT: tl.constexpr,
    LARGEST_SHIFT: tl.constexpr, SMALLEST_RATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per request."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, DRAFTS)
    inside = k < num_drafts
    slot = tl.load(slots + request)
    at = slot * num_drafts + k
    count = tl.load(count_ptr + at, mask=inside, other=0.0)
    accepted = tl.load(accepted_ptr + at, mask=inside, other=0.0)
    prior = tl.load(prior_ptr + k, mask=inside, other=0.5)
    weight = count + PRIOR_WEIGHT
    rate = (count * accepted + PRIOR_WEIGHT * prior) / weight
    if confidence is not None:
        of_all = global_row * num_drafts + k
        mean = tl.load(logit_ptr + of_all, mask=inside, other=0.0)
        known = tl.load(count_ptr + of_all, mask=inside, other=0.0) > 0.0
        own = tl.load(logit_ptr + at, mask=inside, other=0.0)
        mean = (count * own + PRIOR_WEIGHT * mean) / weight
        c = tl.load(confidence + request * confidence_stride + k, mask=inside, other=0.5)
        deviation = tl.where(known, _logit_of(c, LARGEST_LOGIT) - mean, 0.0)
        rate = _shifted_rate(rate, deviation, tl.load(slope_ptr), LARGEST_SHIFT, SMALLEST_RATE)
    limit = tl.load(limits + slot)
    survival = tl.associative_scan(tl.where(k < limit, rate, 0.0), 0, _product)
    tl.store(out + request * num_drafts + k, survival, mask=inside)


@jit
def _then(a0, b0, a1, b1):
    """x -> a1 (a0 x + b0) + b1."""
    return a0 * a1, a1 * b0 + b1


@jit
def _update(
    slots, widths, committed_ptr, confidence, accepted_ptr, logit_ptr, count_ptr, prior_ptr,
    slope_ptr, counts_ptr, batch, num_drafts, global_row, confidence_stride,
    DRAFTS: tl.constexpr, ROWS: tl.constexpr, BINS: tl.constexpr, FRACTION: tl.constexpr,
    WINDOW: tl.constexpr, GLOBAL_WINDOW: tl.constexpr, GLOBAL_STEPS: tl.constexpr,
    FADE: tl.constexpr, INITIAL_RATE: tl.constexpr, INFORMATION_FADE: tl.constexpr,
    LEAST_INFORMATION: tl.constexpr, LARGEST_SLOPE: tl.constexpr, PRIOR_WEIGHT: tl.constexpr,
    LARGEST_LOGIT: tl.constexpr, LARGEST_SHIFT: tl.constexpr, SMALLEST_RATE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One CTA, so that sums over all requests have one order. ROWS requests at a time."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    k = tl.arange(0, DRAFTS)
    column, inside = k[None, :], k[None, :] < num_drafts
    of_all = global_row * num_drafts + k
    prior = tl.load(prior_ptr + k, mask=k < num_drafts, other=0.5)
    count_all = tl.load(count_ptr + of_all, mask=k < num_drafts, other=0.0)
    mean_all = tl.load(logit_ptr + of_all, mask=k < num_drafts, other=0.0)
    slope = tl.load(slope_ptr)
    tests = tl.zeros((DRAFTS,), tl.float32)
    hits, logits, errors, gained = tests, tests, tests, tests
    outdated = tl.zeros((DRAFTS,), tl.int32)
    for first in range(0, batch, ROWS):
        request = first + tl.arange(0, ROWS)
        slot = tl.load(slots + request, mask=request < batch, other=global_row)
        real = (slot < global_row - 1)[:, None] & inside
        drafts = (tl.load(widths + request, mask=request < batch, other=1) - 1)[:, None]
        accepted = (tl.load(committed_ptr + request, mask=request < batch, other=1) - 1)[:, None]
        accepted = tl.minimum(accepted, drafts)
        tested = real & (column < drafts) & (column <= accepted)
        seen = tested.to(tl.float32)
        hit = (tested & (column < accepted)).to(tl.float32)
        at = slot[:, None] * num_drafts + column
        count = tl.load(count_ptr + at, mask=real, other=0.0)
        mean = tl.load(accepted_ptr + at, mask=real, other=0.0)
        rate = (count * mean + PRIOR_WEIGHT * prior[None, :]) / (count + PRIOR_WEIGHT)
        logit = tl.zeros((ROWS, DRAFTS), tl.float32)
        own = tl.load(logit_ptr + at, mask=real, other=0.0)
        if confidence is not None:
            there = confidence + request.to(tl.int64)[:, None] * confidence_stride + column
            logit = _logit_of(tl.load(there, mask=real, other=0.5), LARGEST_LOGIT)
            typical = (count * own + PRIOR_WEIGHT * mean_all[None, :]) / (count + PRIOR_WEIGHT)
            deviation = tl.where(count_all[None, :] > 0.0, logit - typical, 0.0)
            rate = _shifted_rate(rate, deviation, slope, LARGEST_SHIFT, SMALLEST_RATE)
            errors += tl.sum(seen * (hit - rate) * deviation, 0)
            gained += tl.sum(seen * rate * (1.0 - rate) * deviation * deviation, 0)
        in_bin = tl.minimum((rate * BINS).to(tl.int32), BINS - 1)
        fixed = tl.floor(rate * FRACTION + 0.5).to(tl.int64)
        tl.atomic_add(counts_ptr + 3 * in_bin, tested.to(tl.int64), mask=tested)
        tl.atomic_add(counts_ptr + 3 * in_bin + 1, hit.to(tl.int64), mask=tested)
        tl.atomic_add(counts_ptr + 3 * in_bin + 2, fixed, mask=tested)
        fade = tl.where(drafts == 0, FADE, 1.0 - 1.0 / WINDOW)
        untested = real & (column >= drafts) & (accepted == drafts)
        outdated += tl.sum((untested & (drafts > 0)).to(tl.int32), 0)
        count = tl.where(untested, count * fade, tl.minimum(count + seen, WINDOW))
        share = seen / tl.maximum(count, 1.0)
        tl.store(accepted_ptr + at, mean + share * (hit - mean), mask=real)
        tl.store(logit_ptr + at, own + share * (logit - own), mask=real)
        tl.store(count_ptr + at, count, mask=real)
        tests += tl.sum(seen, 0)
        hits += tl.sum(hit, 0)
        logits += tl.sum(seen * logit, 0)
    if confidence is not None:
        information = tl.load(slope_ptr + 1) * INFORMATION_FADE
        information = tl.maximum(information, LEAST_INFORMATION) + tl.sum(gained, 0)
        slope = slope + tl.sum(errors, 0) / information
        tl.store(slope_ptr, tl.minimum(tl.maximum(slope, 0.0), LARGEST_SLOPE))
        tl.store(slope_ptr + 1, information)
    window = tl.maximum(tests, tl.maximum(GLOBAL_WINDOW, GLOBAL_STEPS * batch))
    faded = count_all * tl.where(outdated > 0, 1.0 - 1.0 / GLOBAL_WINDOW, FADE)
    count = tl.where(tests > 0.0, tl.minimum(count_all + tests, window), faded)
    least = tl.maximum(count, 1.0)
    mean = tl.load(accepted_ptr + of_all, mask=k < num_drafts, other=0.0)
    mean += (hits - tests * mean) / least
    mean_all += (logits - tests * mean_all) / least
    keep, add = PRIOR_WEIGHT / (count + PRIOR_WEIGHT), count * mean / (count + PRIOR_WEIGHT)
    keep, add = tl.associative_scan((keep, add), 0, _then)
    tl.store(accepted_ptr + of_all, mean, mask=k < num_drafts)
    tl.store(logit_ptr + of_all, mean_all, mask=k < num_drafts)
    tl.store(count_ptr + of_all, count, mask=k < num_drafts)
    tl.store(prior_ptr + k, keep * INITIAL_RATE + add, mask=k < num_drafts)
