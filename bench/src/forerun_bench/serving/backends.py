"""The APIs that can be measured: how a request is written, and what an answer says.

Tokens of a chunk come from the server: `meta_info.completion_tokens` (SGLang), `token_ids`
(`return_token_ids`, vLLM's) or `usage` on every chunk (`continuous_usage_stats`, vLLM's). An
OpenAI-compatible server sends none of them unless it is asked to (`--extra-request-body`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import msgspec

from forerun_bench.serving.dataset import Prompt
from forerun_bench.serving.http import RequestFailed
from forerun_bench.serving.sse import MALFORMED

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one event, or a whole answer without streaming, says. None: it does not say."""

    text: bool = False  # it has new text or ids
    new_tokens: int | None = None
    total_tokens: int | None = None  # of the request so far
    closing: bool = False  # only totals, no output
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    verify_ct: int | None = None


@dataclass(frozen=True)
class RequestOptions:
    """What all requests of a benchmark have in common."""

    model: str | None
    stream: bool
    ignore_eos: bool
    extra: Mapping[str, Any]  # merged into every body


class Backend(Protocol):
    path: str

    def body(self, prompt: Prompt, options: RequestOptions) -> dict[str, Any]: ...

    def read(self, data: bytes) -> Chunk:
        """
        Raises:
            RequestFailed: not the API's JSON, or an error of the server.
        """
        ...


class _MetaInfo(msgspec.Struct):
    completion_tokens: int
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    spec_verify_ct: int | None = None


class _Native(msgspec.Struct):
    meta_info: _MetaInfo | None = None
    error: Any = None


class SGLang:
    """SGLang's native `/generate`."""

    path = "/generate"

    def body(self, prompt: Prompt, options: RequestOptions) -> dict[str, Any]:
        params = {
            "temperature": 0.0,
            "max_new_tokens": prompt.output_len,
            "ignore_eos": options.ignore_eos,
        }
        key = "text" if isinstance(prompt.content, str) else "input_ids"
        body = {key: prompt.content, "sampling_params": params, "stream": options.stream}
        return _merged(body, options.extra)

    def read(self, data: bytes) -> Chunk:
        event = _decode(data, _NATIVE)
        if event.error is not None:
            raise _said(event.error)
        if event.meta_info is None:
            raise RequestFailed(MALFORMED, f"no meta_info: {data[:80]!r}")
        meta = event.meta_info
        return Chunk(
            total_tokens=meta.completion_tokens,
            prompt_tokens=meta.prompt_tokens,
            cached_tokens=meta.cached_tokens,
            verify_ct=meta.spec_verify_ct,
        )


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    message: _Delta | None = None
    token_ids: list[int] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _OpenAI(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: Any = None


class OpenAI:
    """`/v1/completions`."""

    path = "/v1/completions"

    def body(self, prompt: Prompt, options: RequestOptions) -> dict[str, Any]:
        return self._request({"prompt": prompt.content}, prompt, options)

    def _request(
        self, content: dict[str, Any], prompt: Prompt, options: RequestOptions
    ) -> dict[str, Any]:
        body = {
            "model": options.model,
            **content,
            "temperature": 0.0,
            "max_tokens": prompt.output_len,
            "ignore_eos": options.ignore_eos,
            "stream": options.stream,
        }
        if options.stream:
            body["stream_options"] = {"include_usage": True}
        return _merged(body, options.extra)

    def read(self, data: bytes) -> Chunk:
        event = _decode(data, _OPENAI)
        if event.error is not None:
            raise _said(event.error)
        if not event.choices and event.usage is None:
            raise RequestFailed(MALFORMED, f"neither choices nor usage: {data[:80]!r}")
        usage = event.usage or _Usage()
        ids = [choice.token_ids for choice in event.choices if choice.token_ids is not None]
        return Chunk(
            text=any(map(_has_text, event.choices)),
            new_tokens=sum(map(len, ids)) if ids else None,
            total_tokens=usage.completion_tokens,
            closing=not event.choices,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=(usage.prompt_tokens_details or _Details()).cached_tokens,
        )


class OpenAIChat(OpenAI):
    """`/v1/chat/completions`: every prompt is a user's message."""

    path = "/v1/chat/completions"

    def body(self, prompt: Prompt, options: RequestOptions) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt.content}]
        return self._request({"messages": messages}, prompt, options)


_NATIVE: Final = msgspec.json.Decoder(_Native)
_OPENAI: Final = msgspec.json.Decoder(_OpenAI)


def make_backend(name: str) -> Backend:
    """For a name of `config.BACKENDS`."""
    known: dict[str, Backend] = {
        "sglang": SGLang(),
        "openai": OpenAI(),
        "openai-chat": OpenAIChat(),
    }
    return known[name]


def _has_text(choice: _Choice) -> bool:
    said = choice.delta or choice.message or _Delta()
    return bool(
        choice.text or choice.token_ids or said.content or said.reasoning_content or said.tool_calls
    )


def _decode(data: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestFailed(MALFORMED, f"{error}: {data[:80]!r}") from None


def _said(error: Any) -> RequestFailed:
    """An error object in a stream: OpenAI's and SGLang's have a message."""
    message = error.get("message", error) if isinstance(error, dict) else error
    return RequestFailed("error event", str(message)[:400])


def _merged(body: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """`extra` over `body`; objects in both are merged, such as `sampling_params`."""
    out = dict(body)
    for key, value in extra.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = {**out[key], **value} if both else value
    return out
