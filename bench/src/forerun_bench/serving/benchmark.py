"""A benchmark from warm-up to figures: one run, or a sweep of request rates."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final

import msgspec

from forerun.core.errors import ConfigError
from forerun.platform.open_files import allow_connections
from forerun_bench.serving.arrivals import arrival_times
from forerun_bench.serving.backends import RequestOptions, make_backend
from forerun_bench.serving.client import Client, Live
from forerun_bench.serving.config import LoadConfig
from forerun_bench.serving.dataset import Prompt, load_prompts
from forerun_bench.serving.http import Endpoint, RequestFailed
from forerun_bench.serving.load import run_load
from forerun_bench.serving.metrics import Run
from forerun_bench.serving.server import Server, ServerInfo
from forerun_bench.serving.vocabulary import Vocabulary

WARMUP_TOKENS: Final = 32  # at most, of a warm-up request

Watch = Callable[[float, Live, float], None]  # request rate, counters, seconds since the start


@dataclass(frozen=True)
class Benchmark:
    """`runs` in their order; the first of a sweep is saturation."""

    runs: list[Run] = field(default_factory=list)
    server: ServerInfo | None = None
    warmup_failure: RequestFailed | None = None  # nothing was measured then

    @property
    def failed(self) -> int:
        return sum(len(run.load.outcomes) - len(run.completed) for run in self.runs)


async def benchmark(config: LoadConfig, watch: Watch) -> Benchmark:
    """Measures the server at `config.url`.

    Raises:
        ConfigError: bad settings, no server, or nothing to send.
    """
    config.check()
    key = config.api_key or os.environ.get("OPENAI_API_KEY")
    endpoint = await Endpoint.parse(config.url, key, config.timeout).connected()
    server = Server(endpoint)
    info = await server.info()
    model = config.model or info.model
    if model is None and config.backend != "sglang":
        raise ConfigError("The server does not list its models (/v1/models). Give --model.")
    options = RequestOptions(
        model=model,
        stream=not config.disable_stream,
        ignore_eos=not config.disable_ignore_eos,
        extra=config.extra(),
    )
    bench = _Bench(config, endpoint, server, options, info, watch)
    failure = await bench.warm_up()
    if failure is not None:
        return Benchmark(server=info, warmup_failure=failure)
    if not config.sweep:
        return Benchmark([await bench.run(config.request_rate)], info)
    runs = [await bench.run(math.inf)]
    saturation = runs[0].request_throughput
    for percent in config.sweep if saturation else ():
        runs.append(await bench.run(saturation * percent / 100))
    return Benchmark(runs, info)


class _Bench:
    def __init__(
        self,
        config: LoadConfig,
        endpoint: Endpoint,
        server: Server,
        options: RequestOptions,
        info: ServerInfo,
        watch: Watch,
    ) -> None:
        self._config, self._server, self._options = config, server, options
        self._backend = make_backend(config.backend)
        self._client = Client(endpoint, self._backend, options.stream)
        self._vocabulary = cache(lambda: Vocabulary.load(config.tokenizer or info.path))
        self._watch = watch
        self._runs = 0

    async def warm_up(self) -> RequestFailed | None:
        """Sends the warm-up requests one after the other; the failure of the first that fails."""
        count = self._config.warmup_requests
        if not count:
            return None
        few = replace(self._config, num_prompts=count)
        for prompt in load_prompts(few, self._vocabulary, run=-1):
            short = Prompt(prompt.content, min(prompt.output_len, WARMUP_TOKENS))
            (body,) = self._bodies([short])
            outcome = await self._client.send(body, 0.0, Live(total=1))
            if outcome.failure is not None:
                return outcome.failure
        return None

    async def run(self, rate: float) -> Run:
        """All requests at one rate."""
        config = self._config
        bodies = self._bodies(load_prompts(config, self._vocabulary, self._runs))
        arrivals = arrival_times(
            len(bodies), rate, config.burstiness, seed=config.seed + self._runs
        )
        self._runs += 1
        if config.flush_cache:
            await self._server.flush_cache()
        allow_connections(len(bodies))
        before = await self._server.counters()
        live = Live(total=len(bodies))
        load = await run_load(
            lambda number, due: self._client.send(bodies[number], due, live),
            arrivals,
            live,
            config.max_concurrency,
            lambda live, seconds: self._watch(rate, live, seconds),
        )
        acceptance = await self._server.acceptance(before, load.outcomes)
        return Run(rate, load, self._options.stream, config.goals(), acceptance)

    def _bodies(self, prompts: Sequence[Prompt]) -> list[bytes]:
        """Encoded before the run: no work of the client while it measures."""
        encode = msgspec.json.encode
        return [encode(self._backend.body(prompt, self._options)) for prompt in prompts]
