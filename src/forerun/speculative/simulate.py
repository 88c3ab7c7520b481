# mypy: allow-untyped-defs, allow-incomplete-defs
"""Simulated acceptance, for benchmarks: a chosen accept length after a real draft and verify pass.

The step computes `num_committed` here instead of comparing drafts with samples; everything else
runs as usual. The text is not that of the target.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.core.errors import ConfigError
from forerun.kernels.runtime.jit import jit, tl, use_triton
from forerun.kernels.runtime.pdl import pdl_options

_FRACTION_BITS = 32  # of `SimulatedAcceptance.mean`
_ROUNDING = 1 << 16  # so that whole multiples of a mean like 1.2 do not fall short of themselves


@dataclass(frozen=True)
class SimulatedAcceptance:
    """How many tokens each step of a slot commits, whatever the drafts are.

    Step i of a slot commits floor((i + 1) * mean) - floor(i * mean), in fixed point, and at most
    the tokens that it verifies. Captured steps read `mean` from the device: `set` takes effect at
    the next replay.
    """

    steps: Tensor  # [S] int64, steps that a slot has made; incremented on the device
    mean: Tensor  # [1] int64, tokens per step * 2^32

    @classmethod
    def of(
        cls, mean: float, num_verify_tokens: int, num_slots: int, device: torch.device
    ) -> SimulatedAcceptance:
        """Slots start at different steps: with mean 1.2, each commits 2 in another fifth step.

        Raises:
            ConfigError: no step can commit `mean` tokens.
        """
        if not 1 <= mean <= num_verify_tokens:
            raise ConfigError(
                "speculative_simulate_accept_length must be between 1 and the"
                f" {num_verify_tokens} tokens that a step verifies, got {mean}."
            )
        steps = torch.arange(num_slots, dtype=torch.int64, device=device)
        simulated = cls(steps, steps.new_zeros(1))
        simulated.set(mean)
        return simulated

    def set(self, mean: float) -> None:
        """Changes the mean from the next step on, captured or not."""
        self.mean.fill_(round(mean * 2**_FRACTION_BITS))

    def num_committed(self, slots: Tensor, num_verify_tokens: int) -> Tensor:
        """slots [B] int64 -> [B] int32 in 1 ... num_verify_tokens; counts the slots' steps on."""
        if not use_triton(slots):
            return self.num_committed_ref(slots, num_verify_tokens)
        out = torch.empty(slots.shape, dtype=torch.int32, device=slots.device)
        _simulate[(len(slots),)](
            slots, self.steps, self.mean, out, num_verify_tokens,
            FRACTION_BITS=_FRACTION_BITS, ROUNDING=_ROUNDING, num_warps=1, **pdl_options(slots),
        )  # fmt: skip
        return out

    def num_committed_ref(self, slots: Tensor, num_verify_tokens: int) -> Tensor:
        """Reference implementation of `num_committed`."""
        steps = self.steps[slots]
        self.steps[slots] = steps + 1
        before = (steps * self.mean + _ROUNDING) >> _FRACTION_BITS
        after = ((steps + 1) * self.mean + _ROUNDING) >> _FRACTION_BITS
        return (after - before).int().clamp_max(num_verify_tokens)


@jit
def _simulate(
    slots, steps_ptr, mean_ptr, out, num_verify_tokens,
    FRACTION_BITS: tl.constexpr, ROUNDING: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA per request."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request)
    steps, mean = tl.load(steps_ptr + slot), tl.load(mean_ptr)
    before = (steps * mean + ROUNDING) >> FRACTION_BITS
    after = ((steps + 1) * mean + ROUNDING) >> FRACTION_BITS
    tl.store(out + request, tl.minimum((after - before).to(tl.int32), num_verify_tokens))
    tl.store(steps_ptr + slot, steps + 1)
