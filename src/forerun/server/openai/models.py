"""`/v1/models`, and the name that requests ask for."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter
from starlette.responses import Response

from forerun.core.errors import nearest, shown
from forerun.server.http.errors import ApiError, json_response
from forerun.server.service import Service

ANY = "default"  # of clients that do not care, as in SGLang


def models_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> Response:
        """The one model that is served."""
        ends = {"first_id": service.model_name, "last_id": service.model_name, "has_more": False}
        return json_response({"object": "list", "data": [_card(service)], **ends})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """A model by name."""
        check_model(service, name)
        return json_response(_card(service))

    return router


def check_model(service: Service, name: str | None) -> None:
    """
    Raises:
        ApiError: 404, another model is asked for.
    """
    if name is not None and name not in (service.model_name, str(service.engine.model_path), ANY):
        raise ApiError(
            404,
            f"The model {shown(name)} does not exist.{nearest(name, [service.model_name])} This"
            f" server has {service.model_name!r}.",
            param="model",
            code="model_not_found",
        )


def _card(service: Service) -> dict[str, object]:
    """The model, for OpenAI's clients and for Anthropic's."""
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "forerun",
        "root": str(service.engine.model_path),
        "max_model_len": service.max_prompt_tokens,
        "type": "model",
        "display_name": service.model_name,
        "created_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": service.max_prompt_tokens,
    }
