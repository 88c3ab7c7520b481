"""When requests arrive: seconds after the start of the run."""

from __future__ import annotations

import math

import numpy as np


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """`count` arrival times, not decreasing; the first is 0.

    The gaps are gamma-distributed with mean 1 / rate and shape `burstiness` (coefficient of
    variation 1 / sqrt(burstiness)), as in vLLM's benchmark: 1 is a Poisson process, less gives
    bursts, more is more even. Rate inf: all at 0.
    """
    if math.isinf(rate):
        return [0.0] * count
    rng = np.random.default_rng(seed)
    gaps = rng.gamma(burstiness, 1.0 / (rate * burstiness), size=count - 1)
    return [0.0, *(float(at) for at in np.cumsum(gaps))]
