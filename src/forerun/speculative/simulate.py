# mypy: allow-untyped-defs, allow-incomplete-defs
"""Simulated acceptance, for benchmarks: a chosen accept length after a real draft and verify pass.

The step computes `num_committed` here instead of comparing drafts with samples; everything else
runs as usual. The text is not that of the target.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.core.errors import ConfigError
from forerun.kernels.runtime.jit import jit, tl, triton, use_triton
from forerun.kernels.runtime.pdl import pdl_options

_FRACTION_BITS = 32  # of `SimulatedAcceptance.mean`
_ROUNDING = 1 << 16  # so that whole multiples of a mean like 1.2 do not fall short of themselves
_WORD = (1 << 32) - 1
# Of a hash of 32 bits (lowbias32, Wellons 2018), and of its input.
_FIRST, _SECOND, _SLOT, _OFFSET = 0x7FEB352D, 0x846CA68B, 0x9E3779B1, 0x5BD1E995


def accept_lengths(given: str | float) -> tuple[float, ...]:
    """The mean accept lengths that `speculative_simulate_accept_length` asks for: "1.3,5".

    Raises:
        ConfigError: it is no list of numbers.
    """
    try:
        return tuple(float(part) for part in str(given).split(","))
    except ValueError:
        raise ConfigError(
            "speculative_simulate_accept_length must be a number, or several as in 1.3,5; got"
            f" {given!r}."
        ) from None


@dataclass(frozen=True)
class SimulatedAcceptance:
    """How many tokens each step of a slot commits, whatever the drafts are.

    Of several means, requests have one each, in turn as they are admitted (again after a
    preemption). Step i of a slot commits floor((i + 1) * mean) - floor(i * mean), in fixed point;
    or, by chance, as many drafts as are accepted if each is with one probability, given those
    before it. A step commits at most the tokens that it verifies. Captured steps read the tensors:
    `set` and `admit` take effect at the next replay.
    """

    num_verify_tokens: int  # most tokens that a step verifies of a request, W = K + 1
    steps: Tensor  # [S] int64, steps that a slot has made; incremented on the device
    mean: Tensor  # [S] int64, tokens per step * 2^32
    # [S, K] float32: the probabilities that drafts 1 to k of a step are all accepted; None: not by
    # chance.
    survival: Tensor | None = None
    turns: deque[float] = field(default_factory=deque)  # the means of the next requests

    @classmethod
    def of(
        cls,
        means: float | Sequence[float],
        num_verify_tokens: int,
        num_slots: int,
        device: torch.device,
        by_chance: bool = False,
    ) -> SimulatedAcceptance:
        """Slots start at different steps: with mean 1.2, each commits 2 in another fifth step.

        Raises:
            ConfigError: no step can commit so many tokens.
        """
        steps = torch.arange(num_slots, dtype=torch.int64, device=device)
        survival = None
        if by_chance and num_verify_tokens > 1:
            survival = torch.zeros(num_slots, num_verify_tokens - 1, device=device)
        simulated = cls(num_verify_tokens, steps, torch.zeros_like(steps), survival)
        simulated.set(means)
        return simulated

    def set(self, means: float | Sequence[float]) -> None:
        """Changes the means from the next step on, captured or not.

        Raises:
            ConfigError: no step can commit so many tokens.
        """
        given = (means,) if isinstance(means, float | int) else tuple(means)
        for mean in given:
            if not 1 <= mean <= self.num_verify_tokens:
                raise ConfigError(
                    "speculative_simulate_accept_length must be between 1 and the"
                    f" {self.num_verify_tokens} tokens that a step verifies, got {mean}."
                )
        self.turns.clear()
        self.turns.extend(given)
        self._write(range(len(self.mean)))
        self.turns.rotate(len(self.mean))

    def admit(self, slots: Sequence[int]) -> None:
        """Gives requests, which have these slots from now on, the next means."""
        if len(self.turns) > 1:
            self._write(slots)

    def _write(self, slots: Sequence[int]) -> None:
        means = [self.turns[i % len(self.turns)] for i in range(len(slots))]
        self.turns.rotate(-len(slots))
        fixed = torch.tensor([round(mean * 2**_FRACTION_BITS) for mean in means])
        device = self.mean.device
        at = torch.tensor(slots, dtype=torch.int64).to(device, non_blocking=True)
        self.mean[at] = fixed.to(device, non_blocking=True)
        if self.survival is not None:
            rows = {mean: _survival(mean, self.num_verify_tokens - 1) for mean in set(means)}
            survival = torch.tensor([rows[mean] for mean in means])
            self.survival[at] = survival.to(device, non_blocking=True)

    def num_committed(self, slots: Tensor, num_verify_tokens: int) -> Tensor:
        """slots [B] int64 -> [B] int32 in 1 ... num_verify_tokens; counts the slots' steps on."""
        if not use_triton(slots):
            return self.num_committed_ref(slots, num_verify_tokens)
        out = torch.empty(slots.shape, dtype=torch.int32, device=slots.device)
        drafts = 1 if self.survival is None else self.survival.shape[1]
        _simulate[(len(slots),)](
            slots, self.steps, self.mean, self.survival, out, num_verify_tokens, drafts,
            FRACTION_BITS=_FRACTION_BITS, ROUNDING=_ROUNDING,
            DRAFTS=triton.next_power_of_2(drafts), FIRST=_FIRST, SECOND=_SECOND, SLOT=_SLOT,
            OFFSET=_OFFSET,
            num_warps=1, **pdl_options(slots),
        )  # fmt: skip
        return out

    def num_committed_ref(self, slots: Tensor, num_verify_tokens: int) -> Tensor:
        """Reference implementation of `num_committed`."""
        steps, mean = self.steps[slots], self.mean[slots]
        self.steps[slots] = steps + 1
        if self.survival is not None:
            accepted = (_draw(slots, steps).unsqueeze(1) < self.survival[slots]).sum(1)
            return (accepted + 1).int().clamp_max(num_verify_tokens)
        before = (steps * mean + _ROUNDING) >> _FRACTION_BITS
        after = ((steps + 1) * mean + _ROUNDING) >> _FRACTION_BITS
        return (after - before).int().clamp_max(num_verify_tokens)


def _survival(mean: float, drafts: int) -> list[float]:
    """Powers of the rate at which `drafts` drafts and the bonus token are `mean` tokens."""
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        enough = 1 + sum(rate**k for k in range(1, drafts + 1)) >= mean
        low, high = (low, rate) if enough else (rate, high)
    return [low**k for k in range(1, drafts + 1)]


def _draw(slots: Tensor, steps: Tensor) -> Tensor:
    """[B] float32, uniform in [0, 1): a hash of slot and step."""
    x = (steps + slots * _SLOT + _OFFSET) & _WORD
    x = ((x ^ (x >> 16)) * _FIRST) & _WORD
    x = ((x ^ (x >> 15)) * _SECOND) & _WORD
    return ((x ^ (x >> 16)) >> 8).float() * 2.0**-24


@jit
def _simulate(
    slots, steps_ptr, mean_ptr, survival, out, num_verify_tokens, num_drafts,
    FRACTION_BITS: tl.constexpr, ROUNDING: tl.constexpr, DRAFTS: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, SLOT: tl.constexpr, OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per request."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request)
    steps = tl.load(steps_ptr + slot)
    if survival is None:
        mean = tl.load(mean_ptr + slot)
        before = (steps * mean + ROUNDING) >> FRACTION_BITS
        after = ((steps + 1) * mean + ROUNDING) >> FRACTION_BITS
        tokens = (after - before).to(tl.int32)
    else:
        x = (steps + slot * SLOT + OFFSET).to(tl.uint32)
        x = (x ^ (x >> 16)) * FIRST
        x = (x ^ (x >> 15)) * SECOND
        drawn = ((x ^ (x >> 16)) >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
        k = tl.arange(0, DRAFTS)
        row = tl.load(survival + slot * num_drafts + k, mask=k < num_drafts, other=0.0)
        tokens = 1 + tl.sum((drawn < row).to(tl.int32), 0)
    tl.store(out + request, tl.minimum(tokens, num_verify_tokens))
    tl.store(steps_ptr + slot, steps + 1)
