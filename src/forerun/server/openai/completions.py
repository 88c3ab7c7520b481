"""`/v1/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import Response

from forerun.core.request import FinishReason
from forerun.server.generation import Call, Generation, Part
from forerun.server.http.client_names import in_client_names
from forerun.server.http.errors import json_response
from forerun.server.http.sse import DOCUMENTED_STREAM, DONE, event
from forerun.server.logprobs import completion_logprobs, prompt_tokens
from forerun.server.openai.answer import Choices, respond
from forerun.server.openai.models import check_model
from forerun.server.openai.protocol import CompletionRequest, openais_names
from forerun.server.prompt import Prompt
from forerun.server.service import Service

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class Echo(NamedTuple):
    """A prompt that the text begins with."""

    text: str
    ends: Sequence[int]  # characters of the decoded prompt after each token; for log-probabilities


NO_ECHO = Echo("", ())


def completions_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", responses=DOCUMENTED_STREAM)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Completes one prompt or many, as OpenAI's API does."""
        check_model(service, body.model)
        service.check_open()
        answer = await _Completion.start(service, body)
        return await respond(answer, body.stream, request)

    return router


class _Completion(Choices):
    """One request: its generations, and what its answers have in common."""

    def __init__(self, service: Service, body: CompletionRequest, call: Call) -> None:
        super().__init__(body)
        self._service, self._body, self.call = service, body, call
        self._head = {
            "id": call.new_answer_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or service.model_name,
        }

    @classmethod
    async def start(cls, service: Service, body: CompletionRequest) -> _Completion:
        lists = body.token_lists
        service.check_size(body.texts if lists is None else lists)
        if lists is None:
            lists = await service.text.encode(body.texts, service.max_prompt_tokens)
        limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        params = body.sampling(limit)
        scored = body.logprob_params
        if scored is not None:
            service.text.token_bytes()  # refuses, without a tokenizer
        prompts = [
            Prompt(ids, params, body.num_samples, None, scored, body.scheduling) for ids in lists
        ]
        with in_client_names(openais_names()):
            call = await service.start(prompts, bool(body.stream))
        return cls(service, body, call)

    async def whole(self) -> Response:
        call, body = self.call, self._body
        outputs, echoes = await self._service.outputs(call), await self._echoes()
        choices = []
        for generation, output in zip(call.generations, outputs, strict=True):
            echo = echoes.get(output.prompt_index, NO_ECHO)
            finish = generation.record.finish
            text = echo.text + output.text
            choice = self._text_choice(generation, text, output.output_ids, finish)
            score = partial(self._logprobs, generation, None, echo)
            choice["logprobs"] = await self._service.text.run(score)
            if body.return_token_ids:
                choice["prompt_token_ids"] = output.prompt_token_ids
            choices.append(choice)
        answer = {**self._head, "choices": choices, "usage": self._usage(call.generations)}
        return await self._service.text.run(partial(json_response, answer))

    async def events(self) -> AsyncGenerator[bytes, None]:
        call, body = self.call, self._body
        begun: set[Generation] = set()
        echoes = await self._echoes()
        async for taken in call.parts():
            chunks = []
            for generation, part in taken:
                first = generation not in begun
                begun.add(generation)
                echo = echoes.get(generation.prompt_index, NO_ECHO)
                chunks.append(self._chunk(generation, part, echo, first))
            yield b"".join(map(event, chunks))
        if body.include_usage:
            counts = self._usage(call.generations)
            yield event({**self._head, "choices": [], "usage": counts})
        yield DONE

    async def _echoes(self) -> dict[int, Echo]:
        """Returns what `echo` puts before each output: its prompt."""
        body, text = self._body, self._service.text
        echoes = {}
        for generation in self.call.generations if body.echo else ():
            at, ids = generation.prompt_index, generation.record.prompt
            if at not in echoes:
                given = await text.decode(ids) if body.token_lists is not None else body.texts[at]
                echoes[at] = Echo(given, await text.ends(ids) if body.logprobs is not None else ())
        return echoes

    def _chunk(self, generation: Generation, part: Part, echo: Echo, first: bool) -> dict[str, Any]:
        text = echo.text + part.text if first else part.text
        choice = self._text_choice(generation, text, part.token_ids, part.finish)
        choice["logprobs"] = self._logprobs(generation, part, echo, first)
        if first and self._body.return_token_ids:
            choice["prompt_token_ids"] = list(generation.record.prompt)
        return self._with_usage({**self._head, "choices": [choice]}, generation)

    def _logprobs(
        self, generation: Generation, part: Part | None, echo: Echo, first: bool = True
    ) -> dict[str, Any] | None:
        """Returns those of a part, or of all; the first part is preceded by the prompt's tokens."""
        if generation.record.logprobs is None:
            return None
        tokens = prompt_tokens(generation, echo.ends, echo.text) if first and echo.ends else []
        for token in generation.scored_tokens(part):
            tokens.append(token._replace(offset=len(echo.text) + token.offset))
        if part is not None and not tokens:
            return None
        return completion_logprobs(tokens, self._service.text.token_bytes())

    def _text_choice(
        self, generation: Generation, text: str, ids: list[int], finish: FinishReason | None
    ) -> dict[str, Any]:
        index = generation.prompt_index * self._body.num_samples + generation.index
        reason = finish.type if finish is not None else None
        return self._choice(index, {"text": text}, ids, finish, reason)
