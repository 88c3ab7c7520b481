"""Parsers of tool calls and reasoning: what they find does not depend on how the text is cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.server.parsers.deepseek import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
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
    merged,
)
from forerun.server.parsers.hermes import HermesParser
from forerun.server.parsers.llama3 import Llama3Parser
from forerun.server.parsers.output import OutputParser
from forerun.server.parsers.reasoning import ReasoningParser
from forerun.server.parsers.scanner import Scanner
from forerun.server.parsers.tool_parser import ToolParser
from tests.property_examples import examples

NAMES = ("f", "get_weather", "größe")
FUNCTIONS: dict[str, dict[str, Any]] = {name: {} for name in NAMES}
PARSERS: list[type[ToolParser]] = [HermesParser, Llama3Parser, DeepSeekV3Parser, DeepSeekV31Parser]
MARKERS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END,
    SEPARATOR, "function", "```json\n", "\n```", "<think>", "</think>", ";", " ", "\n", "<",
    '{"name": "f", "arguments": ', '{"name": "f", "parameters": ', '"get_weather"', "{", "}", "[",
    "]", '"', ":", ",", "\\", "é", "\U0001f40d", "12", "null", "f", "text",
]  # fmt: skip
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(), VALUES, max_size=4)
OPENED = (None, True, False)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), OBJECTS), min_size=1, max_size=3)


def hermes(calls: Sequence[tuple[str, str]]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in calls
    )


def llama3(calls: Sequence[tuple[str, str]]) -> str:
    return "<|python_tag|>" + "; ".join(
        f'{{"name": {json.dumps(name)}, "parameters": {arguments}}}' for name, arguments in calls
    )


def deepseek_v3(calls: Sequence[tuple[str, str]]) -> str:
    inner = "\n".join(
        f"{CALL_BEGIN}function{SEPARATOR}{name}\n```json\n{arguments}\n```{CALL_END}"
        for name, arguments in calls
    )
    return CALLS_BEGIN + inner + CALLS_END


def deepseek_v31(calls: Sequence[tuple[str, str]]) -> str:
    inner = "".join(
        f"{CALL_BEGIN}{name}{SEPARATOR}{arguments}{CALL_END}" for name, arguments in calls
    )
    return CALLS_BEGIN + inner + CALLS_END


Writer = Callable[[Sequence[tuple[str, str]]], str]
FORMATS: list[tuple[type[ToolParser], Writer]] = [
    (HermesParser, hermes),
    (Llama3Parser, llama3),
    (DeepSeekV3Parser, deepseek_v3),
    (DeepSeekV31Parser, deepseek_v31),
]


def parse(parser: Scanner | OutputParser, *pieces: str) -> list[Event]:
    return merged([*(e for piece in pieces for e in parser.feed(piece)), *parser.finish()])


def test_an_output_without_parsers_is_text_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.server.parsers.output.merged", None)
    parser = OutputParser(None, None)
    found = [parser.feed(piece) for piece in ("a <think>", "", "b")]
    assert found == [[Text("a <think>")], [], [Text("b")]]
    assert [event.start for events in found for event in events if isinstance(event, Text)] == [
        0,
        9,
    ]


def events_of(calls: Sequence[tuple[str, str]]) -> list[Event]:
    return [
        event
        for name, arguments in calls
        for event in (CallStart(name), Arguments(arguments), CallEnd())
    ]


@pytest.mark.parametrize(("kind", "write"), FORMATS)
@examples(30)
@given(calls=CALLS, ascii_only=st.booleans(), data=st.data())
def test_calls_are_found(
    kind: type[ToolParser], write: Writer, calls: Any, ascii_only: bool, data: st.DataObject
) -> None:
    """Unicode, escapes, braces and markers in strings; arguments come as they were written."""
    texts = [(name, json.dumps(arguments, ensure_ascii=ascii_only)) for name, arguments in calls]
    before = data.draw(st.sampled_from(["", "I look it up.\n\n", "a < b "]))
    after = data.draw(st.sampled_from(["", "\nDone: {}"]))
    want: list[Event] = [Text(before.rstrip()), *events_of(texts), Text(after.lstrip())]
    assert parse(kind(FUNCTIONS), before + write(texts) + after) == merged(want)


@pytest.mark.parametrize("kind", PARSERS)
@examples(40)
@given(parts=st.lists(st.sampled_from(MARKERS), max_size=25), data=st.data())
def test_pieces_do_not_matter(
    kind: type[ToolParser], parts: list[str], data: st.DataObject
) -> None:
    text = "".join(parts)
    whole = parse(kind(FUNCTIONS), text)
    assert parse(kind(FUNCTIONS), *text) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(kind(FUNCTIONS), *pieces) == whole


@pytest.mark.parametrize("kind", PARSERS)
@examples(40)
@given(parts=st.lists(st.sampled_from(MARKERS), max_size=25), opened=st.sampled_from(OPENED))
def test_texts_know_where_they_are(
    kind: type[ToolParser], parts: list[str], opened: bool | None
) -> None:
    text = "".join(parts)
    for cut in (0, len(text) // 2):
        reasoning = None if opened is None else ReasoningParser(opened)
        parser, end = OutputParser(reasoning, kind(FUNCTIONS)), 0
        for event in [*parser.feed(text[:cut]), *parser.feed(text[cut:]), *parser.finish()]:
            if isinstance(event, Text):
                assert event.start >= end
                end = event.start + len(event.text)
                assert text[event.start : end] == event.text


@pytest.mark.parametrize("kind", PARSERS)
@examples(40)
@given(parts=st.lists(st.sampled_from(MARKERS), max_size=25))
def test_nothing_is_lost(kind: type[ToolParser], parts: list[str]) -> None:
    """Without a complete call the text is what was given."""
    text = "".join(parts)
    found = parse(kind(FUNCTIONS), text)
    check_order(found)
    for event, following in zip(found, [*found[1:], CallEnd()], strict=False):
        if isinstance(event, CallBroken):
            assert isinstance(following, Text)
    if CallEnd() not in found:
        assert "".join(event.text for event in found if isinstance(event, Text)) == text


@pytest.mark.parametrize(("kind", "write"), FORMATS)
@examples(30)
@given(calls=CALLS, data=st.data())
def test_cut_short_or_damaged(
    kind: type[ToolParser], write: Writer, calls: Any, data: st.DataObject
) -> None:
    """Complete calls before the damage stay, and the announced one that it hits is broken."""
    text = write([(name, json.dumps(arguments)) for name, arguments in calls])
    at = data.draw(st.integers(0, len(text)))
    damage = data.draw(st.sampled_from(["", "x", '"', "}", "{", "\x00", "<"]))
    rest = text[at:] if damage else ""
    found = parse(kind(FUNCTIONS), text[:at] + damage + rest)
    check_order(found)
    if not damage:
        complete = [event.name for event in found[: count(found)] if isinstance(event, CallStart)]
        assert complete == [name for name, _ in calls[: len(complete)]]


def count(found: list[Event]) -> int:
    """Events up to the last complete call."""
    return max((at + 1 for at, event in enumerate(found) if event == CallEnd()), default=0)


def check_order(found: list[Event]) -> None:
    """Arguments are inside calls, complete ones are JSON objects, and every call ends."""
    arguments: str | None = None
    for event in found:
        match event:
            case CallStart():
                assert arguments is None
                arguments = ""
            case Arguments(text=text):
                assert arguments is not None
                arguments += text
            case CallEnd():
                assert arguments is not None
                assert isinstance(json.loads(arguments), dict)
                arguments = None
            case CallBroken():
                assert arguments is not None
                arguments = None
            case Text():
                assert arguments is None
    assert arguments is None


# (parser, text, events)
CASES: list[tuple[type[ToolParser], str, list[Event]]] = [
    (HermesParser, "a <b> <tool", [Text("a <b> <tool")]),
    (HermesParser, " \n", [Text(" \n")]),
    (HermesParser, "<<tool_call>{}", [Text("<<tool_call>{}")]),
    # The end marker, or what follows, may be missing.
    (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": {}}',
        [*events_of([("f", "{}")])],
    ),
    (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": {}}}\n</tool_call>',
        [*events_of([("f", "{}")]), Text("}\n</tool_call>")],
    ),
    # Arguments first, none, null, as text.
    (
        HermesParser,
        '<tool_call>{"arguments": {"a": [{"b": "}"}]}, "name": "f"}</tool_call>',
        events_of([("f", '{"a": [{"b": "}"}]}')]),
    ),
    (HermesParser, '<tool_call>{"name": "f"}</tool_call>', events_of([("f", "{}")])),
    (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": null}</tool_call>',
        events_of([("f", "{}")]),
    ),
    (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        events_of([("f", '{"a": 1}')]),
    ),
    (
        HermesParser,
        '<tool_call>{"id": {"x": ["y"]}, "name": "gr\\u00f6\\u00dfe", "type": "function"}',
        events_of([("größe", "{}")]),
    ),
    (HermesParser, '<tool_call>{"name": "f", "arguments": ""}', events_of([("f", "{}")])),
    (
        HermesParser,
        '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>',
        events_of([("f", '{"a": 1}')]),
    ),
    # Several calls between the marks; a mark that is missing; no call after one.
    (
        HermesParser,
        '<tool_call>\n{"name": "f"}\n{"name": "get_weather"}\n</tool_call>\nok',
        [*events_of([("f", "{}"), ("get_weather", "{}")]), Text("ok")],
    ),
    (
        HermesParser,
        '<tool_call>[{"name": "f"}, {"name": "get_weather"}]</tool_call>',
        events_of([("f", "{}"), ("get_weather", "{}")]),
    ),
    (
        HermesParser,
        '<tool_call>{"name": "f"}\n<tool_call>{"name": "get_weather"}</tool_call>',
        events_of([("f", "{}"), ("get_weather", "{}")]),
    ),
    (
        HermesParser,
        '<tool_call> \n<tool_call>{"name": "f"}</tool_call>',
        [Text("<tool_call>"), *events_of([("f", "{}")])],
    ),
    (HermesParser, "<tool_call> <to", [Text("<tool_call> <to")]),
    # Text again: an unknown function, wrong types, other keys, keys twice, not JSON.
    *(
        (HermesParser, text, [Text(text)])
        for text in (
            '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
            '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
            '<tool_call>{"arguments": [], "name": "f"}</tool_call>',
            '<tool_call>{"arguments": "[]", "name": "f"}</tool_call>',
            '<tool_call>{"arguments": {}, "parameters": {}, "name": "f"}</tool_call>',
            '<tool_call>{"arguments": {}, "arguments": {}, "name": "f"}</tool_call>',
            '<tool_call>{"city": "Paris"}</tool_call>',
            '<tool_call>{"name": "\\ud800"}</tool_call>',
            "<tool_call>f(1)</tool_call>",
            "<tool_call>",
        )
    ),
    # After it reading goes on.
    (
        HermesParser,
        '<tool_call>?<tool_call>{"name": "f"}</tool_call>',
        [Text("<tool_call>?"), *events_of([("f", "{}")])],
    ),
    # Announced, and broken then.
    (
        HermesParser,
        'x\n<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>',
        [
            Text("x"),
            CallStart("f"),
            Arguments('{"a": 01'),
            CallBroken(),
            Text('\n<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>'),
        ],
    ),
    (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": {"a": "',
        [
            CallStart("f"),
            Arguments('{"a": "'),
            CallBroken(cut=True),
            Text('<tool_call>{"name": "f", "arguments": {"a": "'),
        ],
    ),
    # Llama: at the beginning, or after the tag.
    (Llama3Parser, ' {"name": "f", "parameters": {}}', events_of([("f", "{}")])),
    (
        Llama3Parser,
        '{"name": "f", "parameters": {}}\n{"name": "f", "arguments": {"a": 1}} ;',
        [*events_of([("f", "{}"), ("f", '{"a": 1}')]), Text(";")],
    ),
    (Llama3Parser, '{"type": "function", "name": "f"}', events_of([("f", "{}")])),
    (
        Llama3Parser,
        'x<|python_start|>{"name": "f", "parameters": {}}<|python_end|>y',
        [Text("x"), *events_of([("f", "{}")]), Text("y")],
    ),
    *(
        (Llama3Parser, text, [Text(text)])
        for text in (
            ' {"answer": 42}',
            '{"name": "Bob", "age": 5}',
            'It is {"name": "f", "parameters": {}}',
            '<|python_tag|>brave_search.call(query="x")',
            "{",
            "  x",
            " ",
        )
    ),
    (
        DeepSeekV3Parser,
        f"{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}g\n```json\n{{}}\n```{CALL_END}{CALLS_END}",
        [
            Text(
                f"{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}g\n```json\n{{}}\n```{CALL_END}"
                f"{CALLS_END}"
            )
        ],
    ),
    (
        DeepSeekV3Parser,
        f"{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}f\n```json\n{{}}\n``",
        events_of([("f", "{}")]),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "want"), CASES, ids=range(len(CASES)))
def test_cases(kind: type[ToolParser], text: str, want: list[Event]) -> None:
    assert parse(kind(FUNCTIONS), text) == want
    assert parse(kind(FUNCTIONS), *text) == want


@pytest.mark.parametrize(("kind", "write"), FORMATS)
def test_arguments_are_streamed(kind: type[ToolParser], write: Writer) -> None:
    """Nothing but the last character waits inside of arguments."""
    arguments = json.dumps({"code": "x = {}\n" * 5000, "city": "Zürich"}, ensure_ascii=False)
    text = write([("f", arguments)])
    begin = text.index(arguments)
    parser, streamed = kind(FUNCTIONS), ""
    for at, char in enumerate(text):
        new = "".join(e.text for e in parser.feed(char) if isinstance(e, Arguments))
        streamed += new
        if begin <= at < begin + len(arguments):
            assert streamed == arguments[: at - begin + 1]
    assert streamed == arguments


def test_deep_arguments_are_malformed() -> None:
    text = '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 100_000
    *_, last = parse(HermesParser(FUNCTIONS), text)
    assert last == Text(text)


THINKING: list[tuple[bool, str, list[Event]]] = [
    (True, "hm\n</think>\n\nyes\n", [Reasoning("hm"), Text("yes\n")]),
    (True, "<think>\nhm</think>yes", [Reasoning("hm"), Text("yes")]),
    (True, "</think>\n\nyes", [Text("yes")]),
    (True, "hm, <b> </thin \n", [Reasoning("hm, <b> </thin \n")]),
    (True, "<<think>a</think>b", [Reasoning("<<think>a"), Text("b")]),
    (True, "a</think>b</think>c<think>", [Reasoning("a"), Text("b</think>c<think>")]),
    (True, "", []),
    (False, "\n<think>\nhm\n\n</think>\n\nyes", [Reasoning("hm"), Text("yes")]),
    (False, "<think>\n\n</think>\n\n yes", [Text("yes")]),
    (False, " yes <think>no</think>", [Text(" yes <think>no</think>")]),
    (False, "<thinking>", [Text("<thinking>")]),
    (False, " <thi", [Text(" <thi")]),
    (False, " ", [Text(" ")]),
]


@pytest.mark.parametrize(("opened", "text", "want"), THINKING, ids=range(len(THINKING)))
def test_reasoning(opened: bool, text: str, want: list[Event]) -> None:
    assert parse(ReasoningParser(opened), text) == want
    assert parse(ReasoningParser(opened), *text) == want


@settings(deadline=None)
@given(parts=st.lists(st.sampled_from(MARKERS), max_size=20), opened=st.booleans())
def test_whole_outputs_do_not_depend_on_pieces(parts: list[str], opened: bool) -> None:
    def parser() -> OutputParser:
        return OutputParser(ReasoningParser(opened), HermesParser(FUNCTIONS))

    text = "".join(parts)
    found = parse(parser(), text)
    assert parse(parser(), *text) == found
    assert parse(parser(), *parts) == found


def test_calls_inside_of_reasoning_are_reasoning() -> None:
    call = hermes([("f", "{}")])
    parser = OutputParser(ReasoningParser(opened=True), HermesParser(FUNCTIONS))
    found = parse(parser, f"I could write {call}.</think>\n\n{call}")
    assert found == [Reasoning(f"I could write {call}."), *events_of([("f", "{}")])]


CALL = hermes([("f", '{"a": "</tool_call>"}')])
CALLED = events_of([("f", '{"a": "</tool_call>"}')])
# (text after "<think>", events)
UNENDED: list[tuple[str, list[Event]]] = [
    (f"hm\n{CALL}", [Reasoning("hm"), *CALLED]),
    (f"hm <tool_call> hm\n\n{CALL}\n{CALL}\n", [Reasoning("hm <tool_call> hm"), *CALLED, *CALLED]),
    (CALL, CALLED),
    (f"hm {CALL}</think>\n", [Reasoning("hm"), *CALLED]),
    (f"hm {CALL}</think>ok", [Reasoning(f"hm {CALL}"), Text("ok")]),
    (f"hm {CALL} it is", [Reasoning(f"hm {CALL} it is")]),
    (f"hm {CALL}{CALL[:-30]}", [Reasoning(f"hm {CALL}{CALL[:-30]}")]),
    (f"hm {CALL[:-30]}", [Reasoning(f"hm {CALL[:-30]}")]),
    ("hm <tool", [Reasoning("hm <tool")]),
]


@pytest.mark.parametrize(("text", "want"), UNENDED, ids=range(len(UNENDED)))
def test_calls_at_the_end_of_reasoning_without_an_answer_are_calls(
    text: str, want: list[Event]
) -> None:
    for opened, whole in ((True, text), (False, f"<think>{text}")):
        for pieces in ((whole,), tuple(whole)):
            parser = OutputParser(ReasoningParser(opened), HermesParser(FUNCTIONS))
            assert parse(parser, *pieces) == want


def test_reasoning_is_streamed_beside_marks_of_calls() -> None:
    """What is no call does not wait."""
    parser = OutputParser(ReasoningParser(opened=True), HermesParser(FUNCTIONS))
    assert parser.feed("I write <tool_call>{x") == [Reasoning("I write <tool_call>{x")]
    assert parser.feed(" y <tool") == [Reasoning(" y")]
