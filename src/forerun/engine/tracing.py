"""OpenTelemetry spans of requests, created when a step completes; off by default.

    request
    ├── prefill                                 one per admission (several after preemptions)
    ├── spec_draft · spec_verify · spec_accept  phases of each step with drafts for the request
    └── decode                                  each step without

Start and end times are explicit, and those of phases come from the device
(`executor/step/timing.py`), so spans are correct although the host runs a step ahead. OpenTelemetry
is imported only here, and only if `enable_trace` is set.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.core.request import Request
from forerun.scheduler.scheduler import CompletedStep

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

PROTOCOLS = ("grpc", "http/protobuf")
VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
MISSING = (
    "enable_trace needs OpenTelemetry, which is not installed: pip install 'forerun[trace]'"
    " (opentelemetry-sdk and an OTLP exporter)."
)


@dataclass
class _Open:
    """A running request."""

    root: Span
    steps: int = 0  # decode steps that have spans
    prefill: float | None = None  # time.monotonic() when its first chunk was launched


class Tracing:
    """Creates the spans of one engine's requests."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("forerun")
        self._context_of = trace.set_span_in_context
        self._extract = TraceContextTextMapPropagator().extract
        self._open: dict[str, _Open] = {}
        self._unix = time.time_ns() - time.monotonic_ns()

    def open(self, request: Request, trace_context: Mapping[str, str]) -> None:
        """Starts a request's span. `trace_context`: of its parent; empty: it has none."""
        parent, begin = self._extract(trace_context), self._at(request.arrival)
        root = self._tracer.start_span("request", parent, start_time=begin)
        self._open[request.rid] = _Open(root)

    def record(self, done: CompletedStep, launched: float, now: float) -> None:
        """Creates the spans of a completed step.

        Args:
            launched: time.monotonic() before the step was launched.
            now: time.monotonic() when its result arrived.
        """
        step = done.step
        for chunk, request in zip(step.plan.prefill, step.prefill, strict=True):
            known = self._open.get(request.rid)
            if known is None:
                continue
            if known.prefill is None:
                known.prefill = launched
            if chunk.last:
                attributes = {"tokens": chunk.end}
                self._span(known, "prefill", self._at(known.prefill), self._at(now), attributes)
                known.prefill = None
        if step.decode:
            self._record_decode(done, launched, now)

    def close(self, request: Request) -> None:
        """Ends the span of a finished request."""
        known = self._open.pop(request.rid, None)
        if known is None:
            return
        reason = request.finish
        steps, drafts = request.verify_ct, sum(request.correct_drafts)
        known.root.set_attributes(
            {
                "request.id": request.rid,
                "prompt_tokens": len(request.prompt),
                "cached_tokens": request.cached_tokens,
                "completion_tokens": len(request.output),
                "finish_reason": reason.type if reason else "none",
                "preemptions": request.preemptions,
                "spec_verify_ct": steps,
                "spec_num_proposed_drafts": request.proposed,
                "spec_num_correct_drafts": drafts,
                "spec_accept_length": len(request.output) / steps if steps else 0.0,
            }
        )
        known.root.end(self._at(time.monotonic()))

    def flush(self) -> None:
        """Exports all ended spans."""
        self._provider.force_flush()

    def _record_decode(self, done: CompletedStep, launched: float, now: float) -> None:
        plan = done.step.plan
        times = done.result.phase_times
        if times is None:  # no phase times: host times of the whole step
            times = (self._at(launched), self._at(launched), self._at(now), self._at(now))
        begin, proposed, verified, committed = times
        common = {"batch_size": len(plan.decode)}
        for request, count in zip(done.step.decode, done.result.drafts_of(plan), strict=True):
            known = self._open.get(request.rid)
            if known is None or request.verify_ct == known.steps:  # it ended before this step
                continue
            known.steps = request.verify_ct
            drafted = request.params.draft_limit(count)
            counts = {"drafted_tokens": drafted, "accepted_tokens": request.correct_drafts[-1]}
            widths = {"width": 1 + count, "new_tokens": request.accept_lengths[-1]}
            attributes = {**common, **counts, **widths}
            if drafted:
                self._span(known, "spec_draft", begin, proposed, attributes)
                self._span(known, "spec_verify", proposed, verified, attributes)
                self._span(known, "spec_accept", verified, committed, attributes)
            else:
                self._span(known, "decode", begin, committed, attributes)

    def _span(
        self, known: _Open, name: str, begin: int, end: int, attributes: dict[str, int]
    ) -> None:
        context = self._context_of(known.root)
        self._tracer.start_span(name, context, attributes=attributes, start_time=begin).end(end)

    def _at(self, monotonic: float) -> int:
        return self._unix + int(monotonic * 1e9)


def start_tracing(config: EngineConfig) -> TracerProvider | None:
    """The provider of spans, or None if tracing is off. Called before any model is loaded.

    Raises:
        ConfigError: OpenTelemetry is not installed, or the protocol is unknown.
    """
    if not config.enable_trace:
        return None
    try:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = make_exporter(config.otlp_traces_endpoint)
    except ImportError as error:
        raise ConfigError(MISSING) from error
    name = os.environ.get("OTEL_SERVICE_NAME", "forerun")
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def make_exporter(endpoint: str) -> SpanExporter:
    """OTLP over gRPC, or over HTTP if OpenTelemetry's environment variables say so.

    Raises:
        ConfigError: they name another protocol.
    """
    protocol = next((os.environ[v] for v in VARIABLES if os.environ.get(v)), PROTOCOLS[0])
    if protocol not in PROTOCOLS:
        raise ConfigError(f"{VARIABLES[0]} is {protocol!r}; known: {', '.join(PROTOCOLS)}.")
    exporter: SpanExporter
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

        secure = endpoint.startswith("https://")
        exporter = grpc.OTLPSpanExporter(endpoint, insecure=not secure)
    else:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

        exporter = http.OTLPSpanExporter(traces_url(endpoint))
    return exporter


def traces_url(endpoint: str) -> str:
    """Completes `host:4318` to a URL with scheme and path for OTLP over HTTP."""
    url = endpoint if "://" in endpoint else f"http://{endpoint}"
    return url if "/" in url.partition("://")[2] else f"{url}/v1/traces"
