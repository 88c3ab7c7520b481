"""`/tokenize`, `/detokenize` and `/tokenizer_info`, as vLLM and SGLang have them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from forerun.core.errors import RequestError
from forerun.llm.prompts import token_lists
from forerun.server.http.errors import json_response
from forerun.server.http.strict_model import FirstError, Many, StrictModel
from forerun.server.openai.chat_prompt import ChatPrompt
from forerun.server.openai.conversation import prompt_ids
from forerun.server.openai.models import check_model
from forerun.server.openai.tools import MAX_TOOLS, Tool, tool_use
from forerun.server.service import Service


class TokenizeRequest(ChatPrompt):
    """`POST /tokenize`; either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | Many[str] | None = None
    messages: Many[dict[str, Any]] | None = None
    add_special_tokens: bool | None = Field(
        None, description="Of texts; false: without those that completions begin with"
    )
    return_token_strs: bool | None = Field(
        None, description="Adds token_strs: the tokens as the vocabulary writes them"
    )
    tools: Annotated[list[Tool], FirstError(MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None


class DetokenizeRequest(StrictModel):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Many[int] | Many[Many[int]]
    skip_special_tokens: bool | None = None


def tokenize_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """The ids that `/v1/completions` or `/v1/chat/completions` would start from."""
        check_model(service, body.model)
        lists = await _ids(service, body)
        single = not isinstance(body.prompt, list)
        counts = [len(ids) for ids in lists]
        answer: dict[str, Any] = {
            "count": counts[0] if single else counts,
            "max_model_len": service.max_prompt_tokens,
            "tokens": lists[0] if single else lists,
        }
        if body.return_token_strs:
            strings = [await service.text.token_strings(ids) for ids in lists]
            answer["token_strs"] = strings[0] if single else strings
        return json_response(answer)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids, special tokens included; `prompt` as vLLM, `text` as SGLang."""
        check_model(service, body.model)
        lists, single = token_lists(body.tokens)
        skip = bool(body.skip_special_tokens)
        texts = [await service.text.detokenize(ids, skip) for ids in lists]
        text = texts[0] if single else texts
        return json_response({"prompt": text, "text": text})

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """What clients need that tokenize here: special tokens and the chat template, as texts."""
        return json_response(service.text.info())

    return router


async def _ids(service: Service, body: TokenizeRequest) -> list[list[int]]:
    longest, special = service.max_prompt_tokens, body.add_special_tokens
    if body.prompt is not None and body.messages is None:
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        return await service.text.encode(texts, longest, special is not False)
    if body.messages is not None and body.prompt is None:
        if special:
            raise RequestError("add_special_tokens: the chat template writes those of messages.")
        functions = [tool.function for tool in body.tools or ()]
        tools = tool_use(functions, body.tool_choice, None, service.format)
        return [await prompt_ids(service, body.messages, body.variables, tools, body.ending)]
    raise RequestError("Give either prompt or messages, not both or neither.")
