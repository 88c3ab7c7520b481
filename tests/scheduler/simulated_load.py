"""A model of a server that decodes: what each width policy makes of requests of mixed difficulty.

    python -m tests.scheduler.simulated_load

prints output tokens per second by batch size: plain decoding, the full width, one width for all,
and ragged steps. Policies, estimator and allocation are those of the engine. The costs of steps are
computed, for Qwen3-8B shapes on one H100 at 1,024 tokens of context (`Costs`); results arrive a
step late, as with overlap scheduling, and survivals are told every few steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from forerun.core.request import Request
from forerun.core.sampling_params import SamplingParams
from forerun.core.widths import captured_width, ragged_widths, verify_widths
from forerun.scheduler.adaptive_width import (
    AdaptiveWidth,
    FixedWidth,
    VerifyOutcome,
    WidthChoice,
    WidthPolicy,
)
from forerun.scheduler.ragged_width import RaggedWidth
from forerun.speculative.ragged.allocate import allocate_ref
from forerun.speculative.ragged.estimator import Estimator, StepOutcome

BATCHES = (1, 4, 16, 64, 128, 256)
MIXES = {"half 1.3, half 5": (1.3, 5.0), "1.2, 3, 6.5": (1.2, 3.0, 6.5)}
SURVIVAL_STEPS = 8  # between two reports of survivals


@dataclass(frozen=True)
class Costs:
    """Milliseconds. Of a batch of 256 the K/V is 38 GB, 12 ms; 768 tokens are 17 ms; drafts of
    blocks of 16 for all 256 requests 19 ms.
    """

    kv: float = 12 / 256  # per request: its K/V is read
    weights: float = 4.0  # they are read once
    token: float = 17 / 768  # verified; hidden behind the weights up to some 180
    draft_weights: float = 1.0
    draft: float = 19 / 256  # per drafting request

    def drafting(self, requests: int) -> float:
        return max(self.draft_weights, self.draft * requests) if requests else 0.0

    def step(self, batch: int, drafting: int, tokens: int) -> float:
        verify = max(self.weights, self.token * tokens)
        return self.kv * batch + verify + self.drafting(drafting)


@dataclass(frozen=True)
class Load:
    """Requests of which each accepts so many tokens a step in the mean, given enough drafts."""

    means: Sequence[float]  # the request in slot i has `means[i % len(means)]`
    full: int  # the largest width
    # False: every step accepts the mean, as far as whole tokens allow. True: each draft is accepted
    # with one probability, given those before it.
    random: bool = False

    def rate(self, slot: int) -> float:
        """The probability that makes `full - 1` drafts accept the mean, by bisection."""
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            accepted = sum(middle**k for k in range(1, self.full))
            low, high = (middle, high) if 1 + accepted < self.mean(slot) else (low, middle)
        return low

    def mean(self, slot: int) -> float:
        return self.means[slot % len(self.means)]


class Slots:
    """The requests of a batch, and how many tokens each would accept in its next step."""

    def __init__(self, load: Load, batch: int) -> None:
        self.load, self.batch = load, batch
        params = SamplingParams(max_new_tokens=10**6)
        self.requests = [Request("r", (1,), params, 0, frozenset()) for _ in range(batch)]
        self._rng = random.Random(0)
        self._rates = [load.rate(slot) for slot in range(batch)]
        self._steps = list(range(batch))

    def acceptable(self) -> list[int]:
        out = []
        for slot in range(self.batch):
            if self.load.random:
                tokens = 1
                while tokens < self.load.full and self._rng.random() < self._rates[slot]:
                    tokens += 1
            else:
                at, mean = self._steps[slot], self.load.mean(slot)
                tokens = int((at + 1) * mean + 1e-6) - int(at * mean + 1e-6)
            self._steps[slot] += 1
            out.append(tokens)
        return out


class Divided:
    """Divides the tokens of a step as the device does, and learns from its outcome."""

    def __init__(self, batch: int, full: int) -> None:
        self.estimator = Estimator.new(batch, full - 1, torch.device("cpu"))
        self._slots = torch.arange(batch)
        self._limits = torch.full((batch + 1,), full - 1, dtype=torch.int32)
        self._step = 0

    def widths(self, choice: WidthChoice, batch: int) -> list[int]:
        widths = torch.ones(batch, dtype=torch.int32)
        if choice.width > 1:
            survival = self.estimator.survival_ref(self._slots, self._limits)
            chosen = list(choice.drafting or range(batch))
            total = int(choice.width * batch) - (batch - len(chosen))
            widths[chosen] = allocate_ref(survival[chosen], total)
        return [int(width) for width in widths]

    def learn(self, widths: Sequence[int], committed: Sequence[int]) -> None:
        tensors = (torch.tensor(x, dtype=torch.int32) for x in (widths, committed))
        self.estimator.update_ref(StepOutcome(self._slots, *tensors))

    def due_survivals(self) -> list[list[float]] | None:
        """Of every slot, and of a request that is new."""
        self._step += 1
        if self._step % SURVIVAL_STEPS:
            return None
        rows = self.estimator.survival_ref(self._slots, self._limits).tolist()
        return [*rows, self.estimator.prior.cumprod(0).tolist()]


def uniform(choice: WidthChoice, batch: int) -> list[int]:
    return [int(choice.width)] * batch


@dataclass(frozen=True)
class Cell:
    """Tokens per millisecond of each policy."""

    plain: float
    full: float
    single: float
    ragged: float

    @property
    def ratio(self) -> float:
        """Ragged over the best of the others."""
        return self.ragged / max(self.plain, self.full, self.single)


def cell(load: Load, batch: int, steps: int = 1200, costs: Costs | None = None) -> Cell:
    """One batch size, after the policies had as many steps to learn."""
    costs = costs or Costs()
    full = load.full
    singles, mixed = verify_widths(full, True), ragged_widths(full)

    def step(width: float, size: int) -> float:
        drafting = size if width > 1 else 0
        return costs.step(size, drafting, int(captured_width(width, size, full) * size)) / 1000

    sizes = [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256]
    single = AdaptiveWidth(singles, {b: [step(w, b) for w in singles] for b in sizes})
    drafting = {full: {size: costs.drafting(size) / 1000 for size in sizes}}
    table = {b: [step(w, b) for w in mixed] for b in sizes}
    ragged = RaggedWidth(mixed, table, drafting, parts=2)  # as captured steps

    def run(policy: WidthPolicy, divided: Divided | None = None) -> float:
        return speed(policy, Slots(load, batch), divided, partial(total_seconds, costs), steps)

    return Cell(
        plain=run(FixedWidth((1,))),
        full=run(FixedWidth((1, full))),
        single=run(single),
        ragged=run(ragged, Divided(batch, full)),
    )


def total_seconds(costs: Costs, choice: WidthChoice, batch: int, tokens: int) -> float:
    drafting = batch if choice.drafting is None else len(choice.drafting)
    return costs.step(batch, drafting if choice.width > 1 else 0, tokens) / 1000


def speed(
    policy: WidthPolicy,
    slots: Slots,
    divided: Divided | None,
    seconds_of: Callable[[WidthChoice, int, int], float],
    steps: int,
) -> float:
    """Tokens per millisecond over `steps` steps, after as many."""
    tokens = seconds = 0.0
    late: list[Callable[[], None]] = []
    for step in range(2 * steps):
        choice = policy.choose(slots.requests)
        if divided is None:
            widths = uniform(choice, slots.batch)
        else:
            padded = captured_width(choice.width, slots.batch, slots.load.full)
            widths = divided.widths(choice._replace(width=padded), slots.batch)
        new = [min(pair) for pair in zip(slots.acceptable(), widths, strict=True)]
        took = seconds_of(choice, slots.batch, sum(widths))
        if step >= steps:
            tokens, seconds = tokens + sum(new), seconds + took
        survivals = None
        if divided is not None:
            divided.learn(widths, new)
            survivals = divided.due_survivals()
        late.append(
            partial(_report, policy, slots.requests, (choice, widths, new), took, survivals)
        )
        if len(late) > 1:
            late.pop(0)()
    return tokens / seconds / 1000


def _report(
    policy: WidthPolicy,
    requests: Sequence[Request],
    step: tuple[WidthChoice, list[int], list[int]],
    seconds: float,
    survivals: list[list[float]] | None,
) -> None:
    choice, widths, new = step
    outcomes = zip(requests, widths, new, strict=True)
    policy.record_outcomes([VerifyOutcome(r, width - 1, n - 1) for r, width, n in outcomes])
    policy.record_step_time(len(requests), choice, seconds)
    if survivals is not None and isinstance(policy, RaggedWidth):
        policy.record_survivals(requests, survivals)


def main() -> None:
    for name, means in MIXES.items():
        for full, is_random in ((16, False), (8, False), (16, True)):
            kind = "each draft by chance" if is_random else "the mean in every step"
            print(f"\n{name}; {full} tokens; {kind}")
            print("batch   plain    full  single  ragged  over best  over plain")
            for batch in BATCHES:
                c = cell(Load(means, full, is_random), batch, 800 if batch < 64 else 200)
                speeds = "".join(f"{1000 * x:8.0f}" for x in (c.plain, c.full, c.single, c.ragged))
                print(f"{batch:5}{speeds}{c.ratio:11.3f}{c.ragged / c.plain:12.2f}", flush=True)


if __name__ == "__main__":
    main()
