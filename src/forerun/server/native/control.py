"""Endpoints about the server itself: health, load, information, the cache, aborts."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from forerun import __version__
from forerun.core.errors import RequestError
from forerun.core.sampling_params import SamplingParams
from forerun.server.engines.client import EngineState
from forerun.server.http.auth import check_admin
from forerun.server.http.errors import ApiError, EngineUnavailable, json_response
from forerun.server.http.exchange import current_exchange
from forerun.server.http.strict_model import StrictModel
from forerun.server.prompt import Prompt
from forerun.server.service import Service

HEALTH_SECONDS = 20.0  # in which one token must come


class AbortRequest(StrictModel):
    """`POST /abort_request`."""

    rid: str | None = None
    abort_all: bool | None = None


def control_router(service: Service) -> APIRouter:
    router = APIRouter()
    engine = service.engine

    @router.get("/health")
    async def health() -> Response:
        """200 while a replica serves; 503 while all are starting again, or shutting down."""
        service.check_open()
        if engine.state is not EngineState.READY:
            raise EngineUnavailable(f"The engine is {engine.state.value}.")
        return json_response({"status": "ok"})

    for method in ("GET", "POST"):  # SageMaker's
        router.add_api_route("/ping", health, methods=[method], include_in_schema=False)

    @router.get("/health_generate")
    async def health_generate() -> Response:
        """200 if every replica that serves generates a token."""
        params = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
        replicas = [i for i, c in enumerate(engine.clients) if c.state is EngineState.READY]
        prompts = [Prompt([0], params, replica=index) for index in replicas]
        if not prompts:
            raise EngineUnavailable(f"The engine is {engine.state.value}.")
        call = await service.start(prompts, stream=False)
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                await call.wait()
        except TimeoutError:
            message = f"No token came within {HEALTH_SECONDS:.0f} s."
            raise ApiError(503, message, code="unhealthy") from None
        finally:
            call.close()
        return json_response({"status": "ok"})

    @router.get("/v1/loads")
    async def loads() -> Response:
        """Requests that run and wait, and pages of the K/V pools: of all replicas, and of each."""
        return json_response({**await engine.loads(), "num_requests": engine.num_requests})

    for path in ("/flush_cache", "/reset_prefix_cache"):
        router.add_api_route(
            path, _flush_endpoint(service), methods=["GET", "POST"], include_in_schema=False
        )

    _add_abort(router, service)
    _add_information(router, service)
    return router


def _add_abort(router: APIRouter, service: Service) -> None:
    engine = service.engine

    @router.post("/abort_request")
    async def abort_request(body: AbortRequest) -> Response:
        """Ends a request, or all; it answers with what it has so far.

        A key ends its own requests only.
        """
        exchange = current_exchange.get()
        if body.abort_all:
            check_admin()
            engine.abort_all()
        elif body.rid is not None:
            engine.abort_group(body.rid, lambda call: exchange.is_admin or call.key == exchange.key)
        else:
            raise RequestError("Give a rid, or abort_all: true.")
        return json_response({"success": True})


def _flush_endpoint(service: Service) -> Any:
    async def flush_cache() -> Response:
        """Empties the prefix caches; 400 while requests run."""
        check_admin()
        await service.engine.flush_cache()
        return json_response({"success": True, "message": "Cache flushed."})

    return flush_cache


def _add_information(router: APIRouter, service: Service) -> None:
    engine = service.engine

    @router.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @router.get("/get_server_info", include_in_schema=False)
    @router.get("/server_info")
    async def server_info() -> Response:
        """Settings without secrets, choices made at start, and counters of speculation."""
        stats = await engine.query("stats")
        info, config = engine.info, asdict(engine.config)
        config |= config.pop("algorithm_options")
        config["model_path"] = str(engine.model_path)
        states = [
            {
                "avg_spec_accept_length": each["spec_accept_length_since_flush"],
                "max_running_requests_per_dp": info.limits.slots,
                **each,
            }
            for each in stats
        ]
        return json_response(
            {
                **config,
                **service.settings.public(),
                "served_model_name": service.model_name,
                "version": __version__,
                "max_total_num_tokens": (info.num_pages - 1) * info.limits.page_size,
                "max_req_input_len": info.limits.context_length - 1,
                "engine_pid": engine.clients[0].pid,
                "engine_pids": [client.pid for client in engine.clients],
                "engine_restarts": engine.restarts,
                "explain": service.explain,
                "internal_states": states,
            }
        )

    @router.get("/get_model_info", include_in_schema=False)
    @router.get("/model_info")
    async def model_info() -> Response:
        """What is served."""
        config = engine.config
        path = str(engine.model_path)
        return json_response(
            {
                "model_path": path,
                "tokenizer_path": config.tokenizer_path or path,
                "is_generation": True,
                "has_chat_template": service.text.has_chat_template,
                "preferred_sampling_params": None,
                "served_model_name": service.model_name,
                "context_length": service.max_prompt_tokens,
            }
        )
