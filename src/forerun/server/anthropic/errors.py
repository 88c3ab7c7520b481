"""Errors in Anthropic's shape: {"type": "error", "error": {type, message}, "request_id"}."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.server.http.errors import ApiError, openai_shape, shape_of_errors
from forerun.server.http.exchange import current_exchange

PATHS = "/v1/messages"
VERSION_HEADER = "anthropic-version"  # Anthropic's clients send it with every request
TYPES = {  # HTTP status → Anthropic's `type`
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicErrorDetails(BaseModel):
    """What went wrong."""

    type: str
    message: str


class AnthropicErrorAnswer(BaseModel):
    """An answer of Anthropic's API that is none."""

    type: Literal["error"]
    error: AnthropicErrorDetails
    request_id: str


DOCUMENTED: dict[int | str, dict[str, Any]] = {  # in the OpenAPI document
    "4XX": {"model": AnthropicErrorAnswer, "description": "Refused"},
    "5XX": {"model": AnthropicErrorAnswer, "description": "Failed, or not available now"},
}


def anthropic_shape(error: ApiError) -> dict[str, Any]:
    """The body of an error for Anthropic's clients."""
    kind = TYPES.get(error.status, "api_error" if error.status >= 500 else TYPES[400])
    return {
        "type": "error",
        "error": {"type": kind, "message": error.message},
        "request_id": current_exchange.get().request_id,
    }


class SpeakAnthropic:
    """Middleware: what Anthropic's clients ask gets errors in their shape, and `request-id`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_anthropic(scope):
            shape_of_errors.set(openai_shape)
            await self._app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["request-id"] = current_exchange.get().request_id
            await send(message)

        shape_of_errors.set(anthropic_shape)
        await self._app(scope, receive, send_with_id)


def _is_anthropic(scope: Scope) -> bool:
    path: str = scope["path"]
    return path == PATHS or path.startswith(f"{PATHS}/") or VERSION_HEADER in Headers(scope=scope)
