"""What the answers of OpenAI's endpoints have in common."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import Response

from forerun.core.request import FinishReason
from forerun.server.generation import Call, Generation
from forerun.server.http.sse import EventStream, until_disconnect
from forerun.server.openai.protocol import ChatRequest, CompletionRequest
from forerun.server.openai.usage import usage


class Answer(Protocol):
    """The answer to one request, which runs already."""

    @property
    def call(self) -> Call: ...

    async def whole(self) -> Response:
        """Waits for all of it."""

    def events(self) -> AsyncGenerator[bytes, None]:
        """Yields its parts as they come, as server-sent events."""


async def respond(answer: Answer, stream: bool | None, request: Request) -> Response:
    """The response as the client asked for it; where the client leaves, the generations end."""
    if stream:
        return EventStream(answer.events(), answer.call.close)
    return await until_disconnect(request.receive, answer.whole())


class Choices:
    """Choices and usage of completions and of chats."""

    def __init__(self, body: CompletionRequest | ChatRequest) -> None:
        self._asked = body

    def _choice(
        self,
        index: int,
        content: dict[str, Any],
        ids: Sequence[int],
        finish: FinishReason | None,
        reason: str | None,
    ) -> dict[str, Any]:
        """One choice, without log-probabilities.

        Args:
            content: the text, the message, or a delta of it.
            reason: what `finish` is called.
        """
        choice: dict[str, Any] = {
            "index": index,
            **content,
            "logprobs": None,
            "finish_reason": reason,
            "matched_stop": finish.matched if finish is not None else None,
        }
        if self._asked.return_token_ids:
            choice["token_ids"] = list(ids)
        return choice

    def _usage(self, generations: Sequence[Generation]) -> dict[str, Any]:
        return usage(generations, bool(self._asked.return_spec_info))

    def _with_usage(self, chunk: dict[str, Any], generation: Generation) -> dict[str, Any]:
        """The chunk with the usage so far; null where it comes at the end."""
        if self._asked.continuous_usage:
            chunk["usage"] = self._usage([generation])
        elif self._asked.include_usage:
            chunk["usage"] = None
        return chunk
