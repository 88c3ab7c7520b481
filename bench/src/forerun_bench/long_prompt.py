"""What requests that decode notice of a long prompt, and a short prompt behind it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forerun import SamplingParams
from forerun.core.request import Request
from forerun.engine.engine import Engine
from forerun.evals.timing import median, quantile
from forerun_bench.one_batch import random_prompts

RUNNING_LEN, SHORT_LEN = 128, 32  # prompt tokens
WARM_UP_TOKENS, ALONE_STEPS = 8, 50


@dataclass(frozen=True)
class LongPrompt:
    """One bound. A gap is the time between two steps that bring a running request tokens."""

    step_ms: int
    alone: float  # median gap without the prompts; seconds, as all below
    p50: float  # gaps from the submission of the prompts to both first tokens
    p99: float
    longest: float
    first_token: float  # of the long prompt; medians over the runs
    short_first_token: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Run:
    """One repetition; seconds."""

    alone: list[float]
    gaps: list[float]
    first_tokens: tuple[float, float]  # long, short


def run_once(engine: Engine, running: int, input_len: int, step_ms: int) -> Run:
    """`running` requests decode; then a long prompt and a short one come, in this order.

    Raises:
        RequestError: the requests do not fit into the context or the K/V pool.
    """
    engine.flush_cache()
    engine.scheduler.limit_mixed_steps(step_ms / 1000)
    vocab, context = engine.info.vocab_size, engine.limits.context_length
    # Other prompts in every run: nothing is cached, and drafts are accepted as always.
    prompts = random_prompts(vocab, running + 1, max(RUNNING_LEN, input_len))
    params = SamplingParams(temperature=0.0, max_new_tokens=context - RUNNING_LEN, ignore_eos=True)
    decoding = [engine.make_request(ids[:RUNNING_LEN], params) for ids in prompts[1:]]
    once = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
    asked = [
        engine.make_request(prompts[0][:input_len], once),
        engine.make_request(prompts[0][-SHORT_LEN:], once),
    ]
    for request in decoding:
        engine.submit(request)
    while min(len(request.output) for request in decoding) < WARM_UP_TOKENS:
        engine.step()
    steps = iter(range(ALONE_STEPS))
    alone = _gaps(engine, decoding, lambda: next(steps, None) is None)
    begin = time.monotonic()
    for request in asked:
        engine.submit(request)
    gaps = _gaps(engine, decoding, lambda: all(request.output for request in asked))
    for request in (*decoding, *asked):
        engine.drop(request, "measured")
    engine.drain()
    long, short = (float(request.first_token_at or begin) - begin for request in asked)
    return Run(alone, gaps, (long, short))


def _gaps(engine: Engine, decoding: Sequence[Request], ended: Callable[[], bool]) -> list[float]:
    """Steps until `ended`."""
    last = dict.fromkeys(decoding, time.monotonic())
    lengths = {request: len(request.output) for request in decoding}
    gaps = []
    while not ended():
        engine.step()
        now = time.monotonic()
        for request in decoding:
            if len(request.output) > lengths[request]:
                gaps.append(now - last[request])
                last[request], lengths[request] = now, len(request.output)
    return gaps


def summary(step_ms: int, runs: Sequence[Run]) -> LongPrompt:
    gaps = [gap for run in runs for gap in run.gaps]
    return LongPrompt(
        step_ms=step_ms,
        alone=median([gap for run in runs for gap in run.alone]),
        p50=quantile(gaps, 0.5),
        p99=quantile(gaps, 0.99),
        longest=max(gaps),
        first_token=median([run.first_tokens[0] for run in runs]),
        short_first_token=median([run.first_tokens[1] for run in runs]),
    )
