"""`POST /v1/responses`."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from forerun.core.errors import RequestError
from forerun.core.request import FinishReason
from forerun.server.generation import Call, Generation, Part
from forerun.server.http.errors import ApiError, json_response
from forerun.server.http.sse import DOCUMENTED_STREAM, named_event
from forerun.server.logprobs import MessageLogprobs
from forerun.server.openai.answer import respond
from forerun.server.openai.background import Background
from forerun.server.openai.conversation import Ask, Conversation
from forerun.server.openai.models import check_model
from forerun.server.openai.response_state import ResponseState
from forerun.server.openai.responses_output import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    OutputItems,
    StreamEvent,
)
from forerun.server.openai.responses_protocol import MAX_OUTPUT_TOKENS, ResponsesRequest
from forerun.server.openai.stored_responses import add_stored_responses
from forerun.server.openai.tools import tool_use
from forerun.server.openai.usage import usage
from forerun.server.service import Service

_REASONS = {"length": MAX_OUTPUT_TOKENS}  # of incomplete responses, by kind of finish


def responses_router(service: Service) -> APIRouter:
    router, background = APIRouter(), Background()
    add_stored_responses(router, service.store, background)

    @router.post("/v1/responses", responses=DOCUMENTED_STREAM)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answers a conversation, as OpenAI's Responses API does."""
        check_model(service, body.model)
        service.check_open()
        if body.background:
            with background.starting() as promised:
                state = await ResponseState.of(service.store, body, promised)
                return json_response(background.start(await _Answer.start(service, body, state)))
        state = await ResponseState.of(service.store, body, background.promised)
        answer = await _Answer.start(service, body, state)
        return await respond(answer, body.stream, request)

    return router


class _Answer:
    """One response."""

    def __init__(
        self,
        service: Service,
        body: ResponsesRequest,
        state: ResponseState,
        echo: dict[str, Any],
        conversation: Conversation,
    ) -> None:
        self._conversation, self.state = conversation, state
        scored = body.logprob_params is not None
        self._logprobs = MessageLogprobs(service.text.token_bytes()) if scored else None
        self._output = OutputItems(self._logprobs)
        self._numbers = itertools.count()
        self._head = {
            "id": conversation.call.new_answer_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "model": body.model or service.model_name,
            **echo,
        }

    @classmethod
    async def start(cls, service: Service, body: ResponsesRequest, state: ResponseState) -> _Answer:
        echo = {**_echo(body), **state.echo}
        functions = [tool.function for tool in body.tools or ()]
        tools = tool_use(functions, body.tool_choice, body.parallel_tool_calls, service.format)
        ask = Ask(
            messages=body.messages(state.earlier),
            variables=body.variables,
            tools=tools,
            sampling=body.sampling,
            max_new_tokens=body.max_output_tokens,
            limit_name=MAX_OUTPUT_TOKENS,
            stream=bool(body.stream),
            scheduling=body.scheduling,
            logprobs=body.logprob_params,
        )
        return cls(service, body, state, echo, await Conversation.start(service, ask))

    @property
    def call(self) -> Call:
        return self._conversation.call

    async def whole(self) -> Response:
        response = await self.finished()
        await self.state.keep(response)
        return json_response(response)

    async def finished(self) -> dict[str, Any]:
        """Waits for the response.

        Raises:
            ApiError: as `Call.wait`.
        """
        ((generation, _, events),) = await self._conversation.whole()
        self._score(generation)
        self._output.push(events)
        finish = generation.record.finish
        self._output.finish(_status(finish))
        return self._response(finish, self._output.whole())

    def begun(self, status: str) -> dict[str, Any]:
        """The response before there is any output."""
        return {**self._head, **_progress(status), "output": [], "usage": None}

    async def events(self) -> AsyncGenerator[bytes, None]:
        begun = self.begun(IN_PROGRESS)
        yield self._sent(
            {"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")
        )
        finish = None
        try:
            async for news in self._conversation.parts():
                for generation, part, events in news:
                    self._score(generation, part)
                    yield self._sent(self._output.push(events))
                    finish = generation.record.finish
            yield self._sent(self._output.finish(_status(finish)))
            response = self._response(finish, self._output.whole())
            await self.state.keep(response)
        except ApiError as error:
            yield self._sent([_failure(error)])
            return
        yield self._sent([{"type": f"response.{response['status']}", "response": response}])

    def _score(self, generation: Generation, part: Part | None = None) -> None:
        if self._logprobs is not None:
            self._logprobs.add(generation.scored_tokens(part))

    def _sent(self, events: Iterable[StreamEvent]) -> bytes:
        return b"".join(
            named_event(event["type"], {**event, "sequence_number": next(self._numbers)})
            for event in events
        )

    def _response(
        self, finish: FinishReason | None, output: list[dict[str, Any]]
    ) -> dict[str, Any]:
        status = _progress(_status(finish), finish)
        return {**self._head, **status, "output": output, "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        generations = self.call.generations
        counts = usage(generations, spec_info=False)
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": self._conversation.reasoning_tokens(generations)
            },
            "total_tokens": counts["total_tokens"],
        }


def _failure(error: ApiError) -> StreamEvent:
    """The last event of a stream that fails; OpenAI's clients raise what is under `error`."""
    told = {"code": error.code, "message": error.message, "param": error.param}
    return {**error.body(), **told, "type": "error"}


def _echo(body: ResponsesRequest) -> dict[str, Any]:
    """What a response repeats of its request.

    Raises:
        RequestError: it cannot be written as JSON again.
    """
    tools = [tool.model_dump() for tool in body.tools or ()]
    echo = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "background": bool(body.background),
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "text": {"format": body.format},
        "top_logprobs": body.top_logprobs or 0,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "presence_penalty": body.presence_penalty or 0.0,
        "reasoning": {
            "effort": None if body.reasoning is None else body.reasoning.effort,
            "summary": None,
        },
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [{**tool, "strict": bool(tool["strict"])} for tool in tools],
        "truncation": "disabled",
        "user": None,
    }
    try:
        msgspec.json.encode(echo)
    except (ValueError, OverflowError, RecursionError) as error:
        raise RequestError(
            "instructions, metadata, text, tools or tool_choice have a value that JSON should not"
            f" have: {error}."
        ) from None
    return echo


def _status(finish: FinishReason | None) -> str:
    return COMPLETED if finish is not None and finish.type == "stop" else INCOMPLETE


def _progress(status: str, finish: FinishReason | None = None) -> dict[str, Any]:
    details = None
    if status == INCOMPLETE and finish is not None:
        details = {"reason": _REASONS.get(finish.type, finish.type)}
    return {"status": status, "error": None, "incomplete_details": details}
