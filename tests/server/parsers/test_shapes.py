"""Answers in shapes that models are known to write, well-formed and broken ones, of every family.

A line of `shapes.jsonl` names the parsers, and says what is found in a text: content, reasoning,
and complete calls with their arguments as JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.server.parsers.events import (
    Arguments,
    CallBroken,
    CallEnd,
    CallStart,
    Event,
    Reasoning,
    Text,
)
from forerun.server.parsers.harmony import HarmonyParser
from forerun.server.parsers.output import OutputParser
from forerun.server.parsers.reasoning import ReasoningParser
from forerun.server.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from forerun.server.parsers.tool_parser import ToolParser
from tests.server.parsers.test_notations import FUNCTIONS as TYPED
from tests.server.parsers.test_parsers import check_order, parse

LINES = (Path(__file__).parent / "shapes.jsonl").read_text().splitlines()
SHAPES: list[dict[str, Any]] = [json.loads(line) for line in LINES]
NAMES = ("g", "class", "print", "mcp.srv-x")  # functions of any arguments
FUNCTIONS = {**TYPED, **{name: {} for name in NAMES}}


def parser_of(shape: dict[str, Any]) -> OutputParser:
    reasoning = None
    if "reasoning" in shape:
        reasoning = ReasoningParser(shape["opened"], REASONING_PARSERS[shape["reasoning"]])
    return OutputParser(reasoning, TOOL_PARSERS[shape["tools"]](FUNCTIONS))


def found_in(events: list[Event]) -> list[Any]:
    """As in the lines; calls that are broken are left out."""
    found: list[Any] = []
    name = arguments = ""
    for event in events:
        match event:
            case Text(text=text):
                found.append(text)
            case Reasoning(text=text):
                found.append({"reasoning": text})
            case CallStart():
                name, arguments = event.name, ""
            case Arguments(text=text):
                arguments += text
            case CallEnd():
                found.append({"name": name, "arguments": arguments})
            case CallBroken():
                pass
    return found


@pytest.mark.parametrize("apart", [9, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("number", range(len(SHAPES)), ids=[s["tools"] for s in SHAPES])
def test_shapes_are_read_alike_wherever_they_are_cut(number: int, apart: int) -> None:
    """At every place, or at some that are as far apart, others for each shape."""
    shape = SHAPES[number]
    text = shape["text"]
    whole = parse(parser_of(shape), text)
    assert found_in(whole) == shape["want"]
    assert parse(parser_of(shape), *text) == whole
    for at in range(1 + number % apart, len(text), apart):
        assert parse(parser_of(shape), text[:at], text[at:]) == whole
        check_order(parse(parser_of(shape), text[:at]))  # as `max_tokens` would end it


# Those of channels tell calls by their recipient.
MARKED = sorted({*TOOL_PARSERS.values()} - {HarmonyParser}, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", MARKED)
def test_grammars_know_all_that_calls_are_read_after(kind: type[ToolParser]) -> None:
    """Else a call of a strict function would escape its grammar."""
    assert {*kind.markers} <= {kind.syntax.opening, *kind.syntax.tolerated}
