"""The same requests through a server's streams and through an engine in this process.

Closed loop: a fixed number of requests run at once, and the next one starts when one has ended.
Lengths of outputs are spread, so that requests end at different times. Greedy; EOS is ignored.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import msgspec

from forerun import SamplingParams
from forerun.core.errors import ConfigError
from forerun.core.request import Request, State
from forerun.engine.engine import Engine
from forerun.evals.timing import interleaved, median
from forerun_bench.serving.backends import RequestOptions, make_backend
from forerun_bench.serving.client import Client, Live
from forerun_bench.serving.dataset import Prompt
from forerun_bench.serving.http import Endpoint
from forerun_bench.serving.load import run_load
from forerun_bench.serving.server import Server

IN_PROCESS, HTTP = "in_process", "http"
WARM_UP_TOKENS: Final = 16
REQUEST_SECONDS: Final = 3600.0


@dataclass(frozen=True)
class Workload:
    """Requests, and how many of them run at once."""

    prompts: Sequence[Prompt]  # token ids
    concurrency: int

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], output_len: int, concurrency: int) -> Workload:
        """Output lengths are uniform from half of `output_len` to all of it."""
        rng = random.Random(0)
        lengths = [rng.randint(-(-output_len // 2), output_len) for _ in prompts]
        pairs = zip(prompts, lengths, strict=True)
        return cls([Prompt(tuple(ids), length) for ids, length in pairs], concurrency)

    @property
    def warm_up(self) -> Workload:
        """A few tokens of the first requests."""
        few = self.prompts[: self.concurrency]
        short = [Prompt(p.content, min(p.output_len, WARM_UP_TOKENS)) for p in few]
        return Workload(short, self.concurrency)


@dataclass(frozen=True)
class Speed:
    """One run."""

    tokens: int
    seconds: float  # from the first request to the end of the last one
    host_gap: float | None  # fraction of the decode steps; None: there were none

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Comparison:
    """All runs of one workload, in pairs."""

    workload: Workload
    in_process: Sequence[Speed]
    http: Sequence[Speed]

    @property
    def ratio(self) -> float:
        """Speed over HTTP ÷ in process, median of the pairs."""
        pairs = zip(self.http, self.in_process, strict=True)
        return median([over.tok_s / inside.tok_s for over, inside in pairs])

    def as_dict(self) -> dict[str, Any]:
        return {
            "concurrency": self.workload.concurrency,
            "num_prompts": len(self.workload.prompts),
            IN_PROCESS: _summary(self.in_process),
            HTTP: _summary(self.http),
            "ratio": self.ratio,
        }


def _summary(runs: Sequence[Speed]) -> dict[str, Any]:
    gaps = [run.host_gap for run in runs if run.host_gap is not None]
    return {
        "tok_s": median([run.tok_s for run in runs]),
        "host_gap": median(gaps) if gaps else None,
        "runs": [asdict(run) | {"tok_s": run.tok_s} for run in runs],
    }


def compare(engine: Engine, url: str, backend: str, load: Workload, repetitions: int) -> Comparison:
    """Runs the workload both ways, warmed up, in turns, with empty prefix caches.

    Raises:
        ConfigError: the server cannot be used, or a request failed.
    """
    runs = {IN_PROCESS: partial(in_process, engine), HTTP: partial(over_http, url, backend)}
    for run in runs.values():
        run(load.warm_up)
    timed = interleaved({name: partial(run, load) for name, run in runs.items()}, repetitions)
    speeds = {name: [one.value for one in each] for name, each in timed.items()}
    return Comparison(load, speeds[IN_PROCESS], speeds[HTTP])


def in_process(engine: Engine, load: Workload) -> Speed:
    """Steps an idle engine by hand. No text is made."""
    engine.flush_cache()
    requests = [_request(engine, prompt) for prompt in load.prompts]
    waiting = iter(requests)
    running: set[str] = set()

    def start(count: int) -> None:
        for _, request in zip(range(count), waiting, strict=False):
            engine.submit(request)
            running.add(request.rid)

    before = engine.metrics()
    gap, decode = before.gap_seconds, before.decode_seconds.total
    begin = time.perf_counter()
    start(load.concurrency)
    while running:
        ended = [r for r in engine.step() if r.state is State.FINISHED and r.rid in running]
        for request in ended:
            engine.close_request(request)
            running.remove(request.rid)
        start(len(ended))
    seconds = time.perf_counter() - begin
    engine.drain()
    after = engine.metrics()
    host_gap = _fraction(after.gap_seconds - gap, after.decode_seconds.total - decode)
    return Speed(sum(len(request.output) for request in requests), seconds, host_gap)


def _request(engine: Engine, prompt: Prompt) -> Request:
    params = SamplingParams(temperature=0.0, max_new_tokens=prompt.output_len, ignore_eos=True)
    return engine.make_request([int(token) for token in prompt.content], params)


def over_http(url: str, backend: str, load: Workload) -> Speed:
    """Streams the answers of an idle server.

    Raises:
        ConfigError: the server cannot be used, or a request failed.
    """
    return asyncio.run(_over_http(url, backend, load))


async def _over_http(url: str, backend: str, load: Workload) -> Speed:
    endpoint = await Endpoint.parse(url, None, REQUEST_SECONDS).connected()
    server, api = Server(endpoint), make_backend(backend)
    options = RequestOptions(
        model=(await server.info()).model, stream=True, ignore_eos=True, extra={}
    )
    bodies = [msgspec.json.encode(api.body(prompt, options)) for prompt in load.prompts]
    client, live = Client(endpoint, api, stream=True), Live(total=len(bodies))
    await server.flush_cache()
    before = await server.step_times()
    done = await run_load(
        lambda number, due: client.send(bodies[number], due, live),
        [0.0] * len(bodies),
        live,
        load.concurrency,
    )
    for outcome in done.outcomes:
        if outcome.failure is not None:
            raise ConfigError(f"A request failed: {outcome.failure}.")
    after = await server.step_times(settled=True)
    host_gap = None
    if before is not None and after is not None:
        host_gap = _fraction(after.gap - before.gap, after.decode - before.decode)
    return Speed(sum(outcome.output_tokens for outcome in done.outcomes), done.seconds, host_gap)


def _fraction(gap: float, decode: float) -> float | None:
    return gap / decode if decode > 0 else None
