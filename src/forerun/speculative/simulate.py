"""For benchmarks: a forced accept length after a real draft and a real verify pass."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.core.errors import ConfigError


class SimulatedAccept:
    """Commits `mean` tokens a step on average, spread evenly over the steps of a slot.

    Step i of a slot commits floor((i + 1) · mean) - floor(i · mean). All on the device, so that a
    captured step does the same.
    """

    def __init__(self, mean: float, width: int, slots: int, device: torch.device) -> None:
        if not 1 <= mean <= width:
            raise ConfigError(
                f"speculative_simulate_accept_length must be between 1 and the {width} rows that a"
                f" step verifies, got {mean}."
            )
        self._mean = mean
        self._steps = torch.zeros(slots, dtype=torch.float64, device=device)

    def __call__(self, slots: Tensor, width: int) -> Tensor:
        """slots [B] int64 -> [B] int32, what the step of this width commits."""
        steps = self._steps[slots]
        self._steps[slots] = steps + 1
        # The nudge keeps whole products of a mean like 1.2 from falling short.
        before, after = steps * self._mean + 1e-6, (steps + 1) * self._mean + 1e-6
        return (after.floor() - before.floor()).int().clamp_max(width)
