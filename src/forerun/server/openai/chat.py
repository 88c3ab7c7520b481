"""`/v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from forerun.core.request import FinishReason
from forerun.server.generation import Call, Generation, Part
from forerun.server.http.errors import json_response
from forerun.server.http.sse import DOCUMENTED_STREAM, DONE, event
from forerun.server.logprobs import chat_logprobs
from forerun.server.openai.answer import Choices, respond
from forerun.server.openai.chat_message import ChatMessage
from forerun.server.openai.conversation import Ask, Conversation, News
from forerun.server.openai.models import check_model
from forerun.server.openai.protocol import ChatRequest
from forerun.server.openai.tools import tool_use
from forerun.server.openai.usage import usage
from forerun.server.service import Service


def chat_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", responses=DOCUMENTED_STREAM)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answers a conversation, as OpenAI's API does."""
        check_model(service, body.model)
        service.check_open()
        answer = await _Chat.start(service, body)
        return await respond(answer, body.stream, request)

    return router


class _Chat(Choices):
    """One request: its generations, and what its answers have in common."""

    def __init__(self, service: Service, body: ChatRequest, conversation: Conversation) -> None:
        super().__init__(body)
        self._text = service.text
        self._body, self._conversation = body, conversation
        self._messages = {g: ChatMessage() for g in conversation.call.generations}
        self._head = {
            "id": conversation.call.new_answer_id("chatcmpl-"),
            "created": int(time.time()),
            "model": body.model or service.model_name,
        }

    @classmethod
    async def start(cls, service: Service, body: ChatRequest) -> _Chat:
        functions = [tool.function for tool in body.tools or ()]
        ask = Ask(
            messages=body.messages,
            variables=body.variables,
            ending=body.ending,
            tools=tool_use(functions, body.tool_choice, body.parallel_tool_calls, service.format),
            sampling=body.sampling,
            max_new_tokens=body.max_new_tokens,
            limit_name=body.limit_name,
            n=body.num_samples,
            stream=bool(body.stream),
            logprobs=body.logprob_params,
            scheduling=body.scheduling,
            separate_reasoning=body.separate_reasoning is not False,
            include_reasoning=body.include_reasoning is not False,
        )
        return cls(service, body, await Conversation.start(service, ask))

    @property
    def call(self) -> Call:
        return self._conversation.call

    async def whole(self) -> Response:
        with_reasoning = self._conversation.reads_reasoning
        choices = []
        for generation, output, events in await self._conversation.whole():
            finish = generation.record.finish
            message = self._messages[generation].whole(events, finish, with_reasoning)
            choice = self._chat_choice(generation, output.output_ids, finish, {"message": message})
            choice["logprobs"] = await self._text.run(partial(self._logprobs, generation))
            if self._body.return_meta_info:
                choice["meta_info"] = output.meta_info
            choices.append(choice)
        answer = {**self._head, "object": "chat.completion", "choices": choices}
        if self._body.return_meta_info and len(choices) == 1:  # SGLang has it in the choice alone
            answer["meta_info"] = choices[0]["meta_info"]
        answer["usage"] = self._usage(self.call.generations)
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = list(self.call.generations[0].record.prompt)
        return await self._text.run(partial(json_response, answer))

    async def events(self) -> AsyncGenerator[bytes, None]:
        generations = self.call.generations
        yield b"".join(event(self._first_chunk(generation)) for generation in generations)
        async for news in self._conversation.parts():
            yield b"".join(event(self._chunk(one)) for one in news)
        if self._body.include_usage:
            counts = self._usage(generations)
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

    def _chunk(self, news: News) -> dict[str, Any]:
        generation, part, events = news
        delta = self._messages[generation].delta(events, part.finish)
        choice = self._chat_choice(generation, part.token_ids, part.finish, {"delta": delta})
        choice["logprobs"] = self._logprobs(generation, part)
        return self._with_usage({**self._chunk_head, "choices": [choice]}, generation)

    def _logprobs(self, generation: Generation, part: Part | None = None) -> dict[str, Any] | None:
        """Returns those of a part, or of all tokens, if they were asked for."""
        tokens = generation.scored_tokens(part)
        if generation.record.logprobs is None or (part is not None and not tokens):
            return None
        return chat_logprobs(tokens, self._text.token_bytes())

    def _usage(self, generations: Sequence[Generation]) -> dict[str, Any]:
        conversation, spec_info = self._conversation, bool(self._body.return_spec_info)
        if not conversation.reads_reasoning:
            return super()._usage(generations)
        return usage(generations, spec_info, conversation.reasoning_tokens(generations))

    def _chat_choice(
        self,
        generation: Generation,
        ids: list[int],
        finish: FinishReason | None,
        content: dict[str, Any],
    ) -> dict[str, Any]:
        """`content`: the message, or a delta of it."""
        reason = self._messages[generation].finish_reason(finish)
        return self._choice(generation.index, content, ids, finish, reason)
