"""Time to the first token, compared with the time of its kernels on the GPU."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from forerun import SamplingParams
from forerun.engine.engine import Engine
from forerun.evals.timing import median

WARM_UPS = 3


@dataclass(frozen=True)
class FirstToken:
    """One prompt length; seconds are medians over the runs."""

    input_len: int
    seconds: float  # from the submission until every request's first token is on the host
    gpu_seconds: float | None  # time in which their kernels run; None: not on a GPU
    batch_size: int = 1  # requests at once

    @property
    def ratio(self) -> float | None:
        """Time to the first token over GPU time."""
        return None if not self.gpu_seconds else self.seconds / self.gpu_seconds

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


def first_token(
    engine: Engine, input_len: int, repetitions: int, batch_size: int = 1
) -> FirstToken:
    """`batch_size` requests of random tokens at once on an idle engine, without a prefix hit."""
    rng = random.Random(input_len)
    vocab = engine.info.vocab_size
    params = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)

    def run() -> float:
        engine.flush_cache()
        requests = [
            engine.make_request([rng.randrange(vocab) for _ in range(input_len)], params)
            for _ in range(batch_size)
        ]
        begin = time.perf_counter()
        for request in requests:
            engine.submit(request)
        while not all(request.output for request in requests):
            engine.step()
        seconds = time.perf_counter() - begin
        while engine.has_work:
            engine.step()
        for request in requests:
            engine.close_request(request)
        return seconds

    for _ in range(WARM_UPS):
        run()
    seconds = median([run() for _ in range(repetitions)])
    if not torch.cuda.is_available():
        return FirstToken(input_len, seconds, None, batch_size)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for _ in range(repetitions):
            run()
        torch.cuda.synchronize(engine.info.explain["device"])
    kernels = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type.name == "CUDA"
    ]
    gpu_seconds = covered(kernels) * 1e-6 / repetitions
    return FirstToken(input_len, seconds, gpu_seconds, batch_size)


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals.

    With programmatic dependent launch, a kernel starts while its predecessor runs and waits for it,
    so a sum of durations would count that time twice.
    """
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total
