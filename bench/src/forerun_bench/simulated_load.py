"""A served load on an engine whose device is simulated: what scheduling alone makes of step costs.

Engine and scheduler are the real ones. The executor computes nothing: it knows how long each step
takes, and a clock of its own goes on by that. So the figures of a load are the same on every
machine, and differ only where scheduling does.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from forerun.config.engine_config import EngineConfig
from forerun.core.executor import ExecutorInfo
from forerun.core.grammar import Grammar
from forerun.core.plan import Limits, StepPlan, StepResult
from forerun.core.profile import ProfileParams
from forerun.core.request import Request, State
from forerun.core.sampling_params import SamplingParams
from forerun.engine.engine import Engine
from forerun_bench.serving.arrivals import arrival_times

PAGE = 64
TOKEN = 1  # every sampled token


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step's parts, linear between the given points."""

    decode: tuple[tuple[int, float], ...]  # by requests
    prefill: tuple[tuple[int, float], ...]  # by prompt tokens
    launch: float = 0.001  # of the host, for each step
    launch_prompts: float = 0.0  # and for one with prompts: their kernels are launched one by one
    arrive: float = 0.002  # from a client to the engine
    answer: float = 0.001  # from a step's result to the client

    def of(self, plan: StepPlan) -> float:
        """A step that decodes and computes prompt tokens does so one after the other."""
        tokens = sum(chunk.num_tokens for chunk in plan.prefill)
        return _at(self.decode, len(plan.decode)) + _at(self.prefill, tokens)


# Qwen3-8B in bfloat16 on an H200, measured under load: plain steps, prompts of 1,024 tokens.
H200_8B = StepCosts(
    decode=((1, 0.0039), (16, 0.0047), (32, 0.0053), (256, 0.0176)),
    prefill=((1, 0.004), (128, 0.0055), (1024, 0.0235), (8192, 0.178)),
    launch_prompts=0.004,  # in captured pieces; one by one 0.022
)


def _at(points: Sequence[tuple[int, float]], count: int) -> float:
    if count == 0:
        return 0.0
    return float(np.interp(count, [x for x, _ in points], [y for _, y in points]))


class Clock:
    """Simulated time in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class _Pending:
    clock: Clock
    end: float
    value: StepResult

    def result(self) -> StepResult:
        late = self.clock.now >= self.end
        self.clock.now = max(self.clock.now, self.end)
        return replace(self.value, late=late)


class SimulatedExecutor:
    """Takes the time that `costs` say, and samples the same token everywhere."""

    def __init__(self, costs: StepCosts, chunk: int, slots: int, clock: Clock) -> None:
        limits = Limits(
            slots=slots,
            page_size=PAGE,
            max_verify_tokens=1,
            kv_reserve=1,
            chunked_prefill_size=chunk,
            context_length=8192,
            overlap_depth=1,
        )
        self.info = ExecutorInfo(
            limits=limits,
            num_pages=1 + slots * limits.context_length // PAGE,
            num_snapshots=None,
            vocab_size=8,
            eos_token_ids=(),
            prefix_lookahead=0,
            verify_widths=(1,),
        )
        self.steps: list[tuple[StepPlan, float]] = []
        self._costs, self._clock, self._free_at = costs, clock, 0.0

    def launch(self, plan: StepPlan) -> _Pending:
        seconds = self._costs.of(plan)
        self._clock.now += self._costs.launch
        begin = max(self._free_at, self._clock.now)
        self._clock.now += self._costs.launch_prompts * bool(plan.prefill)
        self._free_at = max(begin + seconds, self._clock.now)  # kernels run as they are launched
        seconds = self._free_at - begin
        self.steps.append((plan, seconds))
        decode = [[TOKEN] for _ in plan.decode]
        prefill = [TOKEN if chunk.last else None for chunk in plan.prefill]
        return _Pending(self._clock, self._free_at, StepResult(decode, prefill, seconds))

    def compile_grammar(self, grammar: Grammar, client: str = "") -> None:
        raise NotImplementedError

    def prepare_grammars(self) -> None:
        raise NotImplementedError

    def can_resume(self, rid: str) -> bool:
        return True

    def disable_drafts(self) -> None:
        raise NotImplementedError

    def simulate_accept_lengths(self, means: Sequence[float]) -> None:
        raise NotImplementedError

    def start_profile(self, params: ProfileParams) -> None:
        raise NotImplementedError

    def stop_profile(self) -> None:
        raise NotImplementedError

    def check_profile(self, name: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        return None


@dataclass(frozen=True)
class SimulatedLoad:
    """Requests of one length, at given times or a fixed number at a time."""

    name: str
    requests: int
    concurrency: int | None = None  # None: all
    rate: float = float("inf")  # Poisson arrivals per second
    input_len: int = 1024
    output_len: int = 256


LOADS = (
    SimulatedLoad("256 at once", 256),
    SimulatedLoad("16 at a time", 160, concurrency=16),
    SimulatedLoad("1 at a time", 12, concurrency=1),
    SimulatedLoad("Poisson, 16.8 req/s", 512, rate=16.8),
)


@dataclass
class _Client:
    """One request as its client sees it."""

    sent: float
    request: Request
    times: list[float] = field(default_factory=list)  # of its tokens


@dataclass(frozen=True)
class Report:
    """What the clients of a load have seen, in seconds."""

    tokens_per_s: float
    ttft: dict[int, float]  # by percentile
    itl: dict[int, float]
    longest_gap: float  # between two tokens of a request
    e2e: float  # mean

    @classmethod
    def of(cls, clients: Sequence[_Client]) -> Report:
        ttft = [c.times[0] - c.sent for c in clients]
        gaps = [b - a for c in clients for a, b in itertools.pairwise(c.times)]
        tokens = sum(len(c.times) for c in clients)
        span = max(c.times[-1] for c in clients) - min(c.sent for c in clients)
        e2e = [c.times[-1] - c.sent for c in clients]
        return cls(
            tokens / span, _percentiles(ttft), _percentiles(gaps), max(gaps), sum(e2e) / len(e2e)
        )


def _percentiles(values: Sequence[float]) -> dict[int, float]:
    return {p: float(np.percentile(values, p)) for p in (50, 90, 99)}


def simulate(
    load: SimulatedLoad,
    costs: StepCosts = H200_8B,
    chunk: int = 8192,
    seed: int = 0,
    **settings: object,
) -> Report:
    """Runs the load to its end.

    Args:
        chunk: `chunked_prefill_size`.
        settings: more of `EngineConfig`.
    """
    clock = Clock()
    executor = SimulatedExecutor(costs, chunk, 256, clock)
    config = EngineConfig(disable_radix_cache=True, **settings)  # type: ignore[arg-type]
    engine = Engine(config, executor, clock)
    return Report.of(_Run(engine, clock, costs, load, seed).run())


class _Run:
    """The loop of an engine process, between clients that send and read."""

    def __init__(
        self, engine: Engine, clock: Clock, costs: StepCosts, load: SimulatedLoad, seed: int
    ) -> None:
        self._engine, self._clock, self._costs, self._load = engine, clock, costs, load
        times = arrival_times(load.requests, load.rate, 1.0, seed)
        first = load.concurrency or load.requests
        # A client needs a moment for each request, so that they do not arrive at once.
        self._due = [(at + 0.0002 * i, i) for i, at in enumerate(times[:first])]
        heapq.heapify(self._due)
        self._next = itertools.count(first)
        self._running: list[_Client] = []
        self._ended: list[_Client] = []

    def run(self) -> list[_Client]:
        engine, clock = self._engine, self._clock
        while self._due or self._running:
            self._take()
            if not self._running:
                clock.now = max(clock.now, self._due[0][0] + self._costs.arrive)
                continue
            while (seconds := engine.spare_seconds()) > 0:
                arrival = self._due[0][0] + self._costs.arrive if self._due else math.inf
                clock.now = min(clock.now + seconds, max(arrival, clock.now))
                self._take()
            engine.step()
            self._read()
        return self._ended

    def _take(self) -> None:
        """Requests that have arrived at the engine."""
        while self._due and self._due[0][0] + self._costs.arrive <= self._clock.now:
            sent, number = heapq.heappop(self._due)
            params = SamplingParams(
                temperature=0.0, max_new_tokens=self._load.output_len, ignore_eos=True
            )
            prompt = [2 + number % 6] * self._load.input_len
            request = self._engine.make_request(prompt, params, rid=str(number))
            self._engine.submit(request)
            self._running.append(_Client(sent, request))

    def _read(self) -> None:
        """The tokens of the last step; who has all sends the next request."""
        at = self._clock.now + self._costs.answer
        for client in list(self._running):
            new = len(client.request.output) - len(client.times)
            client.times += [at] * new
            if client.request.state is State.FINISHED:
                self._engine.close_request(client.request)
                self._running.remove(client)
                self._ended.append(client)
                if self._load.concurrency is not None:
                    number = next(self._next)
                    if number < self._load.requests:
                        heapq.heappush(self._due, (at + 0.0002, number))


def table(reports: dict[str, Report]) -> str:
    """Markdown, in milliseconds."""
    lines = ["| load | output tok/s | TTFT p50, p99 ms | ITL p50, p99, max ms | E2E ms |"]
    lines.append("|---|---:|---:|---:|---:|")
    for name, r in reports.items():
        ttft = ", ".join(f"{1000 * r.ttft[p]:.0f}" for p in (50, 99))
        itl = ", ".join(f"{1000 * v:.1f}" for v in (r.itl[50], r.itl[99], r.longest_gap))
        lines.append(f"| {name} | {r.tokens_per_s:,.0f} | {ttft} | {itl} | {1000 * r.e2e:,.0f} |")
    return "\n".join(lines)
