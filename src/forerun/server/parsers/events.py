"""What a parser finds in a text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Text:
    """More of the answer."""

    text: str
    start: int = field(default=0, compare=False)  # index of its first character in the output


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call: the name of its function is known. `Arguments` and `CallEnd` follow."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the current call's arguments: a piece of a JSON object, as the model wrote it."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The arguments of the current call are complete."""


@dataclass(frozen=True, slots=True)
class CallBroken:
    """The current call turned out to be malformed or ends early; its whole text follows as `Text`.

    What was streamed of it stays, an incomplete JSON object.
    """

    cut: bool = False  # the text ends within it, and did not contradict it before


Event = Text | Reasoning | CallStart | Arguments | CallEnd | CallBroken


def merged(events: Iterable[Event]) -> list[Event]:
    """The events with neighbours of the same kind joined, and empty ones left out.

    Texts are joined if nothing is between them in the output.
    """
    groups: list[tuple[Event, list[str]]] = []
    end = 0  # of the last text
    for event in events:
        if not isinstance(event, Text | Reasoning | Arguments):
            groups.append((event, []))
        elif event.text:
            apart = isinstance(event, Text) and event.start != end
            if not groups or type(groups[-1][0]) is not type(event) or apart:
                groups.append((event, []))
            groups[-1][1].append(event.text)
            if isinstance(event, Text):
                end = event.start + len(event.text)
    return [_joined(first, texts) for first, texts in groups]


def _joined(first: Event, texts: list[str]) -> Event:
    if isinstance(first, Text):
        return Text("".join(texts), first.start)
    if isinstance(first, Reasoning | Arguments):
        return type(first)("".join(texts))
    return first
