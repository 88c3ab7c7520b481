"""Middleware that knows who asks: hosts, origins, API keys and what they may use."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from forerun.server.http.access import Access, NoAccess
from forerun.server.http.api_keys import ApiKey, ApiKeys, TooMany
from forerun.server.http.errors import ApiError
from forerun.server.http.exchange import current_exchange
from forerun.server.http.page import FILES

HEALTH_PATHS = ("/health", "/ping")  # for probes, which use any host; they tell nothing
OPEN_PATHS = (*HEALTH_PATHS, *FILES)  # where links go
# What a key's limits do not count: it must be able to look, and to end what it has started.
UNCOUNTED_METHODS = ("GET", "HEAD", "OPTIONS", "DELETE")
CANCEL = "/cancel"  # the last part of such paths, too
UNCOUNTED_PATHS = (
    "/abort_request",
    "/flush_cache",
    "/reset_prefix_cache",
    "/start_profile",
    "/stop_profile",
)
COUNTED_PATHS = ("/health_generate",)  # whatever the method: it generates a token


class CheckAccess:
    """Middleware: refuses requests for other hosts, and of pages of other origins."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except NoAccess as error:
                refusal = ApiError(error.status, str(error), code=error.code)
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers, path = Headers(scope=scope), scope["path"]
        if path not in HEALTH_PATHS:
            self._access.check_host(headers.getlist("host"), scope["http_version"])
        if path not in OPEN_PATHS:
            site = headers.get("sec-fetch-site", "none")
            self._access.check_origin(headers.getlist("origin"), headers.get("host", ""), site)


class RequireKey:
    """Middleware: every request but those of `OPEN_PATHS` needs `Authorization: Bearer KEY`.

    Where there is no such header, `x-api-key: KEY` will do, which Anthropic's clients send. The
    exchange learns whose it is. With an admin key only, the others need none.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        exchange = current_exchange.get()
        key = self._key(scope)
        if key is None:
            if not self._keys.is_open:
                await _refusal().response()(scope, receive, send)
                return
            exchange.is_admin = False
            await self._app(scope, receive, send)
            return
        exchange.client = exchange.key = key.name
        exchange.tenant, exchange.is_admin = key.tenant, key.is_admin
        if not _is_counted(scope):
            await self._app(scope, receive, send)
            return
        usage = self._keys.usage(key)
        try:
            usage.start(key)
        except TooMany as error:
            again = {"Retry-After": str(error.seconds)}
            refusal = ApiError(429, str(error), code="rate_limit_exceeded", headers=again)
            await refusal.response()(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            exchange.when_over(usage.end)

    def _key(self, scope: Scope) -> ApiKey | None:
        headers = Headers(scope=scope)
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if not scheme:
            scheme, given = "bearer", headers.get("x-api-key", "")
        key = self._keys.find(given.strip().encode("latin-1"))  # whatever the scheme is
        return key if scheme.lower() == "bearer" else None


def check_admin() -> None:
    """
    Raises:
        ApiError: 403, the key of this request may not use what concerns all clients.
    """
    if not current_exchange.get().is_admin:
        message = "This concerns all clients and needs the key of the server's --admin-api-key."
        raise ApiError(403, message, code="admin_key_required")


def _is_counted(scope: Scope) -> bool:
    path = scope["path"]
    if path in COUNTED_PATHS:
        return True
    ends = path in UNCOUNTED_PATHS or path.endswith(CANCEL)
    return scope["method"] not in UNCOUNTED_METHODS and not ends


def _refusal() -> ApiError:
    return ApiError(
        401,
        "The API key is missing or wrong; send the header 'Authorization: Bearer KEY' or"
        " 'x-api-key: KEY'.",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
