"""`/metrics`: Prometheus metrics under the names of SGLang and vLLM, and Forerun's own.

Nothing is asked of the engines: they send a snapshot a few times a second with their steps. What
replicas count is added up, those that have died included: no counter goes back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.responses import PlainTextResponse, Response

from forerun.core.plan import CONFIDENCE_BINS, ConfidenceCounts
from forerun.engine.metrics import EngineMetrics, Histogram
from forerun.engine.stats import accepted_per_position
from forerun.server.engines.client import EngineClient, EngineState
from forerun.server.engines.metrics import THROUGHPUT_SECONDS, ServerMetrics
from forerun.server.engines.replicas import Replicas
from forerun.server.service import Service

# The only format: prometheus_client writes the colons of names as underscores in OpenMetrics.
TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
MAX_PRIORITY_LABEL = 10
Labels = dict[str, str]


def prometheus_router(service: Service) -> APIRouter:
    router = APIRouter()
    registry = CollectorRegistry()
    registry.register(ServiceCollector(service))

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(generate_latest(registry), headers={"Content-Type": TEXT_FORMAT})

    return router


class ServiceCollector(Collector):
    """Makes metrics of a server's counters at every scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> list[Metric]:
        """The registry has no other collector whose names could be the same."""
        return []

    def collect(self) -> Iterator[Metric]:
        make, replicas = _Families(self._service.model_name), self._service.engine
        engine = replicas.engine_metrics()
        yield from _requests(make, replicas.metrics)
        yield from _server(make, replicas)
        yield from _replicas(make, replicas)
        yield from _queue(make, engine)
        if engine is not None:
            yield from _cache(make, engine)
            yield from _speculation(make, engine)
            yield from _steps(make, engine)


class _Families:
    """Metrics with the label that all of them have."""

    def __init__(self, model_name: str) -> None:
        self._model = model_name

    def gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, help, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def gauges(
        self, name: str, help: str, label: str, values: Iterable[tuple[str, float]]
    ) -> Metric:
        family = GaugeMetricFamily(name, help, labels=("model_name", label))
        for key, value in values:
            family.add_metric((self._model, key), value)
        return family

    def table(
        self,
        name: str,
        help: str,
        labels: tuple[str, str],
        values: Iterable[tuple[tuple[str, str], float]],
    ) -> Metric:
        """Gauges with two labels."""
        family = GaugeMetricFamily(name, help, labels=("model_name", *labels))
        for keys, value in values:
            family.add_metric((self._model, *keys), value)
        return family

    def counter(self, name: str, help: str, value: float) -> Metric:
        """Its samples are called `name` + "_total"."""
        family = CounterMetricFamily(name, help, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def counters(
        self,
        name: str,
        help: str,
        labels: tuple[str, ...],
        values: Iterable[tuple[tuple[str, ...], float]],
    ) -> Metric:
        family = CounterMetricFamily(name, help, labels=("model_name", *labels))
        for keys, value in values:
            family.add_metric((self._model, *keys), value)
        return family

    def histogram(self, name: str, help: str, *values: tuple[Labels, Histogram]) -> Metric:
        """One histogram per set of labels; all sets have the same ones."""
        names = tuple(values[0][0])
        family = HistogramMetricFamily(name, help, labels=("model_name", *names))
        for labels, histogram in values:
            family.add_metric(
                (self._model, *labels.values()), _cumulative(histogram), histogram.total
            )
        return family


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    buckets, below = [], 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), float(below)))
    return buckets


def _requests(make: _Families, metrics: ServerMetrics) -> Iterator[Metric]:
    for engine in ("sglang", "vllm"):
        yield make.counter(
            f"{engine}:prompt_tokens",
            "Prompt tokens of requests that got a token.",
            metrics.prompt_tokens,
        )
        yield make.counter(
            f"{engine}:generation_tokens", "Generated tokens.", metrics.generation_tokens
        )
        yield from _latencies(make, engine, metrics)
    yield make.gauge(
        "sglang:gen_throughput",
        f"Generated tokens per second, over the last {THROUGHPUT_SECONDS:.0f} s.",
        metrics.throughput.value(),
    )
    finished = metrics.finished
    yield make.counter("sglang:num_requests", "Ended requests.", finished.total())
    yield make.counter("sglang:num_aborted_requests", "Those ended early.", finished["abort"])
    yield make.counters(
        "vllm:request_success",
        "Ended requests by reason: stop, length, abort, or error if the engine failed.",
        ("finished_reason",),
        (((reason,), count) for reason, count in finished.items()),
    )
    yield make.histogram(
        "vllm:request_prompt_tokens",
        "Prompt tokens of ended requests.",
        ({}, metrics.prompt_lengths),
    )
    yield make.histogram(
        "vllm:request_generation_tokens",
        "Tokens of ended requests.",
        ({}, metrics.generation_lengths),
    )


def _latencies(make: _Families, engine: str, metrics: ServerMetrics) -> Iterator[Metric]:
    """SGLang and vLLM have the same names after their own."""
    yield make.histogram(
        f"{engine}:time_to_first_token_seconds",
        "From arrival to first token.",
        ({}, metrics.first_token_seconds),
    )
    yield make.histogram(
        f"{engine}:inter_token_latency_seconds",
        "Between two tokens. Tokens that come together share the time since the last ones.",
        ({}, metrics.token_seconds),
    )
    yield make.histogram(
        f"{engine}:e2e_request_latency_seconds",
        "From arrival to end.",
        ({}, metrics.request_seconds),
    )


def _server(make: _Families, replicas: Replicas) -> Iterator[Metric]:
    metrics = replicas.metrics
    yield make.counters(
        "forerun_http_responses",
        "Answers by route and HTTP status; 499: the client was gone.",
        ("route", "status"),
        (((route, str(status)), count) for (route, status), count in metrics.responses.items()),
    )
    yield make.counters(
        "forerun_requests_aborted",
        "Requests that were ended early: disconnect, timeout, or abort_request.",
        ("reason",),
        (((reason,), count) for reason, count in metrics.aborted.items()),
    )
    yield make.gauge(
        "forerun_engine_up",
        "1 while an engine process serves.",
        float(replicas.state is EngineState.READY),
    )
    yield make.counter(
        "forerun_engine_restarts", "Engine processes that replaced a dead one.", replicas.restarts
    )
    yield make.counter(
        "forerun_watchdog_restarts",
        "Engine processes that were killed because they hung.",
        metrics.watchdog_restarts,
    )


def _replicas(make: _Families, replicas: Replicas) -> Iterator[Metric]:
    def each(value: Callable[[EngineClient], float]) -> Iterator[tuple[str, float]]:
        return ((str(at), value(client)) for at, client in enumerate(replicas.clients))

    metrics = replicas.metrics
    ready = EngineState.READY
    yield make.gauges(
        "forerun_replica_up",
        "1 while the replica's engine process serves.",
        "replica",
        each(lambda client: float(client.state is ready)),
    )
    yield make.gauges(
        "forerun_replica_requests",
        "Requests in flight, running or waiting.",
        "replica",
        each(lambda client: client.num_requests),
    )
    yield make.counters(
        "forerun_routed_requests",
        "Requests that a replica was chosen for.",
        ("replica",),
        (((str(at),), metrics.routed[at]) for at in range(len(replicas.clients))),
    )
    yield make.counter(
        "forerun_routed_cached_tokens",
        "Tokens of their prompts that were sent to the same replica before.",
        metrics.routed_cached_tokens,
    )
    yield make.counter(
        "forerun_requests_retried",
        "Requests that ran again on another replica, because theirs had died.",
        metrics.retried,
    )


def _queue(make: _Families, engine: EngineMetrics | None) -> Iterator[Metric]:
    load = engine.load if engine is not None else {}
    running, waiting = load.get("num_running_reqs", 0), load.get("num_waiting_reqs", 0)
    for name in ("sglang:num_running_reqs", "vllm:num_requests_running"):
        yield make.gauge(name, "Requests that run.", running)
    for name in ("sglang:num_queue_reqs", "vllm:num_requests_waiting"):
        yield make.gauge(name, "Requests that wait for a slot or pages.", waiting)

    by_priority = Counter({"0": 0})
    for priority, count in (engine.waiting_by_priority if engine else {}).items():
        by_priority[_priority_label(priority)] += count
    yield make.gauges(
        "forerun_queue_reqs_by_priority",
        f"Requests that wait, by priority; those beyond {MAX_PRIORITY_LABEL} together.",
        "priority",
        sorted(by_priority.items()),
    )


def _priority_label(priority: int) -> str:
    """Clients choose priorities, so the number of labels is limited."""
    if abs(priority) <= MAX_PRIORITY_LABEL:
        return str(priority)
    return f">{MAX_PRIORITY_LABEL}" if priority > 0 else f"<-{MAX_PRIORITY_LABEL}"


def _cache(make: _Families, engine: EngineMetrics) -> Iterator[Metric]:
    load, prefix = engine.load, engine.prefix
    free, cached, pages = load["num_free_pages"], load["num_cached_pages"], load["num_pages"]
    usage = 1 - (free + load["num_evictable_pages"]) / pages
    for name in ("sglang:token_usage", "vllm:kv_cache_usage_perc"):
        yield make.gauge(
            name, "Part of the K/V pool that is in use and cannot be evicted, 0 to 1.", usage
        )
    states = (("free", free), ("cached", cached), ("in_use", pages - free - cached))
    yield make.gauges(
        "forerun_kv_pages",
        "Pages of the K/V pool: free, in the prefix cache, or of running requests only.",
        "state",
        states,
    )
    yield make.gauge(
        "sglang:cache_hit_rate",
        "Part of the prompt tokens that were in the prefix cache, since the server's start.",
        prefix.hits / prefix.queries if prefix.queries else 0.0,
    )
    yield make.counter(
        "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", prefix.queries
    )
    yield make.counter("vllm:prefix_cache_hits", "Prompt tokens found there.", prefix.hits)
    yield make.counter(
        "forerun_tracked_states",
        "Recurrent states saved while requests decoded, so that their text can be continued.",
        engine.tracked_states,
    )
    yield make.counter(
        "vllm:num_preemptions",
        "Requests that lost their slot and got one again.",
        engine.preemptions,
    )
    for name in ("sglang:queue_time_seconds", "vllm:request_queue_time_seconds"):
        yield make.histogram(
            name, "From the arrival at the engine to the first slot.", ({}, engine.queue_seconds)
        )


def _speculation(make: _Families, engine: EngineMetrics) -> Iterator[Metric]:
    positions = accepted_per_position(engine.accepted)
    drafts, correct = sum(engine.accepted), sum(positions)
    yield make.counter(
        "vllm:spec_decode_num_drafts", "Verify steps with drafts, per request.", drafts
    )
    yield make.counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens.", engine.draft_tokens)
    yield make.counter("vllm:spec_decode_num_accepted_tokens", "Accepted drafted tokens.", correct)
    yield make.counters(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted drafted tokens by their position in the draft, from 0.",
        ("position",),
        (((str(at),), count) for at, count in enumerate(positions)),
    )
    yield make.gauge(
        "sglang:spec_accept_length",
        "Tokens per request and decode step, since the server's start.",
        engine.decode_tokens / engine.request_steps if engine.request_steps else 0.0,
    )
    yield make.gauge(
        "sglang:spec_accept_rate",
        "Accepted over drafted tokens, since the server's start.",
        correct / engine.draft_tokens if engine.draft_tokens else 0.0,
    )
    lengths = tuple(float(n) for n in range(1, len(engine.accepted) + 1))
    tokens = float(drafts + correct)
    yield make.histogram(
        "forerun_spec_accept_length",
        "Accepted drafts and the bonus token, of verify steps with drafts.",
        ({}, Histogram(lengths, [*engine.accepted, 0], tokens)),
    )
    none = [[0.0] * 3 for _ in range(CONFIDENCE_BINS)]
    yield from _confidences(make, engine.confidences or ConfidenceCounts(none, none, none))
    yield make.counter(
        "forerun_spec_failures", "Steps in which drafting failed.", engine.algorithm_failures
    )


def _confidences(make: _Families, counts: ConfidenceCounts) -> Iterator[Metric]:
    bounds = tuple((i + 1) / CONFIDENCE_BINS for i in range(CONFIDENCE_BINS))
    modes = asdict(counts)
    yield make.histogram(
        "forerun_spec_confidence",
        "Confidence of drafts that were tested, by mode, before calibration; estimated: the rate"
        " that ragged steps go by.",
        *(
            (
                {"mode": mode},
                Histogram(bounds, [*(int(n) for n, *_ in bins), 0], sum(b[2] for b in bins)),
            )
            for mode, bins in modes.items()
        ),
    )
    yield make.counters(
        "forerun_spec_confidence_accepted",
        "Accepted drafts by mode and the upper bound of their confidence's bin.",
        ("mode", "bin"),
        (
            ((mode, f"{bound:g}"), int(hits))
            for mode, bins in modes.items()
            for bound, (_, hits, _) in zip(bounds, bins, strict=True)
        ),
    )


def _steps(make: _Families, engine: EngineMetrics) -> Iterator[Metric]:
    yield make.gauge(
        "forerun_mixed_prefill_tokens",
        "Most prompt tokens of the next step that decodes too; follows --max-mixed-step-ms.",
        engine.mixed_prefill_tokens,
    )
    yield make.counters(
        "forerun_decode_steps",
        "Decode steps by width: tokens verified per request; 1 is plain decoding.",
        ("width",),
        (((f"{width:g}",), count) for width, count in sorted(engine.steps_by_width.items())),
    )
    yield make.table(
        "forerun_step_cost_seconds",
        "Expected device time of a decode step by batch size and width, corrected while it runs.",
        ("batch_size", "width"),
        (
            ((str(size), f"{width:g}"), seconds)
            for size, costs in sorted(engine.step_costs.items())
            for width, seconds in sorted(costs.items())
        ),
    )
    yield make.counter(
        "forerun_request_steps", "Decode steps, counted once per request.", engine.request_steps
    )
    yield make.counter(
        "forerun_decode_tokens", "Tokens that decode steps committed.", engine.decode_tokens
    )
    yield make.histogram(
        "forerun_step_seconds",
        "Device time of steps; kind mixed: decode and prompt tokens.",
        ({"kind": "decode"}, engine.decode_seconds),
        ({"kind": "mixed"}, engine.mixed_seconds),
        ({"kind": "prefill"}, engine.prefill_seconds),
    )
    yield make.counter(
        "forerun_host_gap_seconds",
        "Time that the device waited for the host before decode steps, at most.",
        engine.gap_seconds,
    )
