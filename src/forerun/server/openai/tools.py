"""Functions that a model may call: their definitions in requests, and earlier calls in messages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forerun.core.errors import RequestError, nearest, shown
from forerun.server.http.strict_model import StrictModel
from forerun.server.openai.output_format import CallStyle, OutputFormat

MAX_TOOLS = 128
MAX_TOOLS_LENGTH = 1 << 20  # characters of all definitions, as JSON
_NAME = re.compile(r"[\w.:/-]{1,128}")

ToolChoice = str | dict[str, Any] | None


class Function(StrictModel):
    """A function, with the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # calls have arguments that validate, also if none is asked for


class Tool(StrictModel):
    """A tool; the only kind is a function."""

    type: Literal["function"]
    function: Function


@dataclass(frozen=True)
class ToolUse:
    """The functions that a model may call in one answer."""

    definitions: tuple[dict[str, Any], ...] = ()  # for the chat template
    functions: tuple[Function, ...] = ()
    parallel: bool = True  # several calls in one answer
    required: bool = False  # the answer is calls, and nothing else

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(function.name for function in self.functions)

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """The functions, with the schemas of their arguments."""
        return {function.name: function.parameters or {} for function in self.functions}


def tool_use(
    functions: Sequence[Function], choice: ToolChoice, parallel: bool | None, form: OutputFormat
) -> ToolUse:
    """
    Args:
        choice: "auto", "required", "none", or a function by name; default: "auto".

    Raises:
        RequestError: invalid definitions, an impossible choice, or a model without tool calls.
    """
    names = [function.name for function in functions]
    _check_names(names)
    chosen = _chosen(choice, names)
    if choice == "none" or not functions:
        return ToolUse()
    if form.tools is None:
        why = dict(form.explain).get("tools", "none")
        raise RequestError(
            f"This server cannot read tool calls: the parser is {why}. Leave tools out, or start"
            " the server with --tool-call-parser and a tokenizer whose chat template has tools."
        )
    definitions = tuple(_definition(function) for function in functions)
    _check_size(definitions)
    if chosen is not None:
        named = tuple(function for function in functions if function.name == chosen)
        return ToolUse(definitions, named, parallel=False, required=True)
    return ToolUse(definitions, tuple(functions), parallel is not False, choice == "required")


def _definition(function: Function) -> dict[str, Any]:
    given = {
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters,
    }
    return {
        "type": "function",
        "function": {name: value for name, value in given.items() if value is not None},
    }


def _check_size(definitions: Sequence[Mapping[str, Any]]) -> None:
    try:
        size = len(json.dumps(definitions))
    except RecursionError:
        raise RequestError("The parameters of a function are nested too deeply.") from None
    if size > MAX_TOOLS_LENGTH:
        raise RequestError(
            f"tools have {size} characters as JSON; at most {MAX_TOOLS_LENGTH} are allowed."
        )


def _check_names(names: Sequence[str]) -> None:
    if len(names) > MAX_TOOLS:
        raise RequestError(f"tools has {len(names)} functions; at most {MAX_TOOLS} are allowed.")
    for name in names:
        if not _NAME.fullmatch(name):
            raise RequestError(
                "The name of a function has up to 128 letters, digits and any of '_.:/-', got"
                f" {shown(name)}."
            )
        if names.count(name) > 1:
            raise RequestError(f"The function {shown(name)} is defined twice.")


def _chosen(choice: ToolChoice, names: Sequence[str]) -> str | None:
    """The function in {"type": "function", "function": {"name": ...}}, or without "function"."""
    if choice in (None, "auto", "none"):
        return None
    if choice == "required":
        if not names:
            raise RequestError("tool_choice is 'required', but there are no tools.")
        return None
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        raise _not_a_choice(choice)
    inner = choice.get("function", choice)
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str):
        raise _not_a_choice(choice)
    if name not in names:
        raise RequestError(
            f"tool_choice asks for the function {shown(name)}, which is not in tools."
            f"{nearest(name, names)}"
        )
    return name


def _not_a_choice(choice: ToolChoice) -> RequestError:
    return RequestError(
        "tool_choice must be 'auto', 'none', 'required' or a function by name, got"
        f" {shown(choice)}."
    )


def template_messages(
    messages: Sequence[Mapping[str, Any]], style: CallStyle
) -> list[dict[str, Any]]:
    """Messages as chat templates take them: without nulls, with calls in the template's style.

    Raises:
        RequestError: invalid tool calls.
    """
    numbered = _Ids(style.call_id)
    return [_message(message, style, numbered) for message in messages]


class _Ids:
    """Ids of calls as the template wants them: by function and number within the conversation."""

    def __init__(self, form: str) -> None:
        """`form`: as `CallStyle.call_id`; "": ids stay as they are."""
        self._form = form
        self._known: dict[Any, str] = {}  # by the id in the request
        self._count = 0

    def of_call(self, given: Any, name: str) -> Any:
        if not self._form:
            return given
        made = self._form.format(name=name, index=self._count)
        self._count += 1
        if isinstance(given, str):
            self._known[given] = made
        return made

    def of_result(self, given: Any) -> Any:
        return self._known.get(given, given) if isinstance(given, str) else given


def _message(message: Mapping[str, Any], style: CallStyle, ids: _Ids) -> dict[str, Any]:
    out = {name: value for name, value in message.items() if value is not None or name == "content"}
    if "reasoning" in out:  # as answers call it too
        out.setdefault("reasoning_content", out.pop("reasoning"))
    if "reasoning_content" in out and not out.get("content"):  # templates refuse both
        out.setdefault(style.reasoning_key, out["reasoning_content"])
    if "tool_call_id" in out:
        out["tool_call_id"] = ids.of_result(out["tool_call_id"])
    calls = out.pop("tool_calls", None)
    if not calls:
        return out
    if not isinstance(calls, list):
        raise RequestError(f"tool_calls must be a list, got {shown(calls)}.")
    out["tool_calls"] = [_call(call, style, ids) for call in calls]
    out["content"] = out.get("content") or style.empty_content
    return out


def _call(call: Any, style: CallStyle, ids: _Ids) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(
            "A tool call must be {'id', 'type': 'function', 'function': {'name', 'arguments'}}, got"
            f" {shown(call)}."
        )
    arguments = _arguments(function.get("arguments"), style)
    named = {"id": ids.of_call(call.get("id"), function["name"])} if style.call_id else {}
    changed = {**named, "function": {**function, "arguments": arguments}}
    return {"type": "function", **call, **changed}


def _arguments(given: Any, style: CallStyle) -> Any:
    """
    Raises:
        RequestError: they are not a JSON object.
    """
    text = "{}" if given in (None, "") else given
    try:
        value = json.loads(text) if isinstance(text, str) else text
        if not isinstance(value, dict):
            raise ValueError("not an object")
        if not style.arguments_as_text:
            return value
        return text if isinstance(text, str) else json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        raise RequestError(
            f"The arguments of a tool call must be the text of a JSON object, got {shown(given)}."
        ) from None
