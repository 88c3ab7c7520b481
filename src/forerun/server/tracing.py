"""The server's OpenTelemetry spans: one per HTTP request, between its caller's and the engine's.

    span of the caller          its `traceparent` and `tracestate` came as headers
    └── POST /v1/completions    here
        └── request             in the engine process (`engine/tracing.py`), one per generation

OpenTelemetry is imported only here and there, and only if `enable_trace` is set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import Scope

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span


class ServerTracing:
    """Creates the spans of a server's requests."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._provider = provider
        self._tracer = provider.get_tracer("forerun.server")
        self._propagator = TraceContextTextMapPropagator()

    def open(self, scope: Scope, request_id: str) -> tuple[Span, dict[str, str]]:
        """A request's span, and the headers that make other spans its children."""
        headers = Headers(scope=scope)
        given = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        span = self._tracer.start_span(
            scope["method"],
            self._propagator.extract(given),
            kind=self._trace.SpanKind.SERVER,
            attributes={
                "http.request.method": scope["method"],
                "url.path": scope["path"],
                "url.scheme": scope["scheme"],
                "http.request.header.x-request-id": [request_id],
            },
        )
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._trace.set_span_in_context(span))
        return span, carrier

    def close(self, span: Span, method: str, route: str, status: int) -> None:
        """The request was answered."""
        span.update_name(f"{method} {route}")
        span.set_attribute("http.route", route)
        span.set_attribute("http.response.status_code", status)
        if status >= 500:
            span.set_status(self._trace.StatusCode.ERROR)
        span.end()

    def shutdown(self) -> None:
        """Exports all ended spans."""
        self._provider.shutdown()
