"""How the model writes reasoning and tool calls: by flag, or as its chat template shows it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from forerun.core.errors import RequestError
from forerun.llm.prompts import chat_text
from forerun.server.parsers import reasoning
from forerun.server.parsers.deepseek import CALL_BEGIN, SEPARATOR
from forerun.server.parsers.output import OutputParser
from forerun.server.parsers.reasoning import ReasoningParser
from forerun.server.parsers.registry import AUTO, NONE, REASONING_PARSERS, TOOL_PARSERS
from forerun.server.parsers.tool_parser import ToolParser

_PROBE = "forerun_probe"  # a function's name
_TOOLS = [{"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}]
_ARGUMENTS = {"probe": 1}
_ARGUMENTS_TEXT = '{"probe": 1}'
_QUESTION = {"role": "user", "content": "?"}
TAIL_TOKENS = 32  # of a prompt, which show whether it ends within reasoning


@dataclass(frozen=True)
class CallStyle:
    """How the chat template takes tool calls of earlier messages."""

    arguments_as_text: bool = False  # else as an object
    empty_content: str | None = ""  # of a message that has calls only


@dataclass(frozen=True)
class OutputFormat:
    """Parsers of a model's outputs; None: there is nothing to parse."""

    tools: type[ToolParser] | None = None
    reasoning: str | None = None  # key of `REASONING_PARSERS`
    style: CallStyle = CallStyle()
    special: bool = False  # the calls' markers are special tokens
    explain: tuple[tuple[str, str], ...] = ()  # what was chosen, and why

    def begins_in_reasoning(self, prompt_tail: str) -> bool | None:
        """Whether an output begins with reasoning, by the end of its prompt; None: not parsed."""
        tail = prompt_tail.rstrip()
        if self.reasoning is None or tail.endswith(reasoning.END):
            return None
        return tail.endswith(reasoning.BEGIN) or REASONING_PARSERS[self.reasoning]

    def parser(self, opened: bool | None, names: Collection[str]) -> OutputParser:
        """Makes the parser of one output.

        Args:
            opened: as `begins_in_reasoning`.
            names: functions that may be called.
        """
        tools = self.tools(names) if names and self.tools is not None else None
        return OutputParser(None if opened is None else ReasoningParser(opened), tools)


def choose_format(tool_parser: str, reasoning_parser: str, tokenizer: Any) -> OutputFormat:
    """
    Args:
        tool_parser: key of `TOOL_PARSERS`, "auto" or "none".
        reasoning_parser: key of `REASONING_PARSERS`, "auto" or "none".
    """
    if tokenizer is None:
        why = "none (no tokenizer)"
        return OutputFormat(explain=(("tools", why), ("reasoning", why)))
    asked = _rendered(tokenizer, [_QUESTION])
    style, written = _probe(tokenizer) if asked else (CallStyle(), "")
    tools, why_tools = _named(tool_parser) or _tools_of(written)
    thinks, why_thinks = _named(reasoning_parser) or _reasoning_of(asked, tokenizer.chat_template)
    parser = TOOL_PARSERS[tools] if tools is not None else None
    special = set(tokenizer.all_special_tokens)
    return OutputFormat(
        tools=parser,
        reasoning=thinks,
        style=style,
        special=parser is not None and bool(special.intersection(parser.markers)),
        explain=(
            ("tools", f"{tools or 'none'} ({why_tools})"),
            ("reasoning", f"{thinks or 'none'} ({why_thinks})"),
        ),
    )


def _named(name: str) -> tuple[str | None, str] | None:
    """What a flag says; None: to be chosen here."""
    if name == AUTO:
        return None
    return (None if name == NONE else name), "as set"


def _probe(tokenizer: Any) -> tuple[CallStyle, str]:
    """The form of calls that the template takes, and a conversation with one as it writes it.

    Content of messages with calls is null, where the template takes that and does not write "None".
    """
    null = _taken(tokenizer, None)
    if null is not None and "None" not in null[1]:
        return null
    return _taken(tokenizer, "") or null or (CallStyle(), "")


def _taken(tokenizer: Any, content: str | None) -> tuple[CallStyle, str] | None:
    """Does what `_probe` does for one content; None: the template does not write the call."""
    for as_text in (True, False):  # as text: written as the model wrote it
        written = _rendered(tokenizer, [_QUESTION, _call(content, as_text)], {"tools": _TOOLS})
        if _PROBE in written and _ARGUMENTS_TEXT in written:
            return CallStyle(as_text, content), written
    return None


def _call(content: str | None, as_text: bool) -> dict[str, Any]:
    arguments = _ARGUMENTS_TEXT if as_text else _ARGUMENTS
    call = {
        "id": "call00001",
        "type": "function",
        "function": {"name": _PROBE, "arguments": arguments},
    }
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _rendered(
    tokenizer: Any, messages: list[dict[str, Any]], variables: Mapping[str, Any] | None = None
) -> str:
    """The conversation in the chat template; "" if that refuses it."""
    try:
        return chat_text(tokenizer, messages, variables or {})
    except RequestError:
        return ""


def _tools_of(written: str) -> tuple[str | None, str]:
    """Finds it by a call as the chat template writes it."""
    if not written:
        return None, "the chat template takes no calls"
    flat = "".join(written.split())
    if f'<tool_call>{{"name":"{_PROBE}"' in flat:
        return "hermes", "the chat template writes <tool_call>"
    if f"{CALL_BEGIN}function{SEPARATOR}{_PROBE}" in flat:
        return "deepseekv3", f"the chat template writes {CALL_BEGIN}function"
    if f"{CALL_BEGIN}{_PROBE}{SEPARATOR}" in flat:
        return "deepseekv31", f"the chat template writes {CALL_BEGIN}"
    if f'{{"name":"{_PROBE}","parameters":' in flat:
        return "llama3", "the chat template writes calls as JSON with parameters"
    return None, "the chat template writes calls in a format that has no parser here"


def _reasoning_of(prompt: str, template: Any) -> tuple[str | None, str]:
    """Finds it by a prompt's end, or else by whether the template handles reasoning at all."""
    if prompt.rstrip().endswith(reasoning.BEGIN):
        return "deepseek-r1", f"prompts end with {reasoning.BEGIN}"
    if reasoning.END in str(template):  # one template, several, or None
        return "qwen3", f"the chat template knows {reasoning.END}"
    return None, f"the chat template does not know {reasoning.END}"
