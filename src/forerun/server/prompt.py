"""What an endpoint asks to be completed."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.core.logprobs import LogprobParams
from forerun.core.pooling import Pooling
from forerun.core.sampling_params import SamplingParams
from forerun.core.scheduling_params import DEFAULT_SCHEDULING, SchedulingParams


@dataclass(frozen=True)
class Prompt:
    """Token ids to complete, n times."""

    ids: list[int]
    params: SamplingParams
    n: int = 1
    rid: str | None = None  # default: a new one
    logprobs: LogprobParams | None = None
    scheduling: SchedulingParams = DEFAULT_SCHEDULING
    pooling: Pooling | None = None  # what it returns instead of text
    replica: int | None = None  # that has to run it; default: as requests are routed
