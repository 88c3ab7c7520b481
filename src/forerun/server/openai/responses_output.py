"""The output items of `/v1/responses`, and the events that build them in a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

from forerun.server.logprobs import MessageLogprobs
from forerun.server.parsers.events import (
    Arguments,
    CallBroken,
    CallEnd,
    CallStart,
    Event,
    Reasoning,
    Text,
)

COMPLETED, INCOMPLETE, IN_PROGRESS = "completed", "incomplete", "in_progress"
QUEUED, FAILED, CANCELLED = "queued", "failed", "cancelled"  # of responses
StreamEvent = dict[str, Any]  # with "type"


class OutputItems:
    """Items in the order in which they were generated.

    `push` and `finish` return the events of a stream; without one, they are of no use.
    """

    def __init__(self, logprobs: MessageLogprobs | None = None) -> None:
        """`logprobs`: of the messages, if they were asked for."""
        self._logprobs = logprobs
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the last item, while it grows

    def push(self, events: Sequence[Event]) -> list[StreamEvent]:
        return [made for event in events for made in self._push(event)]

    def finish(self, status: str) -> list[StreamEvent]:
        """Ends the last item.

        Args:
            status: "completed" or "incomplete".
        """
        return list(self._close(status))

    def whole(self) -> list[dict[str, Any]]:
        """The items without broken calls, whose text is in a message.

        Clients parse the arguments of all calls in a response.
        """
        return [
            item
            for item in self._items
            if item["type"] != "function_call" or item["status"] == COMPLETED
        ]

    def _push(self, event: Event) -> Iterator[StreamEvent]:
        match event:
            case Text(text=text):
                scores = [] if self._logprobs is None else self._logprobs.of(event)
                yield from self._add_text(text, "message", {"logprobs": scores})
            case Reasoning(text=text):
                yield from self._add_text(text, "reasoning", {})
            case CallStart(name=name):
                yield from self._begin(_call(name))
            case Arguments(text=text):
                self._item["arguments"] += text
                yield self._event("response.function_call_arguments.delta", delta=text)
            case CallEnd():
                yield from self._close(COMPLETED)
            case CallBroken():
                yield from self._close(INCOMPLETE)

    def _add_text(
        self, text: str, kind: str, scores: dict[str, list[Any]]
    ) -> Iterator[StreamEvent]:
        if self._open is None or self._open["type"] != kind:
            yield from self._begin(_message() if kind == "message" else _reasoning())
            self._item["content"].append(_part(kind))
            yield self._event("response.content_part.added", content_index=0, part=_part(kind))
        part = self._item["content"][0]
        part["text"] += text
        for name, entries in scores.items():
            part[name] += entries
        yield self._event(f"{_PREFIX[kind]}.delta", content_index=0, delta=text, **scores)

    def _begin(self, item: dict[str, Any]) -> Iterator[StreamEvent]:
        yield from self._close(COMPLETED)
        self._items.append(item)
        self._open = item
        yield self._item_event("response.output_item.added")

    def _close(self, status: str) -> Iterator[StreamEvent]:
        item = self._open
        if item is None:
            return
        item["status"] = status
        kind = item["type"]
        if kind == "function_call":
            yield self._event(
                "response.function_call_arguments.done",
                name=item["name"],
                arguments=item["arguments"],
            )
        else:
            part = dict(item["content"][0])
            scores = {"logprobs": part["logprobs"]} if kind == "message" else {}
            yield self._event(f"{_PREFIX[kind]}.done", content_index=0, text=part["text"], **scores)
            yield self._event("response.content_part.done", content_index=0, part=part)
        yield self._item_event("response.output_item.done")
        self._open = None

    @property
    def _item(self) -> dict[str, Any]:
        assert self._open is not None
        return self._open

    def _event(self, kind: str, **values: Any) -> StreamEvent:
        """An event about the open item."""
        place = {"item_id": self._item["id"], "output_index": len(self._items) - 1}
        return {"type": kind, **place, **values}

    def _item_event(self, kind: str) -> StreamEvent:
        """An event with the open item as it is now."""
        return {"type": kind, "output_index": len(self._items) - 1, "item": _copy(self._item)}


_PREFIX = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


def _part(kind: str) -> dict[str, Any]:
    """Makes a part without text yet."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _message() -> dict[str, Any]:
    return {
        "id": f"msg_{uuid4().hex}",
        "type": "message",
        "status": IN_PROGRESS,
        "role": "assistant",
        "content": [],
    }


def _reasoning() -> dict[str, Any]:
    return {
        "id": f"rs_{uuid4().hex}",
        "type": "reasoning",
        "status": IN_PROGRESS,
        "summary": [],
        "content": [],
    }


def _call(name: str) -> dict[str, Any]:
    return {
        "id": f"fc_{uuid4().hex}",
        "type": "function_call",
        "status": IN_PROGRESS,
        "call_id": f"call_{uuid4().hex}",
        "name": name,
        "arguments": "",
    }


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """The item as it is now."""
    copied = dict(item)
    if "content" in item:
        copied["content"] = [dict(part) for part in item["content"]]
    return copied
