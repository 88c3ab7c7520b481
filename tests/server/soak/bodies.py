"""Cases as bodies of each endpoint, and the samples in its answers and streams."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tests.server.soak.cases import Case, Reference, Sample

GENERATE, COMPLETIONS = "/generate", "/v1/completions"
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
_OPENAI = {"max_new_tokens": "max_tokens", "sampling_seed": "seed", "min_new_tokens": "min_tokens"}
_RESPONSES = {
    "temperature", "top_p", "top_k", "min_p", "stop", "ignore_eos", "speculative",
    "max_draft_tokens", "sampling_seed", "max_new_tokens",
}  # fmt: skip


def routes(case: Case) -> list[str]:
    """Endpoints that take a case."""
    if not case.chat:
        return [GENERATE, COMPLETIONS]
    return [GENERATE, COMPLETIONS, CHAT] + [RESPONSES] * (case.params.keys() <= _RESPONSES)


def body(route: str, case: Case, reference: Reference, stream: bool) -> dict[str, Any]:
    """Text as text where the endpoint takes it; conversations as token ids elsewhere."""
    if route == GENERATE:
        prompt = {"input_ids": reference.prompt_ids} if case.chat else {"text": case.text}
        return {**prompt, "sampling_params": case.params, "stream": stream}
    params = {_OPENAI.get(name, name): value for name, value in case.params.items()}
    if params.pop("json_object", False):
        params["response_format"] = {"type": "json_object"}
    made = {"model": "bundled", "stream": stream, **params}
    if route == RESPONSES:
        made["max_output_tokens"] = made.pop("max_tokens")
        return {**made, "input": case.text}
    made["return_token_ids"] = True
    if route == COMPLETIONS:
        return {**made, "prompt": reference.prompt_ids if case.chat else case.text}
    return {**made, "messages": [{"role": "user", "content": case.text}]}


def samples(route: str, answer: Any) -> list[Sample]:
    """Of a whole answer. Responses have no ids."""
    if route == GENERATE:
        answers = answer if isinstance(answer, list) else [answer]
        return [_native(one) for one in answers]
    if route == RESPONSES:
        return [_response(answer)]
    return [_choice(choice, choice.get("message")) for choice in answer["choices"]]


def _native(answer: Mapping[str, Any]) -> Sample:
    ids, info = answer["output_ids"], answer["meta_info"]
    scored = [token for _, token, _ in info.get("output_token_logprobs", [])]
    if scored not in ([], ids):
        raise ValueError(f"the log-probabilities are of {scored}, not of {ids}")
    return Sample(ids, answer["text"], info["finish_reason"]["type"])


def _choice(choice: Mapping[str, Any], message: Mapping[str, Any] | None) -> Sample:
    text = choice["text"] if message is None else message["content"] or ""
    return Sample(choice["token_ids"], text, choice["finish_reason"])


def _response(answer: Mapping[str, Any]) -> Sample:
    text = "".join(
        part["text"]
        for item in answer["output"]
        if item["type"] == "message"
        for part in item["content"]
    )
    details = answer["incomplete_details"] or {"reason": "stop"}
    finish = {"max_output_tokens": "length"}.get(details["reason"], details["reason"])
    return Sample([], text, finish)


class StreamError(Exception):
    """The stream's last event was an error."""

    def __init__(self, code: str | None, message: str) -> None:
        super().__init__(message)
        self.code = code


class StreamSamples:
    """Collects a stream's events."""

    def __init__(self, route: str) -> None:
        self._route = route
        self._rest = b""
        self._found: dict[int, Sample] = {}
        self.events = 0
        self.ended = False

    def feed(self, data: bytes) -> None:
        """
        Raises:
            StreamError: the event of an error.
        """
        *whole, self._rest = (self._rest + data).split(b"\n\n")
        for block in whole:
            payload = next(line[6:] for line in block.split(b"\n") if line.startswith(b"data: "))
            self.events += 1
            if payload == b"[DONE]":
                self.ended = True
                continue
            event = json.loads(payload)
            if "error" in event and event.get("error"):
                raise StreamError(event["error"]["code"], event["error"]["message"])
            self._take(event)

    def samples(self) -> list[Sample]:
        return [self._found[index] for index in sorted(self._found)]

    def _take(self, event: dict[str, Any]) -> None:
        if self._route == GENERATE:
            reason = event["meta_info"]["finish_reason"]
            sample = Sample(event["output_ids"], event["text"], reason["type"] if reason else "")
            self._found[event.get("index", 0)] = sample
        elif self._route == RESPONSES:
            if event["type"] in ("response.completed", "response.incomplete"):
                self._found[0], self.ended = _response(event["response"]), True
        else:
            for index, ids, text, finish in _deltas(event):
                before = self._found.get(index, Sample([], "", ""))
                self._found[index] = Sample(before.ids + ids, before.text + text, finish or "")


def _deltas(event: dict[str, Any]) -> Iterator[tuple[int, list[int], str, str | None]]:
    for choice in event["choices"]:
        text = choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
        yield choice["index"], choice.get("token_ids", []), text, choice["finish_reason"]
