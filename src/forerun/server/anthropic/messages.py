"""`/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from forerun.core.request import FinishReason
from forerun.server.anthropic.blocks import ContentBlocks, StreamEvent
from forerun.server.anthropic.errors import DOCUMENTED
from forerun.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from forerun.server.generation import Call
from forerun.server.http.errors import ApiError, json_response
from forerun.server.http.sse import DOCUMENTED_STREAM, named_event, with_pings
from forerun.server.openai.answer import respond
from forerun.server.openai.conversation import Ask, Conversation, prompt_ids
from forerun.server.openai.models import check_model
from forerun.server.service import Service

PING = named_event("ping", {"type": "ping"})
PING_SECONDS = 10.0  # of silence, such as of a long prompt; some proxies give up after 30


def messages_router(service: Service) -> APIRouter:
    router = APIRouter(responses=DOCUMENTED)

    @router.post("/v1/messages", responses=DOCUMENTED_STREAM)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answers a conversation, as Anthropic's Messages API does."""
        check_model(service, body.model)
        service.check_open()
        answer = await _Message.start(service, body)
        return await respond(answer, body.stream, request)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest) -> Response:
        """The tokens of the prompt that `/v1/messages` would start from."""
        check_model(service, body.model)
        tools = body.tool_use(service.format)
        ids = await prompt_ids(service, body.chat(), body.variables, tools, body.ending)
        return json_response({"input_tokens": len(ids)})

    return router


class _Message:
    """One answer."""

    def __init__(self, service: Service, body: MessagesRequest, conversation: Conversation) -> None:
        self._conversation, self._text = conversation, service.text
        self._max_tokens = body.max_tokens
        self._blocks = ContentBlocks()
        self._head = {
            "id": conversation.call.new_answer_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": body.model,
        }

    @classmethod
    async def start(cls, service: Service, body: MessagesRequest) -> _Message:
        ask = Ask(
            messages=body.chat(),
            variables=body.variables,
            ending=body.ending,
            tools=body.tool_use(service.format),
            sampling=body.sampling,
            max_new_tokens=None,  # `body.sampling` knows both limits
            stream=bool(body.stream),
            scheduling=body.scheduling,
            include_reasoning=body.shows_thinking,
        )
        return cls(service, body, await Conversation.start(service, ask))

    @property
    def call(self) -> Call:
        return self._conversation.call

    async def whole(self) -> Response:
        ((generation, _, events),) = await self._conversation.whole()
        finish = generation.record.finish
        self._blocks.push(events, finish)
        self._blocks.finish()
        content = {"content": self._blocks.whole()}
        message = {**self._head, **content, **self._end(finish), "usage": self._usage()}
        return await self._text.run(partial(json_response, message))

    async def events(self) -> AsyncGenerator[bytes, None]:
        async for data in with_pings(self._events(), PING, PING_SECONDS):
            yield data

    async def _events(self) -> AsyncGenerator[bytes, None]:
        begun = {**self._head, "content": [], **self._end(None), "usage": self._usage()}
        yield _sent([{"type": "message_start", "message": begun}]) + PING
        finish = None
        try:
            async for news in self._conversation.parts():
                for _, part, events in news:
                    finish = part.finish
                    made = self._blocks.push(events, finish)
                    if made:
                        yield _sent(made)
        except ApiError as error:
            yield _sent([error.body()])
            return
        delta = {"type": "message_delta", "delta": self._end(finish), "usage": self._usage()}
        yield _sent([*self._blocks.finish(), delta, {"type": "message_stop"}])

    def _end(self, finish: FinishReason | None) -> dict[str, Any]:
        """Why the answer ended; nulls while it has not."""
        matched = finish.matched if finish is not None else None
        return {
            "stop_reason": None if finish is None else self._stop_reason(finish),
            "stop_sequence": matched if isinstance(matched, str) else None,
        }

    def _stop_reason(self, finish: FinishReason) -> str:
        if finish.type == "length":
            (generation,) = self.call.generations
            cut = len(generation.record.output) >= self._max_tokens
            return "max_tokens" if cut else "model_context_window_exceeded"
        if finish.type != "stop":
            return finish.type  # "abort": by /abort_request
        if self._blocks.complete_calls:
            return "tool_use"
        return "stop_sequence" if isinstance(finish.matched, str) else "end_turn"

    def _usage(self) -> dict[str, Any]:
        """Token counts so far. What the prefix cache had is not among the input tokens."""
        (generation,) = self.call.generations
        record = generation.record
        counts: dict[str, Any] = {
            "input_tokens": len(record.prompt) - record.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": record.cached_tokens,
            "output_tokens": len(record.output),
        }
        if self._conversation.reads_reasoning:
            thought = self._conversation.reasoning_tokens(self.call.generations)
            counts["output_tokens_details"] = {"thinking_tokens": thought}
        return counts


def _sent(events: Iterable[StreamEvent]) -> bytes:
    return b"".join(named_event(event["type"], event) for event in events)
