"""The API key."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from forerun.server.errors import ApiError
from forerun.server.page import FILES

OPEN_PATHS = ("/health", "/ping", *FILES)


class RequireKey:
    """Middleware: every request but those of `OPEN_PATHS` needs `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            # In constant time, so that the key cannot be guessed byte by byte.
            right = hmac.compare_digest(given.strip().encode("latin-1"), self._key)
            if scheme.lower() != "bearer" or not right:
                await _refusal().response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _refusal() -> ApiError:
    return ApiError(
        401,
        "The API key is missing or wrong; send the header 'Authorization: Bearer KEY'.",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
