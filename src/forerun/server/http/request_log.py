"""One line in the log per HTTP request; prompts and answers only where they are asked for."""

from __future__ import annotations

import logging
import time
from dataclasses import fields
from functools import partial
from typing import Any

from forerun.core.sampling_params import SamplingParams
from forerun.llm.text import Tokenizer, detokenize
from forerun.server.generation import Call, Generation
from forerun.server.http.exchange import Exchange
from forerun.server.logs import Event
from forerun.server.text import TextService

log = logging.getLogger("forerun.requests")

QUIET = ("/health", "/ping", "/metrics")  # asked for all the time: logged at level debug
MAX_PATH = 200  # characters
MAX_TEXT = 2048  # characters, or token ids, at level 2
# Levels of --log-requests-level.
WITH_PARAMS, WITH_SHORT_TEXT, WITH_TEXT = 1, 2, 3


class RequestLog:
    """Writes the lines."""

    def __init__(self, text: TextService, details: int | None) -> None:
        """`details`: level of what is logged of a generation; None: nothing but the line."""
        self._text = text
        self._details = details
        if details is not None:  # asked for, whatever the level of other messages
            log.setLevel(logging.INFO)

    async def ended(self, exchange: Exchange, method: str, path: str, client: str | None) -> None:
        """An HTTP request was answered, or its client is gone."""
        level = logging.DEBUG if path in QUIET else logging.INFO
        if not log.isEnabledFor(level):
            return
        line: dict[str, Any] = {
            "method": method,
            "path": path[:MAX_PATH],
            "status": exchange.status,
            "seconds": round(time.monotonic() - exchange.started, 6),
            "request_id": exchange.request_id,
            "client": client,
        }
        if exchange.key is not None:
            line["key"] = exchange.key  # its name
        if exchange.trace_context:
            line["trace_id"] = exchange.trace_context["traceparent"].split("-")[1]
        for call in exchange.calls:
            line |= call_figures(call)
        log.log(level, Event("request", line))
        if self._details is not None:
            for call in exchange.calls:
                for generation in call.generations:
                    await self._describe(exchange, generation, self._details)

    async def _describe(self, exchange: Exchange, generation: Generation, level: int) -> None:
        line: dict[str, Any] = {"request_id": exchange.request_id, "rid": generation.record.rid}
        if level >= WITH_PARAMS:
            line["sampling_params"] = changed(generation.params)
        if level >= WITH_SHORT_TEXT:
            limit = MAX_TEXT if level < WITH_TEXT else None
            line["prompt"] = await self._shown(generation.record.prompt, limit)
            line["output"] = await self._shown(generation.record.output, limit)
        if level >= WITH_PARAMS:
            log.info(Event("generation", line))

    async def _shown(self, ids: Any, limit: int | None) -> Any:
        """Token ids as text, where there is a tokenizer."""
        tokenizer: Tokenizer | None = self._text.tokenizer
        if tokenizer is None:
            return list(ids[:limit])
        decode = partial(detokenize, tokenizer, list(ids), skip_special_tokens=False)
        return (await self._text.run(decode))[:limit]


def call_figures(call: Call) -> dict[str, Any]:
    """What the line says about the generations of a request; times in seconds."""
    records = [generation.record for generation in call.generations]
    tokens = sum(len(record.output) for record in records)
    steps = sum(len(record.accept_lengths) for record in records)
    firsts = [r.first_token_at - r.arrival for r in records if r.first_token_at is not None]
    ends = [r.finished_at - r.arrival for r in records if r.finished_at is not None]
    reasons = {record.finish.type if record.finish else "error" for record in records}
    out: dict[str, Any] = {
        "rid": call.generations[0].group,
        "generations": len(records),
        "prompt_tokens": sum(len(g.record.prompt) for g in call.generations if g.index == 0),
        "cached_tokens": sum(record.cached_tokens for record in records),
        "completion_tokens": tokens,
        "ttft": round(min(firsts), 6) if firsts else None,
        "e2e": round(max(ends), 6) if ends else None,
        "accept_length": round(tokens / steps, 4) if steps else None,
        "finish_reason": ",".join(sorted(reasons)),
    }
    if call.error is not None:
        out["error"] = call.error.code
    return out


def changed(params: SamplingParams) -> dict[str, Any]:
    """The sampling parameters that are not the defaults."""
    default = SamplingParams()
    values = {spec.name: getattr(params, spec.name) for spec in fields(params)}
    return {name: value for name, value in values.items() if value != getattr(default, name)}
