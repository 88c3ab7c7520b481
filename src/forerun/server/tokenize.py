"""`/tokenize`: the token ids of a text or a conversation, with vLLM's requests and answers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from forerun.core.errors import RequestError
from forerun.server.conversation import prompt_ids
from forerun.server.errors import json_response
from forerun.server.models import check_model
from forerun.server.service import Service
from forerun.server.strict_model import (
    MAX_VARIABLES,
    FirstError,
    Many,
    StrictModel,
    Unsupported,
)
from forerun.server.tools import MAX_TOOLS, Tool, tool_use


class TokenizeRequest(StrictModel):
    """`POST /tokenize`; either `prompt` or `messages`."""

    unsupported: ClassVar[Unsupported] = {
        "add_generation_prompt": ((True,), "conversations end where the answer begins"),
        "add_special_tokens": ((), "special tokens are those that completions and chat get"),
        "return_token_strs": ((False,), "only token ids are returned"),
    }

    model: str | None = None
    prompt: str | None = None
    messages: Many[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=MAX_VARIABLES)
    tools: Annotated[list[Tool], FirstError(MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None


def tokenize_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """The ids that `/v1/completions` or `/v1/chat/completions` would start from."""
        check_model(service, body.model)
        ids = await _ids(service, body)
        return json_response(
            {"count": len(ids), "max_model_len": service.max_prompt_tokens, "tokens": ids}
        )

    return router


async def _ids(service: Service, body: TokenizeRequest) -> list[int]:
    longest = service.max_prompt_tokens
    if body.prompt is not None and body.messages is None:
        (ids,) = await service.text.encode([body.prompt], longest)
        return ids
    if body.messages is not None and body.prompt is None:
        functions = [tool.function for tool in body.tools or ()]
        tools = tool_use(functions, body.tool_choice, None, service.format)
        return await prompt_ids(service, body.messages, body.chat_template_kwargs or {}, tools)
    raise RequestError("Give either prompt or messages, not both or neither.")
