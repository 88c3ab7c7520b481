"""Calls whose arguments are not JSON, and outputs in channels: typed, streamed, and never lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.server.parsers.argument_values import allowed_types, typed
from forerun.server.parsers.deepseek import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    SEPARATOR,
    DeepSeekV3Parser,
    DeepSeekV31Parser,
)
from forerun.server.parsers.events import (
    Arguments,
    CallBroken,
    CallEnd,
    CallStart,
    Event,
    Reasoning,
    Text,
)
from forerun.server.parsers.gemma4 import Gemma4Parser
from forerun.server.parsers.granite import GraniteParser
from forerun.server.parsers.harmony import HARMONY, HarmonyParser
from forerun.server.parsers.kimi_k2 import KimiK2Parser
from forerun.server.parsers.mistral import MistralParser
from forerun.server.parsers.output import OutputParser
from forerun.server.parsers.pythonic import Llama4Parser, Olmo3Parser
from forerun.server.parsers.reasoning import ReasoningParser
from forerun.server.parsers.registry import REASONING_PARSERS
from forerun.server.parsers.tool_parser import ToolParser
from forerun.server.parsers.xml_calls import Glm45Parser, MiniMaxM2Parser, Qwen3CoderParser
from tests.property_examples import examples
from tests.server.parsers.test_parsers import check_order, events_of, parse

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "n": {"type": "number"},
        "b": {"type": "boolean"},
        "l": {"type": "array"},
        "o": {"type": "object"},
        "e": {"enum": ["1", "2"]},
        "u": {"type": ["string", "null"]},
        "r": {"$ref": "#/$defs/name"},
        "any": {},
        "long": {"type": "string", "minLength": 3},
        "day": {"type": "string", "format": "date"},
    },
    "$defs": {"name": {"type": "string"}},
}
FUNCTIONS: dict[str, dict[str, Any]] = {"f": SCHEMA, "get_weather": SCHEMA, "now": {}}
PARSERS: list[type[ToolParser]] = [
    Gemma4Parser, Glm45Parser, GraniteParser, HarmonyParser, KimiK2Parser, Llama4Parser,
    MiniMaxM2Parser, MistralParser, Olmo3Parser, Qwen3CoderParser,
]  # fmt: skip
PIECES = [
    "<tool_call>", "</tool_call>", "<function=", "f", ">", "<parameter=", "s", "i", "</parameter>",
    "</function>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "3", "\n", " ", "<",
    "<minimax:tool_call>", '<invoke name="f">', '<parameter name="s">', "</invoke>", "[", "]", "{",
    "</minimax:tool_call>", "<|tool_call>", "call:f{", '<|"|>', "}", "<tool_call|>", "f(", "s=",
    '"a"', "'", '"', ")", ",", ":", "\\", "<|python_start|>", "<|python_end|>", "<function_calls>",
    "</function_calls>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", '{"name": "f", "arguments": {}}',
    "<|tool_call|>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>", "{}", "text",
    "<|channel|>", "analysis", "final", "commentary", "<|message|>", "<|end|>", "<|start|>",
    "assistant", " to=functions.f", "<|constrain|>json", "<|call|>", "<|return|>", "é", "True",
]  # fmt: skip


@pytest.mark.parametrize("kind", PARSERS)
@examples(50)
@given(parts=st.lists(st.sampled_from(PIECES), max_size=25), data=st.data())
def test_pieces_do_not_matter(
    kind: type[ToolParser], parts: list[str], data: st.DataObject
) -> None:
    text = "".join(parts)
    whole = parse(kind(FUNCTIONS), text)
    check_order(whole)
    assert parse(kind(FUNCTIONS), *text) == whole
    assert parse(kind(FUNCTIONS), *parts) == whole
    at = data.draw(st.integers(0, len(text)))
    assert parse(kind(FUNCTIONS), text[:at], text[at:]) == whole


@pytest.mark.parametrize("kind", PARSERS)
@examples(50)
@given(parts=st.lists(st.sampled_from(PIECES), max_size=25))
def test_texts_are_those_of_the_output(kind: type[ToolParser], parts: list[str]) -> None:
    """Each at its place; without calls all of it, but for the marks of messages."""
    text = "".join(parts)
    parser, end = OutputParser(None, kind(FUNCTIONS)), 0
    found: list[Event] = []
    for piece in (text[: len(text) // 2], text[len(text) // 2 :]):
        found += parser.feed(piece)
    found += parser.finish()
    for event in found:
        if isinstance(event, Text):
            assert event.start >= end
            end = event.start + len(event.text)
            assert text[event.start : end] == event.text
    if CallEnd() not in found and kind is not HarmonyParser:
        assert "".join(event.text for event in found if isinstance(event, Text)) == text


# --- what is written, and what is read ------------------------------------------------------------

STRINGS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner),
    max_leaves=5,
)  # fmt: skip
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "s": STRINGS,
        "i": st.integers(),
        "n": st.floats(allow_nan=False, allow_infinity=False),
        "b": st.booleans(),
        "l": st.lists(VALUES, max_size=3),
        "o": st.dictionaries(st.sampled_from("ab"), VALUES, max_size=2),
        "e": st.sampled_from(["1", "2"]),
        "r": STRINGS,
    },
)
Calls = Sequence[tuple[str, dict[str, Any]]]


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def qwen(calls: Calls) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={k}>\n{plain(v)}\n</parameter>\n" for k, v in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def glm(calls: Calls) -> str:
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{plain(v)}</arg_value>\n"
            for k, v in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def minimax(calls: Calls) -> str:
    inner = "".join(
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{k}">{plain(v)}</parameter>\n' for k, v in arguments.items())
        + "</invoke>\n"
        for name, arguments in calls
    )
    return f"<minimax:tool_call>\n{inner}</minimax:tool_call>"


def gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(map(gemma_value, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{gemma_value(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


def gemma(calls: Calls) -> str:
    return "".join(
        f"<|tool_call>call:{name}{gemma_value(arguments)}<tool_call|>" for name, arguments in calls
    )


def python(calls: Calls) -> list[str]:
    """As Python itself writes values."""
    return [
        f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"
        for name, arguments in calls
    ]


WRITERS: list[tuple[type[ToolParser], Callable[[Calls], str]]] = [
    (Qwen3CoderParser, qwen),
    (Glm45Parser, glm),
    (MiniMaxM2Parser, minimax),
    (Gemma4Parser, gemma),
    (Llama4Parser, lambda calls: f"<|python_start|>[{', '.join(python(calls))}]<|python_end|>"),
    (Olmo3Parser, lambda calls: "<function_calls>\n{}\n</function_calls>".format(
        "\n".join(python(calls)))),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "write"), WRITERS, ids=[kind.__name__ for kind, _ in WRITERS])
@examples(20)
@given(calls=st.lists(st.tuples(st.sampled_from(["f", "get_weather"]), ARGUMENTS), min_size=1))
def test_values_are_those_that_were_written(
    kind: type[ToolParser], write: Callable[[Calls], str], calls: Calls
) -> None:
    found = parse(kind(FUNCTIONS), f"I look.\n{write(calls)}\nDone.")
    assert found[0] == Text("I look.") and found[-1] == Text("Done.")
    check_order(found)
    names = [event.name for event in found if isinstance(event, CallStart)]
    arguments = [json.loads(event.text) for event in found if isinstance(event, Arguments)]
    assert list(zip(names, arguments, strict=True)) == list(calls)


@pytest.mark.parametrize(("kind", "write"), WRITERS, ids=[kind.__name__ for kind, _ in WRITERS])
def test_strings_are_streamed(kind: type[ToolParser], write: Callable[[Calls], str]) -> None:
    """What waits is never more than a mark."""
    value = "x = {} Zürich " * 2000
    text = write([("f", {"s": value})])
    middle = len(text) // 2
    parser = kind(FUNCTIONS)
    streamed = "".join(e.text for e in parser.feed(text[:middle]) if isinstance(e, Arguments))
    begun = json.loads(streamed + '"}')["s"]
    assert value.startswith(begun) and len(begun) > middle - 100


# (parser, text, events)
WRONG = "<tool_call>\n<function=rain>\n<parameter=s>\n1\n</parameter>\n</function>\n</tool_call>"
CUT = "<tool_call>\n<function=f>\n<parameter=s>\nPar"
CASES: list[tuple[type[ToolParser], str, list[Event]]] = [
    # Qwen: marks that are missing, an unknown function, no end, and a mark in a string of JSON.
    (
        Qwen3CoderParser,
        "<function=f>\n<parameter=s>\na\n</parameter>\n</function>\n</tool_call> ok",
        [*events_of([("f", '{"s": "a"}')]), Text("ok")],
    ),
    (
        Qwen3CoderParser,
        "<tool_call>\n<function=f>\n<parameter=s>\na\n<parameter=i>\n3\n</function>\n</tool_call>",
        events_of([("f", '{"s": "a", "i": 3}')]),
    ),
    (
        Qwen3CoderParser,
        "<tool_call>\n<function=now>\n</function>\n<tool_call>\n<function=now></function>",
        events_of([("now", "{}"), ("now", "{}")]),
    ),
    (Qwen3CoderParser, WRONG, [Text(WRONG)]),
    (
        Qwen3CoderParser,
        CUT,
        [CallStart("f"), Arguments('{"s": "Par'), CallBroken(cut=True), Text(CUT)],
    ),
    (
        Qwen3CoderParser,
        '<function=f><parameter=l>["</parameter>"]</parameter></function>',
        events_of([("f", '{"l": ["</parameter>"]}')]),
    ),
    (
        Qwen3CoderParser,
        "<function=f><parameter=i>x</parameter><parameter=i>1</parameter></function>",
        [
            CallStart("f"),
            Arguments('{"i": "x"'),
            CallBroken(),
            Text("<function=f><parameter=i>x</parameter><parameter=i>1</parameter></function>"),
        ],
    ),
    # Spaces around a string that is asked for more than to be one.
    (
        Qwen3CoderParser,
        "<function=f><parameter=e>\n 1\n</parameter><parameter=long>\na\n</parameter>"
        "<parameter=day> 2026-01-01 </parameter><parameter=s> a </parameter></function>",
        events_of([("f", '{"e": "1", "long": "\\na\\n", "day": "2026-01-01", "s": " a "}')]),
    ),
    # Kimi: with or without the namespace and the number; no end of the section.
    (
        KimiK2Parser,
        "<|tool_calls_section_begin|><|tool_call_begin|>now<|tool_call_argument_begin|>{}",
        events_of([("now", "{}")]),
    ),
    (
        KimiK2Parser,
        "a<|tool_calls_section_begin|> <|tool_call_begin|> functions.now:11 "
        '<|tool_call_argument_begin|> {"a": "\\u00e9 }"} <|tool_call_end|>',
        [Text("a"), *events_of([("now", '{"a": "\\u00e9 }"}')])],
    ),
    # ... marks in the singular, and no arguments.
    (
        KimiK2Parser,
        "<|tool_call_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>"
        " <|tool_call_end|><|tool_call_section_end|>ok",
        [*events_of([("now", "{}")]), Text("ok")],
    ),
    # ... marks that are missing, and a call of an unknown function before one.
    (
        KimiK2Parser,
        "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_begin|>"
        'functions.f:1<|tool_call_argument_begin|>{"s": "a"}<|tool_call_end|>',
        events_of([("now", "{}"), ("f", '{"s": "a"}')]),
    ),
    (
        KimiK2Parser,
        "<|tool_calls_section_begin|><|tool_call_begin|>rain:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_call_begin|>now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        [
            Text(
                "<|tool_calls_section_begin|><|tool_call_begin|>rain:0<|tool_call_argument_begin|>"
                "{}<|tool_call_end|>"
            ),
            *events_of([("now", "{}")]),
        ],
    ),
    # MiniMax and DeepSeek: the same.
    (
        MiniMaxM2Parser,
        '<invoke name="rain"></invoke>\n<invoke name="now">\n</invoke></minimax:tool_call>ok',
        [
            Text('<invoke name="rain"></invoke>'),
            *events_of([("now", "{}")]),
            Text("ok"),
        ],
    ),
    (
        DeepSeekV3Parser,
        f"{CALLS_BEGIN}{CALL_BEGIN}rain{CALL_BEGIN}function{SEPARATOR}now\n```json\n{{}}\n```",
        [Text(f"{CALLS_BEGIN}{CALL_BEGIN}rain"), *events_of([("now", "{}")])],
    ),
    (
        DeepSeekV31Parser,
        f"{CALL_BEGIN}now{SEPARATOR}{CALL_END}ok",
        [*events_of([("now", "{}")]), Text("ok")],
    ),
    # GLM: the name on a line of its own, and a mark that is missing.
    (
        Glm45Parser,
        "<tool_call>\nf\n<arg_key>s</arg_key>\n<arg_value>a</arg_value>\n</tool_call>",
        events_of([("f", '{"s": "a"}')]),
    ),
    (
        Glm45Parser,
        "<tool_call>now\n<tool_call>now</tool_call>",
        [CallStart("now"), CallBroken(), Text("<tool_call>now"), *events_of([("now", "{}")])],
    ),
    # Gemma: quotes of JSON, words without quotes, lists in objects.
    (
        Gemma4Parser,
        '<|tool_call>call:f{s:"a\\n",u: plain words ,o:{"k":[{},[]]}}<tool_call|>',
        events_of([("f", '{"s": "a\\n", "u": "plain words", "o": {"k": [{}, []]}}')]),
    ),
    # ... the first mark is missing, or has a colon.
    (
        Gemma4Parser,
        '\ncall:f{s:<|"|>a<|"|>}<tool_call|><|tool_call>:call:now{}<tool_call|>ok',
        [*events_of([("f", '{"s": "a"}'), ("now", "{}")]), Text("ok")],
    ),
    *(
        (Gemma4Parser, text, [Text(text)])
        for text in (" call:rain{}", "call", "ok, call:now{}", "Canada", "<|tool_call>::call:now{}")
    ),
    (Gemma4Parser, "<|tool_call>f()<tool_call|>", [Text("<|tool_call>f()<tool_call|>")]),
    # Mistral: both forms, with text before; invalid JSON.
    (
        MistralParser,
        'I look.[TOOL_CALLS][{"arguments": {}, "name": "now", "id": "abcdefghi"}]',
        [Text("I look."), *events_of([("now", "{}")])],
    ),
    (
        MistralParser,
        "[TOOL_CALLS]now[ARGS]{'a': 1}",
        [CallStart("now"), Arguments("{"), CallBroken(), Text("[TOOL_CALLS]now[ARGS]{'a': 1}")],
    ),
    (MistralParser, "[TOOL_CALLS]rain[ARGS]{}", [Text("[TOOL_CALLS]rain[ARGS]{}")]),
    # Python: strings of all kinds, trailing commas, what is no literal, and lists that are text.
    (
        Llama4Parser,
        "[f(s='it\\'s \\x41\\u00e9\\d', l=(1, 2.50, [],), b=None,)]",
        events_of([("f", '{"s": "it\'s A\\u00e9\\\\d", "l": [1, 2.5, []], "b": null}')]),
    ),
    (
        Llama4Parser,
        '[f(s="""a\n"b"""), f(s="")]',
        events_of([("f", '{"s": "a\\n\\"b"}'), ("f", '{"s": ""}')]),
    ),
    (Llama4Parser, "[1, 2]", [Text("[1, 2]")]),
    (Llama4Parser, "I call [now()]", [Text("I call [now()]")]),
    (
        Llama4Parser,
        "[f(i=g(1))]",
        [CallStart("f"), Arguments('{"i": '), CallBroken(), Text("[f(i=g(1))]")],
    ),
    (
        Olmo3Parser,
        "Sure.\n<function_calls>\nnow()\nf(b=true, s='x')",
        [Text("Sure."), *events_of([("now", "{}"), ("f", '{"b": true, "s": "x"}')])],
    ),
    (GraniteParser, '<tool_call>{"name": "now"}', events_of([("now", "{}")])),
    # Channels: in any order, with a preamble; messages that are no calls; cut ones.
    (
        HarmonyParser,
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>b"
        "<|end|><|start|>assistant<|channel|>commentary to=functions.now<|message|>{}<|call|>",
        [Reasoning("a"), Text("b"), *events_of([("now", "{}")])],
    ),
    (
        HarmonyParser,
        " to=functions.now<|channel|>analysis code<|message|><|call|>"
        "<|start|>assistant<|channel|>final<|message|>a < b <|x|>\n",
        [*events_of([("now", "{}")]), Text("a < b <|x|>\n")],
    ),
    (
        HarmonyParser,
        "<|channel|>analysis to=browser.search<|message|>{}<|call|>",
        [Text("<|channel|>analysis to=browser.search<|message|>{}")],
    ),
    # ... and messages that the next one ends.
    *(
        (
            HarmonyParser,
            f"<|channel|>analysis<|message|>a{mark}<|channel|>final<|message|>b",
            [Reasoning("a"), Text("b")],
        )
        for mark in ("", "<|start|>assistant")
    ),
    (
        HarmonyParser,
        "<|channel|>commentary<|message|>a<|channel|>commentary to=functions.now<|message|>{}",
        [Text("a"), *events_of([("now", "{}")])],
    ),
    (HarmonyParser, "<|channel|>final<|message|>a<|end|><|start|>assi", [Text("a")]),
    (HarmonyParser, "<|channel|>analysis<|message|>hm", [Reasoning("hm")]),
    (HarmonyParser, "<|channel|>anal", []),
    (HarmonyParser, "to=you", [Text("to=you")]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "want"), CASES, ids=range(len(CASES)))
def test_cases(kind: type[ToolParser], text: str, want: list[Event]) -> None:
    assert parse(kind(FUNCTIONS), text) == want
    assert parse(kind(FUNCTIONS), *text) == want


@pytest.mark.parametrize("kind", [Llama4Parser, Gemma4Parser])
def test_deep_values_are_malformed(kind: type[ToolParser]) -> None:
    text = ("[f(l=" if kind is Llama4Parser else "<|tool_call>call:f{l:") + "[" * 100_000
    *_, last = parse(kind(FUNCTIONS), text)
    assert last == Text(text)


# (schema, text, JSON)
TYPED: list[tuple[Any, str, str]] = [
    ({"type": "integer"}, " 3\n", "3"),
    ({"type": "integer"}, "3.0", "3.0"),
    ({"type": "integer"}, "3.5", '"3.5"'),
    ({"type": "integer"}, "many", '"many"'),
    ({"type": "number"}, "1e3", "1e3"),
    ({"type": "number"}, "NaN", '"NaN"'),
    ({"type": "boolean"}, "True", "true"),
    ({"type": "boolean"}, "false", "false"),
    ({"type": "boolean"}, "1", '"1"'),
    ({"type": "object"}, '{"a": [1]}', '{"a": [1]}'),
    ({"type": "object"}, "{'a': None}", '{"a": null}'),
    ({"type": "array"}, "(1, 2)", "[1, 2]"),
    ({"type": "array"}, "[" * 10_000, json.dumps("[" * 10_000)),
    ({"type": ["string", "integer"]}, "3", "3"),
    ({"type": ["string", "null"]}, "null", "null"),
    ({"type": ["string", "null"]}, "3", '"3"'),
    ({"anyOf": [{"type": "string"}, {"type": "boolean"}]}, "true", "true"),
    ({"enum": [1, 2]}, "2", "2"),
    ({"const": None}, "None", "null"),
    ({"allOf": [{"type": ["integer", "string"]}, {"type": "string"}]}, "3", '"3"'),
    ({"$ref": "#/$defs/size"}, "3", "3"),
    ({"$ref": "#/$defs/nowhere"}, "3", "3"),
    ({"$ref": "#"}, "{}", "{}"),
    ({}, "3", "3"),
    ({}, "three", '"three"'),
    (True, '"quoted"', '"\\"quoted\\""'),
    ({"type": "object"}, '{"a": "\\ud800"}', '{"a": "\\ud800"}'),
]


@pytest.mark.parametrize(("schema", "text", "want"), TYPED, ids=range(len(TYPED)))
def test_plain_values_have_the_types_of_the_schema(schema: Any, text: str, want: str) -> None:
    root = {"$defs": {"size": {"type": "integer"}}, "type": "object"}
    assert typed(text, allowed_types(schema, root)) == want


THINKING: list[tuple[str, str, list[Event]]] = [
    ("gemma4", "<|channel>thought\nhm\n<channel|>yes", [Reasoning("hm"), Text("yes")]),
    ("gemma4", "yes", [Text("yes")]),
    ("mistral", "[THINK]hm [x][/THINK]yes", [Reasoning("hm [x]"), Text("yes")]),
    ("granite", "Here's my thought process:\nhm\n\nHere is my response:\nyes",
     [Reasoning("hm"), Text("yes")]),
    ("granite", "Here is my answer", [Text("Here is my answer")]),
    ("granite", "Here is my thought process: Here is mine.", [Reasoning("Here is mine.")]),
    ("kimi", "◁think▷hm◁/think▷yes", [Reasoning("hm"), Text("yes")]),
    ("olmo3", "hm</think>yes", [Reasoning("hm"), Text("yes")]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "want"), THINKING, ids=range(len(THINKING)))
def test_reasoning_between_other_marks(name: str, text: str, want: list[Event]) -> None:
    syntax = REASONING_PARSERS[name]
    assert parse(ReasoningParser(syntax.opened, syntax), text) == want
    assert parse(ReasoningParser(syntax.opened, syntax), *text) == want
    end = syntax.length(text, syntax.opened)
    assert end == (None if want[-1:] == [Reasoning("Here is mine.")] else end)
    if len(want) == 2 and end is not None:
        assert text[end:].lstrip() == "yes"


def test_reasoning_in_channels() -> None:
    text = "<|channel|>analysis<|message|>a<|end|><|start|>assistant"
    assert HARMONY.length(text, opened=False) == len(text) - len("<|start|>assistant")
    assert HARMONY.length(text + text, opened=False) == 2 * len(text) - len("<|start|>assistant")
    assert HARMONY.length("<|channel|>analysis<|message|>a<|channel|>final", opened=False) == 31
    assert HARMONY.length("<|channel|>analysis<|message|>a", opened=False) is None
    assert HARMONY.length("<|channel|>final<|message|>a", opened=False) == 0
    kept = parse(HarmonyParser({}, separate_reasoning=False), f"{text}<|channel|>final<|message|>b")
    assert kept == [Text("<|channel|>analysis<|message|>a<|end|>"), Text("b")]
