"""The content blocks of an answer, and the events that build them in a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

from pydantic_core import from_json

from forerun.core.request import FinishReason
from forerun.server.parsers.events import (
    Arguments,
    CallBroken,
    CallEnd,
    CallStart,
    Event,
    Reasoning,
    Text,
)

StreamEvent = dict[str, Any]  # with "type"
SIGNATURE = "unsigned"  # of thinking; clients send it back, and it is not verified


class ContentBlocks:
    """Blocks in the order in which they were generated.

    `push` and `finish` return the events of a stream; without one, they are of no use.
    """

    def __init__(self) -> None:
        self._blocks: list[dict[str, Any]] = []
        self._arguments: dict[int, str] = {}  # of calls, by index
        self._broken: set[int] = set()  # indices of calls that are none
        self._open = False  # the last block grows
        self.complete_calls = 0

    def push(self, events: Sequence[Event], finish: FinishReason | None) -> list[StreamEvent]:
        """`finish`: why the output ended, if these are its last events."""
        made: list[StreamEvent] = []
        for event in events:
            if isinstance(event, CallBroken) and event.cut and _is_length(finish):
                break  # the call that `max_tokens` cut off stays, without its text, which follows
            made += self._push(event)
        return made

    def finish(self) -> list[StreamEvent]:
        """Ends the last block."""
        return list(self._close())

    def whole(self) -> list[dict[str, Any]]:
        """The blocks without malformed calls, whose text is in a text block."""
        return [
            self._with_input(index, block)
            for index, block in enumerate(self._blocks)
            if index not in self._broken
        ]

    def _push(self, event: Event) -> Iterator[StreamEvent]:
        match event:
            case Text(text=text):
                yield from self._add("text", text)
            case Reasoning(text=text):
                yield from self._add("thinking", text)
            case CallStart(name=name):
                call = {"id": f"toolu_{uuid4().hex}", "name": name, "input": {}}
                yield from self._begin({"type": "tool_use", **call})
                self._arguments[self._index] = ""
            case Arguments(text=text):
                self._arguments[self._index] += text
                yield self._delta("input_json_delta", "partial_json", text)
            case CallEnd():
                self.complete_calls += 1
                yield from self._close()
            case CallBroken():
                self._broken.add(self._index)
                yield from self._close()

    def _add(self, kind: str, text: str) -> Iterator[StreamEvent]:
        """More of a text or of thinking."""
        if not self._open or self._blocks[-1]["type"] != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin({"type": kind, kind: "", **signature})
        self._blocks[-1][kind] += text
        yield self._delta(f"{kind}_delta", kind, text)

    def _begin(self, block: dict[str, Any]) -> Iterator[StreamEvent]:
        yield from self._close()
        self._blocks.append(block)
        self._open = True
        start = {"type": "content_block_start", "index": self._index}
        yield {**start, "content_block": dict(block)}

    def _close(self) -> Iterator[StreamEvent]:
        if not self._open:
            return
        self._open = False
        if self._blocks[-1]["type"] == "thinking":
            self._blocks[-1]["signature"] = SIGNATURE
            yield self._delta("signature_delta", "signature", SIGNATURE)
        yield {"type": "content_block_stop", "index": self._index}

    @property
    def _index(self) -> int:
        return len(self._blocks) - 1

    def _delta(self, kind: str, name: str, text: str) -> StreamEvent:
        delta = {"type": kind, name: text}
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _with_input(self, index: int, block: dict[str, Any]) -> dict[str, Any]:
        """The block; a call with its input, of which the rest may be cut off."""
        arguments = self._arguments.get(index)
        if not arguments:
            return block
        return {**block, "input": from_json(arguments, allow_partial=True)}


def _is_length(finish: FinishReason | None) -> bool:
    return finish is not None and finish.type == "length"
