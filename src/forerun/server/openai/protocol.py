"""Requests of the OpenAI API, and Forerun's additions (names as in SGLang and vLLM).

Unknown fields are refused with the nearest known name. Null means "not given" everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from forerun.core.errors import RequestError
from forerun.core.grammar import JSON_SCHEMA, STRUCTURAL_TAG
from forerun.core.logprobs import MAX_TOP_LOGPROBS, LogprobParams
from forerun.core.sampling_params import MAX_BIASES, SamplingParams, param_of
from forerun.server.http.client_names import in_client_names
from forerun.server.http.strict_model import (
    FirstError,
    Many,
    Scheduled,
    StrictModel,
    Unsupported,
    invalid,
)
from forerun.server.openai.chat_prompt import ChatPrompt
from forerun.server.openai.response_format import grammar_of_format
from forerun.server.openai.spellings import respelled
from forerun.server.openai.tools import MAX_TOOLS, Tool

# Sent by many clients; nothing here depends on them.
IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "parallel_tool_calls",
)  # fmt: skip

_NO_TOOLS = "tools belong to /v1/chat/completions and /v1/responses"
_TEXT_ONLY = "the output is text only"
# Values that change nothing are accepted.
UNSUPPORTED: Unsupported = {
    "top_logprobs": ((0,), "a completion's logprobs is their number"),
    "prompt_logprobs": ((), "use echo and logprobs, or logprob_start_len of /generate"),
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "functions": (([],), "it is called tools now"),
    "function_call": (("none", "auto"), "it is called tool_choice now"),
    "stream_reasoning": ((True,), "reasoning is streamed as the rest is; join its deltas"),
    "reasoning_effort": ((), "use chat_template_kwargs for what the model's template takes"),
    "verbosity": ((), "ask for it in the prompt"),
    "modalities": ((["text"],), _TEXT_ONLY),
    "audio": ((), _TEXT_ONLY),
    "prediction": ((), "drafts come from the engine's own algorithm; leave it out"),
    "web_search_options": ((), "there is no web search"),
    "best_of": ((), "use n > 1 and choose"),
    "suffix": (("",), "text cannot be inserted; put everything into the prompt"),
}


def _few(biases: Any) -> Any:
    """Refuses too many before each is looked at."""
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:
        raise invalid(f"logit_bias takes at most {MAX_BIASES} tokens, got {len(biases)}.")
    return biases


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # nothing is padded here
    continuous_usage_stats: bool | None = None


# Parameter → field of `SamplingParams`.
_SAMPLING = {
    known.openai or spec.name: spec.name
    for spec in fields(SamplingParams)
    if (known := param_of(spec)).openai is not None
}
_OPENAIS = {ours: theirs for theirs, ours in _SAMPLING.items() if ours != theirs}
MAX_TOKENS = "max_tokens"
_CHECKED = _SAMPLING.keys() - {"min_tokens"}  # alone; this one depends on max_tokens
_IN_JSON: Mapping[str, Any] = {  # of types that are others there
    "tuple[tuple[int, float], ...]": Annotated[dict[str, float], BeforeValidator(_few)],
    "tuple[str, ...]": str | Many[str],
    "tuple[int, ...]": Many[int],
}


def _json_fields() -> dict[str, Any]:
    """Name → (type, field) of the parameters in `_SAMPLING`."""
    hints, made = get_type_hints(SamplingParams), {}
    for spec in fields(SamplingParams):
        known, kind = param_of(spec), _IN_JSON.get(str(spec.type), hints[spec.name])
        if spec.name in (JSON_SCHEMA, STRUCTURAL_TAG):  # as text or as an object
            kind = str | dict[str, Any]
        if known.openai is not None:
            described = Field(None, description=known.description)
            made[known.openai or spec.name] = (kind | None, described)
    return made


def sampling_params(
    body: StrictModel,
    max_new_tokens: int,
    grammar: Mapping[str, Any] | None = None,
    least: int = 1,
    source: str = "response_format",
    limit: str = MAX_TOKENS,
) -> SamplingParams:
    """Makes those of a request that are in `_SAMPLING`; those not given have defaults.

    Args:
        grammar: of the field `source`.
        least: the smallest `max_new_tokens`; 0 where an answer may be the prompt alone.
        limit: what the client calls `max_new_tokens`.

    Raises:
        RequestError: a value is out of range.
    """
    if max_new_tokens == 0 < least:
        raise RequestError(f"{limit} must be >= 1, got 0; only completions with echo take 0.")
    given = {_SAMPLING[name]: value for name, value in body if name in _SAMPLING}
    known = {name: value for name, value in given.items() if value is not None}
    for name, value in (grammar or {}).items():
        if name in known:
            raise RequestError(f"{source} and {name} are set; give one.")
        known[name] = value
    with in_client_names(openais_names(limit)):
        return SamplingParams.of({**known, "max_new_tokens": max_new_tokens})


def openais_names(limit: str = MAX_TOKENS) -> dict[str, str]:
    """Names of `in_client_names` in OpenAI's APIs; `limit`: that of `max_new_tokens`."""
    return {**_OPENAIS, "max_new_tokens": limit}


def refuse_invalid(
    value: Any,
    as_params: Callable[[Any], Mapping[str, Any]],
    names: Mapping[str, str] | None = None,
) -> None:
    """Refuses a field's value by itself, so that the error names the field.

    Args:
        names: as of `in_client_names`; None: OpenAI's.

    Raises:
        PydanticCustomError: it does not make valid parameters.
    """
    try:
        with in_client_names(openais_names() if names is None else names):
            SamplingParams.of(as_params(value))
    except RequestError as error:
        raise invalid(str(error)) from None


if TYPE_CHECKING:

    class _Fields(Scheduled):
        """Those that are read by name."""

        temperature: float | None = None
        top_p: float | None = None
        frequency_penalty: float | None = None
        presence_penalty: float | None = None
else:
    _Fields = create_model("_Fields", __base__=Scheduled, **_json_fields())


class SamplingFields(_Fields):
    """What all requests say about how tokens are chosen: the table of `SamplingParams`."""

    @model_validator(mode="before")
    @classmethod
    def _respelled(cls, data: Any) -> Any:
        return respelled(data)

    @field_validator(*_CHECKED)
    @classmethod
    def _in_range(cls, value: Any, info: ValidationInfo) -> Any:
        name = _SAMPLING[str(info.field_name)]
        if value is not None:
            refuse_invalid(value, lambda given: {name: given})
        return value


class _Common(SamplingFields):
    """What completions and chat completions have in common."""

    unsupported = UNSUPPORTED
    ignored = IGNORED

    model: str | None = None
    max_tokens: int | None = Field(None, description="Most tokens to generate")
    n: int | None = Field(None, description="Completions per prompt")
    response_format: dict[str, Any] | None = Field(
        None, description="Of type text, json_object, json_schema or structural_tag"
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(
        None, description="Adds prompt_token_ids and each choice's token_ids"
    )
    return_spec_info: bool | None = Field(
        None, description="Adds figures of speculation to usage.completion_tokens_details"
    )

    @field_validator("response_format")
    @classmethod
    def _is_a_format(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        refuse_invalid(value, grammar_of_format)
        return value

    def sampling(self, max_new_tokens: int) -> SamplingParams:
        """Sampling parameters of one completion.

        Raises:
            RequestError: a value is out of range.
        """
        grammar = grammar_of_format(self.response_format)
        return sampling_params(
            self, max_new_tokens, grammar, self.least_tokens, limit=self.limit_name
        )

    @property
    def limit_name(self) -> str:
        """What the client calls `max_new_tokens`."""
        return MAX_TOKENS

    @property
    def least_tokens(self) -> int:
        """The smallest `max_tokens`."""
        return 1

    @property
    def num_samples(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class CompletionRequest(_Common):
    """`POST /v1/completions`."""

    prompt: str | Many[str] | Many[int] | Many[Many[int]]
    echo: bool | None = Field(None, description="Begin the text with the prompt")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="Of each token, and of as many most probable"
    )

    @property
    def logprob_params(self) -> LogprobParams | None:
        if self.logprobs is None:
            return None
        return LogprobParams(start_len=0 if self.echo else -1, top=self.logprobs)

    @property
    def least_tokens(self) -> int:
        return 0 if self.echo else 1

    @property
    def token_lists(self) -> list[list[int]] | None:
        """Prompts that are token ids; None for text."""
        given = self.prompt
        if isinstance(given, str) or not given or isinstance(given[0], str):
            return None
        # Lists of lists, or one list of ids: pydantic has checked that they are not mixed.
        return given if isinstance(given[0], list) else [given]

    @property
    def texts(self) -> list[str]:
        """Prompts that are text."""
        return [self.prompt] if isinstance(self.prompt, str) else list(map(str, self.prompt))

    @model_validator(mode="before")
    @classmethod
    def _best_of_all(cls, data: Any) -> Any:
        """The best n of n are all of them."""
        if isinstance(data, dict) and data.get("best_of") == (data.get("n") or 1):
            return {name: value for name, value in data.items() if name != "best_of"}
        return data

    @model_validator(mode="after")
    def _prompts_given(self) -> CompletionRequest:
        if isinstance(self.prompt, list) and not self.prompt:
            raise invalid("prompt is an empty list; give at least one prompt.")
        return self


class ChatRequest(_Common, ChatPrompt):
    """`POST /v1/chat/completions`."""

    messages: Many[dict[str, Any]]
    logprobs: bool | None = Field(None, description="Of each token of the answer")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="And of as many most probable"
    )
    max_completion_tokens: int | None = Field(None, description="Another name of max_tokens")
    tools: Annotated[list[Tool], FirstError(MAX_TOOLS)] | None = Field(
        None, description="Functions that may be called"
    )
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="auto, none, required or a function by name"
    )
    parallel_tool_calls: bool | None = Field(None, description="False: at most one call")
    separate_reasoning: bool | None = Field(
        None, description="False: reasoning stays in the content, with its markers"
    )
    include_reasoning: bool | None = Field(None, description="False: reasoning is left out")
    return_meta_info: bool | None = Field(
        None, description="Adds the meta_info of /generate to the choices; not in a stream"
    )

    @field_validator("top_logprobs")
    @classmethod
    def _with_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise invalid("top_logprobs is set without logprobs; set logprobs to true.")
        return value

    @field_validator("return_meta_info")
    @classmethod
    def _without_stream(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("stream"):
            raise invalid("return_meta_info is not in streams; use return_spec_info.")
        return value

    @property
    def logprob_params(self) -> LogprobParams | None:
        return LogprobParams(top=self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit_name(self) -> str:
        newer = self.max_tokens is None and self.max_completion_tokens is not None
        return "max_completion_tokens" if newer else MAX_TOKENS

    @property
    def max_new_tokens(self) -> int | None:
        """
        Raises:
            RequestError: two different limits.
        """
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise RequestError(
                f"max_tokens is {self.max_tokens} and max_completion_tokens is"
                f" {self.max_completion_tokens}; give one."
            )
        return next(iter(both), None)
