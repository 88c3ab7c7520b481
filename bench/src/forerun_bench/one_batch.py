"""One static batch, plain and speculative: prefill time, step time, decoding speed.

All requests start together and generate the same number of tokens (EOS is ignored). Step times are
those of the whole batch: of the steps after the last prefill and until the first request ends.
Decoding speed includes the tail, in which the batch shrinks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from operator import lt
from typing import Any

from forerun import LLM, SamplingParams
from forerun.core.errors import RequestError
from forerun.core.request import State
from forerun.engine.engine import Engine
from forerun.evals.acceptance import Acceptance
from forerun.evals.timing import flush_caches, interleaved, median, quantile
from forerun.llm.output import meta_info
from forerun_bench.bounds import Bounds

MEASURED = "what is measured has ended"  # why the rest of a batch is aborted
FEW_STEPS = 5  # with fewer whole-batch steps in a run, medians are unreliable


@dataclass(frozen=True)
class Shape:
    """Requests of a batch, and the tokens of each."""

    batch_size: int
    input_len: int
    output_len: int


@dataclass(frozen=True)
class Trace:
    """One run. `steps[i]` is (seconds since the start, tokens generated so far) at result i."""

    steps: tuple[tuple[float, int], ...]
    prefill_steps: int  # results until every request had its first token
    whole_steps: int  # results until the first request ended
    output_ids: tuple[tuple[int, ...], ...]
    acceptance: Acceptance

    @property
    def prefill_seconds(self) -> float:
        return self.steps[self.prefill_steps - 1][0]

    @property
    def decode_tok_s(self) -> float:
        """Tokens after the prefill per second after the prefill; 0 if there are none."""
        return self._speed(len(self.steps))

    @property
    def whole_tok_s(self) -> float:
        """The same over the steps of the whole batch."""
        return self._speed(self.whole_steps)

    def _speed(self, until: int) -> float:
        (begin, before), (end, after) = self.steps[self.prefill_steps - 1], self.steps[until - 1]
        return (after - before) / (end - begin) if end > begin else 0.0

    @property
    def step_seconds(self) -> list[float]:
        """Times of the steps in which every request decodes and none prefills."""
        times = [at for at, _ in self.steps[self.prefill_steps - 1 : self.whole_steps]]
        return [after - before for before, after in pairwise(times)]


@dataclass(frozen=True)
class BatchTiming:
    """Medians over the repetitions; step times over all their whole-batch steps."""

    prefill_seconds: float
    step_seconds_median: float | None  # None: no step had the whole batch
    step_seconds_p90: float | None
    decode_tok_s: float
    steps: int  # whole-batch steps of a run, the fewest

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> BatchTiming:
        steps = [seconds for trace in traces for seconds in trace.step_seconds]
        return cls(
            prefill_seconds=median([t.prefill_seconds for t in traces]),
            step_seconds_median=median(steps) if steps else None,
            step_seconds_p90=quantile(steps, 0.9) if steps else None,
            decode_tok_s=median([t.decode_tok_s for t in traces]),
            steps=min(len(trace.step_seconds) for trace in traces),
        )

    @property
    def too_few_steps(self) -> bool:
        return self.steps < FEW_STEPS


@dataclass(frozen=True)
class OneBatch:
    """Results for one batch size; `spec` and what follows it are None without an algorithm."""

    batch_size: int
    input_len: int
    output_len: int
    plain: BatchTiming
    spec: BatchTiming | None = None
    acceptance: Acceptance | None = None
    identical: bool | None = None  # greedy texts, token for token
    plain_bounds: Bounds | None = None
    spec_bounds: Bounds | None = None

    @property
    def context(self) -> int:
        """K/V tokens of a request halfway through its decoding."""
        return self.input_len + self.output_len // 2

    @property
    def speedup(self) -> float | None:
        """Speed-up of decoding, without the prefill."""
        return self.spec.decode_tok_s / self.plain.decode_tok_s if self.spec else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "input_len": self.input_len,
            "output_len": self.output_len,
            "plain": _half(self.plain, self.plain_bounds),
            "spec": _half(self.spec, self.spec_bounds) if self.spec else None,
            "speedup": self.speedup,
            "accept_length": self.acceptance.accept_length if self.acceptance else None,
            "acceptance": self.acceptance.as_dict() if self.acceptance else None,
            "identical": self.identical,
        }


def _half(timing: BatchTiming, bounds: Bounds | None) -> dict[str, Any]:
    lower = bounds.as_dict(timing.step_seconds_median) if bounds else {}
    return {**asdict(timing), "too_few_steps": timing.too_few_steps, **lower}


def one_batch(
    plain: LLM,
    spec: LLM | None,
    prompts: Sequence[Sequence[int]],
    output_len: int,
    repetitions: int = 3,
    simulated: bool = False,
) -> OneBatch:
    """Runs both engines on the same prompts, warmed up, interleaved, with empty prefix caches.

    `simulated`: acceptance is simulated, so the texts differ and are not compared.

    Raises:
        RequestError: the prompts do not fit the engine.
    """
    llms = {"plain": plain} | ({"spec": spec} if spec is not None else {})
    runs = {name: partial(trace, llm.engine, prompts, output_len) for name, llm in llms.items()}
    flush = partial(flush_caches, *llms.values())
    for run in runs.values():
        flush()
        run()
    timed = interleaved(runs, repetitions, before=flush)
    traces = {name: [t.value for t in values] for name, values in timed.items()}
    plain_half = OneBatch(
        len(prompts), len(prompts[0]), output_len, plain=BatchTiming.of(traces["plain"])
    )
    if spec is None:
        return plain_half
    texts = {trace.output_ids for values in traces.values() for trace in values}
    return replace(
        plain_half,
        spec=BatchTiming.of(traces["spec"]),
        acceptance=traces["spec"][0].acceptance,
        identical=None if simulated else len(texts) == 1,
    )


def trace(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    output_len: int,
    *,
    ignore_eos: bool = True,
    only_whole: bool = False,
) -> Trace:
    """Runs one batch, stepping the engine by hand: to its end, or with `only_whole` until the first
    request has ended.

    Raises:
        RequestError: the engine gave up on a request, as on invalid logits.
    """
    params = SamplingParams(temperature=0.0, max_new_tokens=output_len, ignore_eos=ignore_eos)
    requests = [engine.make_request(list(ids), params) for ids in prompts]
    begin = time.perf_counter()
    for request in requests:
        engine.submit(request)
    steps: list[tuple[float, int]] = []
    prefill_steps = whole_steps = 0
    lengths = [0] * len(requests)
    while any(request.state is not State.FINISHED for request in requests):
        if not engine.step():
            continue  # launched; no result has come back yet
        before, lengths = lengths, [len(request.output) for request in requests]
        steps.append((time.perf_counter() - begin, sum(lengths)))
        if not prefill_steps:
            if all(lengths):
                prefill_steps = whole_steps = len(steps)
        elif whole_steps == len(steps) - 1 and all(map(lt, before, lengths)):
            whole_steps = len(steps)
        elif only_whole:
            engine.abort_all(MEASURED)
    while engine.has_work:
        engine.step()
    for request in requests:
        engine.close_request(request)
    for end in (request.finish for request in requests):
        if end is not None and end.type == "abort" and end.message != MEASURED:
            raise RequestError(f"A request has failed: {end.message}")
    return Trace(
        steps=tuple(steps),
        prefill_steps=prefill_steps,
        whole_steps=whole_steps,
        output_ids=tuple(tuple(r.output) for r in requests),
        acceptance=Acceptance.total(Acceptance.of(meta_info(r)) for r in requests),
    )


def random_prompts(vocab_size: int, count: int, length: int) -> list[list[int]]:
    """Uniformly random token ids, for random weights; the same in every run."""
    rng = random.Random(0)
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]
