"""Requests of Anthropic's Messages API, and Forerun's additions (as of chat completions)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from forerun.core.errors import RequestError, shown
from forerun.core.grammar import JSON_SCHEMA
from forerun.core.sampling_params import SamplingParams
from forerun.llm.prompts import AT_ANSWER, Ending
from forerun.server.anthropic.turns import chat_messages
from forerun.server.http.strict_model import (
    MAX_VARIABLES,
    FirstError,
    Many,
    StrictModel,
    Unsupported,
    invalid,
)
from forerun.server.openai.chat_prompt import THINKING
from forerun.server.openai.output_format import OutputFormat
from forerun.server.openai.protocol import SamplingFields, refuse_invalid, sampling_params
from forerun.server.openai.tools import MAX_TOOLS, Function, ToolUse, tool_use

CUSTOM = "custom"  # the type of tools that clients define; also if none is given
# About caching, billing and how clients are told apart at Anthropic; nothing here depends on them.
_IGNORED = (
    "metadata", "service_tier", "inference_geo", "cache_control", "context_management", "betas",
    "diagnostics", "speed", "user_profile_id", "workspace_id",
)  # fmt: skip
_UNSUPPORTED: Unsupported = {
    "container": ((), "nothing runs on the server"),
    "mcp_servers": (([],), "the server calls no others; let the client use MCP"),
}


class CustomTool(StrictModel):
    """A function of the client's."""

    ignored = (
        "cache_control", "eager_input_streaming", "defer_loading", "allowed_callers",
        "input_examples",
    )  # fmt: skip

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None  # calls have an input that validates, also if none is asked for

    @model_validator(mode="before")
    @classmethod
    def _is_custom(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("type") not in (None, CUSTOM):
            raise invalid(
                f"Tools of the type {shown(data['type'])} are not supported: this server has none"
                " of Anthropic's. Define it as a custom tool, with a name and an input_schema."
            )
        return data

    @property
    def function(self) -> Function:
        return Function(
            name=self.name,
            description=self.description,
            parameters=self.input_schema,
            strict=self.strict,
        )


class ToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="Of the tool, with the type tool")
    disable_parallel_tool_use: bool | None = Field(None, description="True: at most one call")

    @model_validator(mode="after")
    def _named(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise invalid("tool_choice has a name with the type 'tool', and only there.")
        return self

    @property
    def as_openai(self) -> str | dict[str, Any]:
        """The choice as chat completions take it."""
        if self.type == "tool":
            return {"type": "function", "name": self.name}
        return "required" if self.type == "any" else self.type


class Thinking(StrictModel):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(
        None, ge=1, description="Not enforced: reasoning counts towards max_tokens alone"
    )
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted: thinking blocks are left out"
    )


class OutputConfig(StrictModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="A variable of the chat template: reasoning_effort"
    )
    format: dict[str, Any] | None = Field(None, description="Of type json_schema")

    @field_validator("format")
    @classmethod
    def _is_a_format(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        refuse_invalid(value, _grammar)
        return value

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template."""
        return {} if self.effort is None else {"reasoning_effort": self.effort}


def _grammar(given: Mapping[str, Any] | None) -> dict[str, Any]:
    if given is None:
        return {}
    if given.get("type") != "json_schema" or not isinstance(given.get("schema"), Mapping):
        raise RequestError(
            "output_config.format must be {'type': 'json_schema', 'schema': {...}}, got"
            f" {shown(given)}."
        )
    return {JSON_SCHEMA: given["schema"]}


class _Conversation(StrictModel):
    """What a prompt is made of."""

    unsupported: ClassVar[Unsupported] = _UNSUPPORTED
    ignored = _IGNORED

    model: str
    messages: Many[dict[str, Any]]
    system: str | Many[dict[str, Any]] | None = None
    tools: Annotated[list[CustomTool], FirstError(MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, max_length=MAX_VARIABLES, description="Variables of the model's chat template"
    )

    def chat(self) -> list[dict[str, Any]]:
        """The conversation as chat completions take it.

        Raises:
            RequestError: a message or block is invalid.
        """
        return chat_messages(self.system, self.messages)

    def tool_use(self, form: OutputFormat) -> ToolUse:
        """
        Raises:
            RequestError: as `tool_use` of chat completions.
        """
        functions = [tool.function for tool in self.tools or ()]
        chosen = self.tool_choice
        if chosen is None:
            return tool_use(functions, None, None, form)
        return tool_use(functions, chosen.as_openai, not chosen.disable_parallel_tool_use, form)

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template. Without `thinking` they do not say whether to reason."""
        asked = self.thinking
        switch = {} if asked is None else dict.fromkeys(THINKING, asked.type != "disabled")
        effort = {} if self.output_config is None else self.output_config.variables
        return {**switch, **effort, **(self.chat_template_kwargs or {})}

    @property
    def ending(self) -> Ending:
        """A last message of the assistant goes on."""
        last = self.messages[-1] if self.messages else {}
        return Ending.of(None, True) if last.get("role") == "assistant" else AT_ANSWER


class CountTokensRequest(_Conversation):
    """`POST /v1/messages/count_tokens`."""


class MessagesRequest(_Conversation, SamplingFields):
    """`POST /v1/messages`."""

    max_tokens: int = Field(ge=1, description="Most tokens to generate, reasoning included")
    stop_sequences: Many[str] | None = None
    stream: bool | None = None

    @field_validator("stop_sequences")
    @classmethod
    def _are_stops(cls, value: list[str] | None, info: ValidationInfo) -> list[str] | None:
        refuse_invalid(value, lambda given: {"stop": given}, {"stop": "stop_sequences"})
        return value

    def sampling(self, room: int) -> SamplingParams:
        """Sampling parameters of an answer.

        Args:
            room: tokens that the context has left.

        Raises:
            RequestError: a value is out of range.
        """
        given = None if self.output_config is None else self.output_config.format
        most = min(self.max_tokens, room)
        params = sampling_params(self, most, _grammar(given), source="output_config.format")
        if not self.stop_sequences:
            return params
        if params.stop:
            raise RequestError("stop and stop_sequences are set; give one.")
        return replace(params, stop=tuple(self.stop_sequences))

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"
