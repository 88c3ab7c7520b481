"""Errors of the HTTP API, in OpenAI's shape: {"error": {message, type, param, code}}.

A request may be answered in another API's shape, which `shape_of_errors` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import msgspec
from pydantic import BaseModel
from starlette.responses import Response

TYPES = {  # HTTP status → OpenAI's `type`
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ErrorDetails(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """An answer that is none."""

    error: ErrorDetails


DOCUMENTED: dict[int | str, dict[str, Any]] = {  # in the OpenAPI document, of every endpoint
    "4XX": {"model": ErrorAnswer, "description": "Refused"},
    "5XX": {"model": ErrorAnswer, "description": "Failed, or not available now"},
}


class ApiError(Exception):
    """Anything a client is told instead of an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.param, self.code, self.headers = param, code, dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The answer, in the shape that this request's client reads."""
        return shape_of_errors.get()(self)

    def response(self) -> Response:
        return json_response(self.body(), self.status, self.headers)


def openai_shape(error: ApiError) -> dict[str, Any]:
    """The body of an error for OpenAI's clients."""
    kind = TYPES.get(error.status, "server_error" if error.status >= 500 else TYPES[400])
    values = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return {"error": values}


# Of the request that is being served.
shape_of_errors: ContextVar[Callable[[ApiError], dict[str, Any]]] = ContextVar(
    "shape_of_errors", default=openai_shape
)


class EngineUnavailable(ApiError):
    """The engine process has ended, is starting again, or the server is shutting down."""

    def __init__(self, reason: str) -> None:
        super().__init__(503, reason, code="engine_unavailable", headers={"Retry-After": "5"})


class EngineFailed(ApiError):
    """The engine ended a request with an error of its own."""

    def __init__(self, reason: str) -> None:
        super().__init__(500, f"The engine ended this request: {reason}", code="engine_error")


class QueueTimeout(ApiError):
    """The request has waited too long for a slot."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            503, f"{reason} Try again later.", code="queue_timeout", headers={"Retry-After": "1"}
        )


class GrammarBusy(ApiError):
    """A grammar cannot be compiled now, because of others."""

    def __init__(self, reason: str) -> None:
        super().__init__(503, reason, code="grammar_busy", headers={"Retry-After": "5"})


class ServerStartError(Exception):
    """The engine process ended before it was ready."""


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    body = msgspec.json.encode(value)
    return Response(body, status, dict(headers or {}), media_type="application/json")
