"""`/v1/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from starlette.responses import Response

from forerun.core.request import FinishReason
from forerun.server.errors import json_response
from forerun.server.generation import Call, Generation, Part
from forerun.server.models import check_model
from forerun.server.openai_protocol import CompletionRequest
from forerun.server.service import Prompt, Service
from forerun.server.sse import DONE, EventStream, event, until_disconnect
from forerun.server.usage import usage

DEFAULT_MAX_TOKENS = 16  # OpenAI's


def completions_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Completes one prompt or many, as OpenAI's API does."""
        check_model(service, body.model)
        service.check_open()
        answer = await _Completion.start(service, body)
        if body.stream:
            return EventStream(answer.events(), answer.call.close)
        return await until_disconnect(request.receive, answer.whole())

    return router


class _Completion:
    """One request: its generations, and what its answers have in common."""

    def __init__(self, service: Service, body: CompletionRequest, call: Call) -> None:
        self._service, self._body, self.call = service, body, call
        self._head = {
            "id": f"cmpl-{uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or service.model_name,
        }

    @classmethod
    async def start(cls, service: Service, body: CompletionRequest) -> _Completion:
        lists = body.token_lists
        if lists is None:
            lists = await service.text.encode(body.texts, service.max_prompt_tokens)
        limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        params = body.sampling(limit)
        prompts = [Prompt(ids, params, body.num_samples) for ids in lists]
        return cls(service, body, service.start(prompts, bool(body.stream)))

    async def whole(self) -> Response:
        call, body = self.call, self._body
        outputs, prompts = await self._service.outputs(call), await self._prompts()
        choices = []
        for generation, output in zip(call.generations, outputs, strict=True):
            text = prompts.get(output.prompt_index, "") + output.text
            finish = generation.record.finish
            choices.append(self._choice(generation, text, output.output_ids, finish))
            if body.return_token_ids:
                choices[-1]["prompt_token_ids"] = output.prompt_token_ids
        counts = usage(call.generations, bool(body.return_spec_info))
        return json_response({**self._head, "choices": choices, "usage": counts})

    async def events(self) -> AsyncGenerator[bytes, None]:
        call, body = self.call, self._body
        begun: set[Generation] = set()
        prompts = await self._prompts()
        async for taken in call.parts():
            chunks = []
            for generation, part in taken:
                first = generation not in begun
                begun.add(generation)
                head = prompts.get(generation.prompt_index, "") if first else ""
                chunks.append(self._chunk(generation, part, head, first))
            yield b"".join(map(event, chunks))
        if body.include_usage:
            counts = usage(call.generations, bool(body.return_spec_info))
            yield event({**self._head, "choices": [], "usage": counts})
        yield DONE

    async def _prompts(self) -> dict[int, str]:
        """With `echo`, the text of each prompt."""
        if not self._body.echo:
            return {}
        if self._body.token_lists is None:
            return dict(enumerate(self._body.texts))
        firsts = [g for g in self.call.generations if g.index == 0]
        return {g.prompt_index: await self._service.text.decode(g.record.prompt) for g in firsts}

    def _chunk(self, generation: Generation, part: Part, head: str, first: bool) -> dict[str, Any]:
        choice = self._choice(generation, head + part.text, part.token_ids, part.finish)
        if first and self._body.return_token_ids:
            choice["prompt_token_ids"] = list(generation.record.prompt)
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._body.continuous_usage:
            chunk["usage"] = usage([generation], bool(self._body.return_spec_info))
        elif self._body.include_usage:
            chunk["usage"] = None
        return chunk

    def _choice(
        self, generation: Generation, text: str, ids: list[int], finish: FinishReason | None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": generation.prompt_index * self._body.num_samples + generation.index,
            "text": text,
            "logprobs": None,
            "finish_reason": finish.type if finish is not None else None,
            "matched_stop": finish.matched if finish is not None else None,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = list(ids)
        return choice
