"""Requests of `/v1/responses`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from forerun.core.errors import RequestError, nearest, shown
from forerun.core.logprobs import MAX_TOP_LOGPROBS, LogprobParams
from forerun.core.sampling_params import SamplingParams
from forerun.server.http.strict_model import (
    MAX_VARIABLES,
    FirstError,
    Many,
    StrictModel,
    Unsupported,
    invalid,
)
from forerun.server.openai.chat_prompt import Effort, variables_of
from forerun.server.openai.protocol import (
    UNSUPPORTED,
    SamplingFields,
    refuse_invalid,
    sampling_params,
)
from forerun.server.openai.response_format import grammar_of_text_format
from forerun.server.openai.tools import MAX_TOOLS, Function

MAX_METADATA = 16  # entries, as in OpenAI's API
MAX_OUTPUT_TOKENS = "max_output_tokens"  # a limit's name, and why a response is incomplete
LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")  # of the latter there is none
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class FunctionTool(StrictModel):
    """A tool; the only kind is a function."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # as of `Function`

    @property
    def function(self) -> Function:
        return Function(**self.model_dump(exclude={"type"}))


class TextOptions(StrictModel):
    unsupported: ClassVar[Unsupported] = {
        "verbosity": (("medium",), "ask for it in the prompt"),
    }
    format: dict[str, Any] | None = Field(
        None, description="Of type text, json_object, json_schema or structural_tag"
    )

    @field_validator("format")
    @classmethod
    def _known(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        refuse_invalid(value, grammar_of_text_format)
        return value


class ReasoningOptions(StrictModel):
    unsupported: ClassVar[Unsupported] = {
        "summary": (("auto",), "reasoning is returned as the model writes it"),
        "generate_summary": (("auto",), "reasoning is returned as the model writes it"),
    }
    effort: Effort | None = None


class ConversationId(StrictModel):
    id: str


class ResponsesRequest(SamplingFields):
    """`POST /v1/responses`."""

    unsupported: ClassVar[Unsupported] = {
        **UNSUPPORTED,
        "prompt": ((), "no prompts are stored here; send it as input"),
        "truncation": (("disabled",), "shorten the input"),
        "max_tool_calls": ((), "there are no tools that run on the server"),
        "context_management": ((), "shorten the input"),
    }
    ignored = (
        "user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "stream_options",
    )  # fmt: skip

    model: str | None = None
    input: str | Many[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    store: bool | None = Field(
        None, description="True: kept until deleted. Default: kept until newer ones need the room"
    )
    previous_response_id: str | None = Field(None, description="Of the one that this goes on from")
    conversation: str | ConversationId | None = Field(
        None, description="That this goes on from, and is added to"
    )
    background: bool | None = Field(None, description="Answer at once; get the response by its id")
    tools: Annotated[list[FunctionTool], FirstError(MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="auto, none, required or a function by name"
    )
    parallel_tool_calls: bool | None = Field(None, description="False: at most one call")
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    include: Many[str] | None = Field(None, description=f"{LOGPROBS}, with top_logprobs")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="And of as many most probable tokens"
    )
    metadata: dict[str, Any] | None = Field(
        None, max_length=MAX_METADATA, description="Returned as it is"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, max_length=MAX_VARIABLES, description="Variables of the model's chat template"
    )

    def sampling(self, max_new_tokens: int) -> SamplingParams:
        """
        Raises:
            RequestError: a value is out of range.
        """
        grammar = grammar_of_text_format(self.format)
        return sampling_params(
            self, max_new_tokens, grammar, source="text.format", limit=MAX_OUTPUT_TOKENS
        )

    @field_validator("include")
    @classmethod
    def _includable(cls, value: list[str] | None) -> list[str] | None:
        for name in value or ():
            if name not in _INCLUDABLE:
                known = ", ".join(_INCLUDABLE)
                near = nearest(name, _INCLUDABLE)
                raise invalid(f"include may have {known}, got {shown(name)}.{near}")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _with_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and LOGPROBS not in (info.data.get("include") or ()):
            raise invalid(f"top_logprobs is set without logprobs; set include to [{LOGPROBS!r}].")
        return value

    @property
    def format(self) -> dict[str, Any]:
        """Format of the text."""
        given = None if self.text is None else self.text.format
        return {"type": "text"} if given is None else given

    @property
    def logprob_params(self) -> LogprobParams | None:
        if LOGPROBS not in (self.include or ()):
            return None
        return LogprobParams(top=self.top_logprobs or 0)

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template.

        Raises:
            RequestError: they contradict each other.
        """
        effort = None if self.reasoning is None else self.reasoning.effort
        return variables_of(self.chat_template_kwargs, effort)

    @property
    def conversation_id(self) -> str | None:
        given = self.conversation
        return given.id if isinstance(given, ConversationId) else given

    @property
    def items(self) -> list[dict[str, Any]]:
        """The input as items.

        Raises:
            RequestError: there is none.
        """
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        if not self.input:
            raise RequestError("input is an empty list; give at least one item.")
        return self.input

    def messages(self, earlier: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The conversation as chat messages.

        Args:
            earlier: items that were said before those of the input.

        Raises:
            RequestError: an item is invalid.
        """
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        for message in item_messages([*earlier, *self.items]):
            _append(messages, message)
        return messages


def item_messages(items: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Items as chat messages, one for each.

    Raises:
        RequestError: an item is invalid.
    """
    names: dict[str, str] = {}  # of functions, by call id
    for item in items:
        match item:
            case {"role": str(), "content": _}:
                yield _message(item)
            case {"type": "function_call", "call_id": str(id), "name": str(name)}:
                names[id] = name
                function = {"name": name, "arguments": item.get("arguments")}
                yield _assistant(tool_calls=[{"id": id, "type": "function", "function": function}])
            case {"type": "function_call_output", "call_id": str(id), "output": output}:
                named = {"name": names[id]} if id in names else {}
                yield {"role": "tool", "tool_call_id": id, **named, "content": _text(output)}
            case {"type": "reasoning"}:
                parts = item.get("content") or item.get("summary") or ""
                yield _assistant(reasoning_content=_text(parts))
            case {"type": "item_reference"}:
                raise RequestError(
                    "An item_reference is not supported; send the item, or previous_response_id."
                )
            case _:
                raise RequestError(
                    "An item of input must be a message with role and content, a function_call, a"
                    f" function_call_output or reasoning, got {shown(item)}."
                )


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    role, text = item["role"], _text(item["content"])
    if role == "assistant":
        return _assistant(content=text)
    return {"role": "system" if role == "developer" else role, "content": text}


def _assistant(**parts: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", **parts}


def _append(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Joins the items of one turn of the assistant, and system messages at the beginning."""
    last: dict[str, Any] = messages[-1] if messages else {"role": None}
    role = message["role"]
    if role == last["role"] == "assistant":
        last["content"] += message["content"]
        if "tool_calls" in message:
            last["tool_calls"] = [*last.get("tool_calls", []), *message["tool_calls"]]
        if "reasoning_content" in message:
            last["reasoning_content"] = message["reasoning_content"]
    elif role == last["role"] == "system" and len(messages) == 1:
        last["content"] += "\n\n" + message["content"]
    else:
        messages.append(message)


def _text(content: Any) -> str:
    """Reads the text of a string or of parts.

    Raises:
        RequestError: it is neither.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"The content of an item must be text or parts, got {shown(content)}.")
    return "".join(map(_part, content))


def _part(part: Any) -> str:
    match part:
        case {"type": str(kind), "text": str(text)} if kind in _TEXT_PARTS:
            return text
        case {"type": "refusal", "refusal": str(text)}:
            return text
    raise RequestError(f"A part of an item must be text, such as input_text, got {shown(part)}.")
