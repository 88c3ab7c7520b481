"""`/v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from starlette.responses import Response

from forerun.core.request import FinishReason
from forerun.server.errors import json_response
from forerun.server.generation import Call, Generation, Part
from forerun.server.logprobs import chat_logprobs
from forerun.server.models import check_model
from forerun.server.openai_protocol import ChatRequest
from forerun.server.service import Prompt, Service
from forerun.server.sse import DONE, EventStream, event, until_disconnect
from forerun.server.usage import usage


def chat_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answers a conversation, as OpenAI's API does."""
        check_model(service, body.model)
        service.check_open()
        answer = await _Chat.start(service, body)
        if body.stream:
            return EventStream(answer.events(), answer.call.close)
        return await until_disconnect(request.receive, answer.whole())

    return router


class _Chat:
    """One request: its generations, and what its answers have in common."""

    def __init__(self, service: Service, body: ChatRequest, call: Call) -> None:
        self._service, self._body, self.call = service, body, call
        self._head = {
            "id": f"chatcmpl-{uuid4().hex}",
            "created": int(time.time()),
            "model": body.model or service.model_name,
        }

    @classmethod
    async def start(cls, service: Service, body: ChatRequest) -> _Chat:
        variables = body.chat_template_kwargs or {}
        ids = await service.text.chat(body.messages, variables, service.max_prompt_tokens)
        limit = body.max_new_tokens
        if limit is None:  # OpenAI's default: up to the end of the context
            limit = service.engine.factory.max_new_tokens(len(ids))
        prompt = Prompt(ids, body.sampling(limit), body.num_samples, logprobs=body.logprob_params)
        return cls(service, body, await service.start([prompt], bool(body.stream)))

    async def whole(self) -> Response:
        call, body = self.call, self._body
        choices = []
        outputs = await self._service.outputs(call)
        for generation, output in zip(call.generations, outputs, strict=True):
            message = {"role": "assistant", "content": output.text}
            finish = generation.record.finish
            choice = self._choice(generation, output.output_ids, finish, {"message": message})
            choice["logprobs"] = await self._service.text.run(partial(self._logprobs, generation))
            choices.append(choice)
        answer = {**self._head, "object": "chat.completion", "choices": choices}
        answer["usage"] = usage(call.generations, bool(body.return_spec_info))
        if body.return_token_ids:
            answer["prompt_token_ids"] = list(call.generations[0].record.prompt)
        return await self._service.text.run(partial(json_response, answer))

    async def events(self) -> AsyncGenerator[bytes, None]:
        call, body = self.call, self._body
        yield b"".join(event(self._first_chunk(generation)) for generation in call.generations)
        async for taken in call.parts():
            yield b"".join(event(self._chunk(generation, part)) for generation, part in taken)
        if body.include_usage:
            counts = usage(call.generations, bool(body.return_spec_info))
            yield event({**self._chunk_head, "choices": [], "usage": counts})
        yield DONE

    @property
    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"}

    def _first_chunk(self, generation: Generation) -> dict[str, Any]:
        """The role, before any text."""
        choice = {
            "index": generation.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        chunk: dict[str, Any] = {**self._chunk_head, "choices": [choice]}
        if self._body.return_token_ids:
            chunk["prompt_token_ids"] = list(generation.record.prompt)
        return self._with_usage(chunk, generation)

    def _chunk(self, generation: Generation, part: Part) -> dict[str, Any]:
        delta = {"content": part.text} if part.text else {}
        choice = self._choice(generation, part.token_ids, part.finish, {"delta": delta})
        choice["logprobs"] = self._logprobs(generation, part)
        return self._with_usage({**self._chunk_head, "choices": [choice]}, generation)

    def _with_usage(self, chunk: dict[str, Any], generation: Generation) -> dict[str, Any]:
        if self._body.continuous_usage:
            chunk["usage"] = usage([generation], bool(self._body.return_spec_info))
        elif self._body.include_usage:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, generation: Generation, part: Part | None = None) -> dict[str, Any] | None:
        """Of a part, or of all tokens, if they were asked for."""
        tokens = generation.scored_tokens(part)
        if generation.record.logprobs is None or (part is not None and not tokens):
            return None
        return chat_logprobs(tokens, self._service.text.token_bytes())

    def _choice(
        self,
        generation: Generation,
        ids: list[int],
        finish: FinishReason | None,
        content: dict[str, Any],
    ) -> dict[str, Any]:
        """`content`: the message, or a delta of it."""
        choice: dict[str, Any] = {
            "index": generation.index,
            **content,
            "logprobs": None,
            "finish_reason": finish.type if finish is not None else None,
            "matched_stop": finish.matched if finish is not None else None,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = list(ids)
        return choice
