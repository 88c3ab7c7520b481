"""How the model writes reasoning and tool calls: by flag, or as its chat template shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from forerun.core.errors import RequestError
from forerun.llm.prompts import chat_text
from forerun.server.parsers.deepseek import CALL_BEGIN, SEPARATOR
from forerun.server.parsers.harmony import HARMONY, HarmonyParser
from forerun.server.parsers.kimi_k2 import ARGUMENTS_BEGIN
from forerun.server.parsers.output import OutputParser
from forerun.server.parsers.reasoning import THINK, ReasoningParser, ReasoningSyntax
from forerun.server.parsers.registry import AUTO, NONE, REASONING_PARSERS, TOOL_PARSERS
from forerun.server.parsers.tool_parser import ToolParser

_PROBE, _PROBE_ID = "forerun_probe", "call00001"  # a function's name, and an id of a call to it
_TOOLS = [{"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}]
_ARGUMENTS = {"probe": 1}
_ARGUMENTS_TEXT = '{"probe": 1}'
_QUESTION = {"role": "user", "content": "?"}
TAIL_TOKENS = 32  # of a prompt, which show whether it ends within reasoning


# A parser, what is said of the template, and what shows it: all these texts in what the template
# writes for the call, without spaces.
_SHOWN: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("gpt-oss", "to=functions.", (f"to=functions.{_PROBE}",)),
    ("qwen3_coder", "<function=", (f"<function={_PROBE}>", "<parameter=probe>")),
    ("glm45", "<arg_key>", (f"<tool_call>{_PROBE}", "<arg_key>probe</arg_key>")),
    ("kimi_k2", ARGUMENTS_BEGIN, (ARGUMENTS_BEGIN,)),
    ("gemma4", "<|tool_call>call:", (f"<|tool_call>call:{_PROBE}{{",)),
    ("mistral", "[TOOL_CALLS]", ("[TOOL_CALLS]", _PROBE)),
    ("minimax-m2", "<minimax:tool_call>", ("<minimax:tool_call>", f'<invokename="{_PROBE}">')),
    ("granite", "<|tool_call|>", (f'<|tool_call|>[{{"name":"{_PROBE}"',)),
    ("granite", "<tool_call>[", (f'<tool_call>[{{"name":"{_PROBE}"',)),
    ("hermes", "<tool_call>", (f'<tool_call>{{"name":"{_PROBE}"',)),
    ("deepseekv3", f"{CALL_BEGIN}function", (f"{CALL_BEGIN}function{SEPARATOR}{_PROBE}",)),
    ("deepseekv31", CALL_BEGIN, (f"{CALL_BEGIN}{_PROBE}{SEPARATOR}",)),
    ("llama3", "calls as JSON with parameters", (f'{{"name":"{_PROBE}","parameters":',)),
    ("olmo3", "<function_calls>", ("<function_calls>", f"{_PROBE}(probe=")),
    ("pythonic", "calls as Python does", (f"[{_PROBE}(probe=",)),
)
# What a template that handles reasoning has in its text.
_MARKS = (
    ("gpt-oss", "<|channel|>analysis<|message|>"),
    ("gemma4", "<channel|>"),
    ("mistral", "[/THINK]"),
    ("kimi", "◁/think▷"),
    ("granite", "Here is my response:"),
    ("qwen3", THINK.end[0]),
)


@dataclass(frozen=True)
class CallStyle:
    """How the chat template takes tool calls of earlier messages."""

    arguments_as_text: bool = False  # else as an object
    empty_content: str | None = ""  # of a message that has calls only
    call_id: str = ""  # as of `ToolParser`; "": any
    reasoning_key: str = "reasoning_content"  # in messages


@dataclass(frozen=True)
class OutputFormat:
    """Parsers of a model's outputs; None: there is nothing to parse."""

    tools: type[ToolParser] | None = None
    reasoning: str | None = None  # key of `REASONING_PARSERS`
    style: CallStyle = CallStyle()
    special: bool = False  # the calls' markers are special tokens
    special_reasoning: bool = False  # those of reasoning are
    explain: tuple[tuple[str, str], ...] = ()  # what was chosen, and why

    @property
    def reasoning_syntax(self) -> ReasoningSyntax | None:
        return None if self.reasoning is None else REASONING_PARSERS[self.reasoning]

    @property
    def is_harmony(self) -> bool:
        """Whether outputs are messages in channels."""
        return self.tools is HarmonyParser or self.reasoning_syntax is HARMONY

    def begins_in_reasoning(self, prompt_tail: str) -> bool | None:
        """Whether an output begins with reasoning, by the end of its prompt; None: not parsed."""
        syntax = self.reasoning_syntax
        return None if syntax is None else syntax.begins_in(prompt_tail)

    def parser(
        self, opened: bool | None, functions: Mapping[str, Mapping[str, Any]]
    ) -> OutputParser:
        """Makes the parser of one output.

        Args:
            opened: as `begins_in_reasoning`.
            functions: those that may be called, with the schemas of their arguments.
        """
        if self.is_harmony:
            known = functions if self.tools is HarmonyParser else {}
            return OutputParser(None, HarmonyParser(known, separate_reasoning=opened is not None))
        tools = self.tools(functions) if functions and self.tools is not None else None
        syntax = self.reasoning_syntax
        thoughts = None if opened is None or syntax is None else ReasoningParser(opened, syntax)
        return OutputParser(thoughts, tools)


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
    if tools is not None and asked == _rendered(tokenizer, [_QUESTION], {"tools": _TOOLS}):
        why_tools += ", but the chat template leaves tools out of prompts"
    thinks, why_thinks = _named(reasoning_parser) or _reasoning_of(asked, tokenizer.chat_template)
    parser = TOOL_PARSERS[tools].written_as(written) if tools is not None else None
    syntax = REASONING_PARSERS[thinks] if thinks is not None else None
    return OutputFormat(
        tools=parser,
        reasoning=thinks,
        style=replace(
            style,
            call_id="" if parser is None else parser.call_id,
            reasoning_key="thinking" if syntax is HARMONY else style.reasoning_key,
        ),
        special=parser is not None and _has_special(tokenizer, parser.markers),
        special_reasoning=syntax is not None and _has_special(tokenizer, syntax.begin + syntax.end),
        explain=(
            ("tools", f"{tools or 'none'} ({why_tools})"),
            ("reasoning", f"{thinks or 'none'} ({why_thinks})"),
        ),
    )


def _has_special(tokenizer: Any, marks: tuple[str, ...]) -> bool:
    """Whether any of the marks has a special token."""
    return any(token in mark for token in tokenizer.all_special_tokens for mark in marks)


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
        if (_PROBE in written or _PROBE_ID in written) and _has_arguments(written, as_text):
            return CallStyle(as_text, content), written
    return None


def _has_arguments(written: str, as_text: bool) -> bool:
    """Whether they are there, and as they should be: as JSON, or in the format's own notation."""
    if as_text:
        return _ARGUMENTS_TEXT in written and f"{{{_ARGUMENTS_TEXT}" not in written
    return _ARGUMENTS_TEXT in written or _tools_of(written)[0] is not None


def _call(content: str | None, as_text: bool) -> dict[str, Any]:
    arguments = _ARGUMENTS_TEXT if as_text else _ARGUMENTS
    call = {
        "id": _PROBE_ID,
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
    for name, what, shown in _SHOWN:
        if all(text in flat for text in shown):
            return name, f"the chat template writes {what}"
    return None, "the chat template writes calls in a format that has no parser here"


def _reasoning_of(prompt: str, template: Any) -> tuple[str | None, str]:
    """Finds it by a prompt's end, or else by whether the template handles reasoning at all."""
    if prompt.rstrip().endswith(THINK.begin):
        return "deepseek-r1", f"prompts end with {THINK.begin[0]}"
    for name, mark in _MARKS:
        if mark in str(template):  # one template, several, or None
            return name, f"the chat template knows {mark}"
    return None, f"the chat template does not know {THINK.end[0]}"
