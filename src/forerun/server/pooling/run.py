"""What endpoints without text have in common: prompts run to their ends, tokens are counted."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from forerun.core.request import RequestRecord
from forerun.core.scheduling_params import SchedulingParams
from forerun.llm.scoring import ScorePrompt
from forerun.server.http.sse import until_disconnect
from forerun.server.http.strict_model import invalid
from forerun.server.openai.models import check_model
from forerun.server.prompt import Prompt
from forerun.server.service import Service

MAX_INPUTS = 2048  # texts of a request, as in OpenAI's API


def check_inputs(name: str, inputs: Sequence[Any]) -> None:
    """Refuses an input, by name, that has no item or too many; for validators of bodies."""
    if not inputs:
        raise invalid(f"{name} is empty; give at least one.")
    if not isinstance(inputs, str) and len(inputs) > MAX_INPUTS:
        raise invalid(f"{name} has {len(inputs)} items; a request takes {MAX_INPUTS}.")


async def answered(
    service: Service,
    model: str | None,
    request: Request,
    answer: Callable[[], Coroutine[Any, Any, Response]],
) -> Response:
    """The answer to a request for `model`; it is given up where the client leaves."""
    check_model(service, model)
    service.check_open()
    return await until_disconnect(request.receive, answer())


async def ended(
    service: Service, prompts: Sequence[ScorePrompt], scheduling: SchedulingParams
) -> list[RequestRecord]:
    """Runs the prompts, all or none, to their ends.

    Raises:
        RequestError: one of them cannot be served.
        ApiError: as `Service.start` and `Call.wait`.
    """
    asked = [
        Prompt(ids, params, logprobs=logprobs, scheduling=scheduling, pooling=pooling)
        for ids, params, logprobs, pooling in prompts
    ]
    call = await service.start(asked, stream=False)
    try:
        await call.wait()
    finally:
        call.close()
    return [generation.record for generation in call.generations]


def prompt_usage(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """The `usage` of answers without text."""
    tokens = sum(len(record.prompt) for record in records)
    cached = sum(record.cached_tokens for record in records)
    details = {"cached_tokens": cached}
    return {"prompt_tokens": tokens, "total_tokens": tokens, "prompt_tokens_details": details}
