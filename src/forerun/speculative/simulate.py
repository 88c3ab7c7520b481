"""For benchmarks: a forced accept length after a real draft and a real verify pass."""

from __future__ import annotations

import torch

from forerun.core.errors import ConfigError
from forerun.kernels.speculation.accept import SimulatedAcceptance


def simulated_acceptance(
    mean: float, width: int, slots: int, device: torch.device
) -> SimulatedAcceptance:
    """A pace of `mean` tokens a step, where a step verifies up to `width` rows.

    Raises:
        ConfigError: no step can commit so many, or so few.
    """
    if not 1 <= mean <= width:
        raise ConfigError(
            f"speculative_simulate_accept_length must be between 1 and the {width} rows that a"
            f" step verifies, got {mean}."
        )
    pace = SimulatedAcceptance.of(mean, slots, device)
    # Requests are not in step: with a mean of 1.2 each commits 2 tokens in another fifth step.
    torch.arange(slots, out=pace.steps)
    return pace
