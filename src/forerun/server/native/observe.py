"""Middleware around everything else: request ids, spans, counts, and the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.server.engines.metrics import ServerMetrics
from forerun.server.http.exchange import Exchange, current_exchange, request_id
from forerun.server.http.request_log import RequestLog
from forerun.server.tracing import ServerTracing

if TYPE_CHECKING:
    from opentelemetry.trace import Span

UNKNOWN_ROUTE = "other"  # of paths that do not exist, so that clients cannot make up metrics
CLIENT_LEFT = 499  # in the log and the metrics, whatever had been sent


class Observe:
    """Sees every HTTP request and its answer, also what no other middleware sees."""

    def __init__(
        self, app: ASGIApp, metrics: ServerMetrics, log: RequestLog, tracing: ServerTracing | None
    ) -> None:
        self._app = app
        self._metrics, self._log, self._tracing = metrics, log, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        ident = request_id(Headers(scope=scope).get("x-request-id"))
        exchange = Exchange(ident, client=_connection(scope))
        current_exchange.set(exchange)
        span = None
        if self._tracing is not None:
            span, exchange.trace_context = self._tracing.open(scope, exchange.request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = exchange.request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if exchange.has_left:
                exchange.status = CLIENT_LEFT
            self._count(exchange, scope, span)
            client = scope["client"][0] if scope["client"] else None
            await self._log.ended(exchange, scope["method"], scope["path"], client)

    def _count(self, exchange: Exchange, scope: Scope, span: Span | None) -> None:
        route = scope["route"].path if "route" in scope else UNKNOWN_ROUTE
        self._metrics.responses[route, exchange.status] += 1
        if self._tracing is not None and span is not None:
            self._tracing.close(span, scope["method"], route, exchange.status)


def _connection(scope: Scope) -> str:
    """Address and port of the client."""
    return ":".join(map(str, scope["client"])) if scope["client"] else "unknown"
