"""The FastAPI application: routes, middleware, and errors."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Scope

from forerun import __version__
from forerun.core.errors import ContextLengthError, RequestError, nearest, shown
from forerun.server.anthropic.errors import SpeakAnthropic
from forerun.server.anthropic.messages import messages_router
from forerun.server.batches.api import batches_router
from forerun.server.batches.folder import BatchFolder, Limits
from forerun.server.batches.jobs import DEFAULTS, BatchJobs
from forerun.server.batches.runner import Client, Runner
from forerun.server.http.access import names_in
from forerun.server.http.auth import CheckAccess, RequireKey
from forerun.server.http.errors import DOCUMENTED, ApiError
from forerun.server.http.exchange import current_exchange
from forerun.server.http.limits import LimitBody
from forerun.server.http.page import page_router
from forerun.server.http.request_log import RequestLog
from forerun.server.native.control import control_router
from forerun.server.native.generate import native_router
from forerun.server.native.observe import Observe
from forerun.server.native.profile import profile_router
from forerun.server.openai.chat import chat_router
from forerun.server.openai.completions import completions_router
from forerun.server.openai.conversations import conversations_router
from forerun.server.openai.models import models_router
from forerun.server.openai.responses import responses_router
from forerun.server.openai.tokenize import tokenize_router
from forerun.server.pooling.embeddings import embeddings_router
from forerun.server.pooling.rerank import rerank_router
from forerun.server.pooling.score import score_router
from forerun.server.prometheus import prometheus_router
from forerun.server.service import Service

log = logging.getLogger("forerun")
METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")


def build_app(service: Service) -> ASGIApp:
    """All endpoints of a server, within `Observe`: it sees answers to bugs too."""
    app = FastAPI(
        title="Forerun", version=__version__, docs_url=None, redoc_url=None, responses=DOCUMENTED
    )
    for router in (
        models_router(service),
        completions_router(service),
        chat_router(service),
        responses_router(service),
        conversations_router(service.store),
        embeddings_router(service),
        score_router(service),
        rerank_router(service),
        batches_router(_batch_jobs(service)),
        messages_router(service),
        native_router(service),
        tokenize_router(service),
        control_router(service),
        profile_router(service),
        page_router(),
    ):
        app.include_router(router)
    settings = service.settings
    if settings.enable_metrics:
        app.include_router(prometheus_router(service))
    _add_middleware(app, service)
    _add_error_handlers(app)
    app.openapi()  # kept: whoever asked first would hold up others
    details = settings.log_requests_level if settings.log_requests else None
    log_requests = RequestLog(service.text, details)
    return Observe(app, service.engine.metrics, log_requests, service.tracing)


def requests_app(service: Service) -> FastAPI:
    """What starts generations, without the middleware that looks at HTTP: for batches."""
    app = FastAPI(openapi_url=None)
    for router in (
        completions_router(service),
        chat_router(service),
        responses_router(service),
        embeddings_router(service),
    ):
        app.include_router(router)
    _add_error_handlers(app)
    return app


def _batch_jobs(service: Service) -> BatchJobs | None:
    """Those of the server's folder, which begin and end with the server."""
    settings, engine = service.settings, service.engine
    if settings.batch_folder is None:
        return None
    app = requests_app(service)

    def client_of(key: str | None) -> Client | None:
        if service.api_keys is None or key is None:
            return Client("batch") if service.api_keys is None and key is None else None
        found = service.api_keys.named(key)
        return None if found is None else Client(key, key, found.tenant, found.max_requests)

    def make_runner(client: Client) -> Runner:
        width = min(engine.slots, client.max_requests or engine.slots)
        return Runner(app, client, width, lambda: engine.is_ready, DEFAULTS)

    folder = BatchFolder(
        settings.batch_folder, Limits(settings.max_files, settings.max_files_bytes)
    )
    jobs = BatchJobs(folder, make_runner, client_of, settings.max_body_bytes)
    service.when_ready.append(jobs.resume)
    service.when_stopping.append(jobs.stop)
    return jobs


def _add_middleware(app: FastAPI, service: Service) -> None:
    """What is added later comes earlier."""
    settings = service.settings
    app.add_middleware(LimitBody, max_bytes=settings.max_body_bytes)
    if service.api_keys is not None:
        app.add_middleware(RequireKey, keys=service.api_keys)
    access = settings.access()
    if access.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=access.origins,
            allow_methods=[each.upper() for each in names_in("", settings.allowed_methods)],
            allow_headers=names_in("", settings.allowed_headers),
            allow_private_network=True,
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    app.add_middleware(CheckAccess, access=access)
    app.add_middleware(SpeakAnthropic)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestError)
    async def request_error(request: Request, error: RequestError) -> Response:
        code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
        return ApiError(400, str(error), code=code).response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _invalid(_nearest_problem(error.errors(), error.body), error.body).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message, headers = str(error.detail), error.headers
        if error.status_code == 404:
            paths = list(app.openapi()["paths"])
            message = f"There is no {shown(request.url.path)}.{nearest(request.url.path, paths)}"
        elif error.status_code == 405:
            taken = _methods_of(app, request.scope)
            message = f"{request.url.path} does not take {request.method}; it takes {taken}."
            headers = {"Allow": taken}
        elif error.status_code == 400 and error.__cause__ is not None:  # of FastAPI, in few words
            message = f"The body cannot be read: {_reason(error.__cause__)}."
        return ApiError(error.status_code, message, headers=headers).response()

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # not sent: the client has disconnected

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        ident = current_exchange.get().request_id
        log.error("Request %s to %s failed.", ident, request.url.path, exc_info=error)
        return ApiError(500, "The server failed to handle this request.").response()


def _methods_of(app: FastAPI, scope: Scope) -> str:
    """The methods that a path takes, each of which may have a route of its own."""
    return ", ".join(
        method
        for method in METHODS
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in app.routes)
    )


def _nearest_problem(problems: Sequence[Mapping[str, Any]], body: Any) -> Mapping[str, Any]:
    """The first thing that is wrong; of a list that may be a text too, its first wrong item."""
    places = [_places(problem, body) for problem in problems]
    first = places[0]
    within = [at for at, place in enumerate(places) if place[: len(first)] == first]
    return problems[max(within, key=lambda at: len(places[at]))]


def _places(problem: Mapping[str, Any], body: Any) -> list[str]:
    """The place in a body, without pydantic's names for the members of unions."""
    loc, places, value = problem["loc"][1:], [], body
    missing = loc[-1:] if problem["type"] == "missing" else ()
    for part in loc:
        if isinstance(value, list) and isinstance(part, int):
            value = value[part]
        elif isinstance(value, dict) and (part in value or part in missing):
            value = value.get(part)
        else:
            continue
        places.append(str(part))
    return places


def _reason(error: BaseException) -> str:
    """Why a body cannot be read."""
    match error:
        case RecursionError():
            return "its JSON is nested too deeply"
        case UnicodeDecodeError():
            return f"it is not UTF-8 at byte {error.start}"
        case ValueError():
            return "it has a number of too many digits"
        case _:
            return str(error)


def _invalid(problem: Mapping[str, Any], body: Any) -> ApiError:
    """One line about the first thing that is wrong with a body."""
    in_body = problem["loc"][0] == "body"
    path = ".".join(_places(problem, body)) if in_body else str(problem["loc"][-1])
    kind, message = problem["type"], str(problem["msg"])
    if kind == "json_invalid":
        at = problem["loc"][-1]
        reason = problem.get("ctx", {}).get("error", "")
        return ApiError(400, f"The body is not valid JSON: {reason}, at character {at}.")
    if kind == "parameter":  # our own words
        return ApiError(400, message, param=path or None)
    if not path and len(problem["loc"]) > 1:
        name = str(problem["loc"][1])
        what = "is missing" if kind == "missing" else "must be a file"
        return ApiError(400, f"{name} {what}; the body is multipart/form-data.", param=name)
    if not path:
        return ApiError(400, "The body must be a JSON object, with Content-Type application/json.")
    if kind == "missing":
        return ApiError(400, f"{path} is missing.", param=path)
    reason = message[:1].lower() + message[1:]
    return ApiError(400, f"{path}: {reason}, got {shown(problem['input'])}.", param=path)
