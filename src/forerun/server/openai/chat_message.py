"""Chat messages from events: whole ones, and deltas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

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

TOOL_CALLS = "tool_calls"


class ChatMessage:
    """The message of one generation."""

    def __init__(self) -> None:
        self._announced = 0  # calls
        self._complete: list[int] = []  # their indices
        self._cut: int | None = None  # index of the one that `max_tokens` cut off

    def delta(self, events: Sequence[Event], finish: FinishReason | None) -> dict[str, Any]:
        """What the events add to the message, in OpenAI's form.

        The call that `max_tokens` cut off stays, without its text.
        """
        texts: dict[str, str] = {}
        calls: list[dict[str, Any]] = []
        for event in events:
            match event:
                case Text(text=text):
                    texts["content"] = texts.get("content", "") + text
                case Reasoning(text=text):
                    texts["reasoning_content"] = texts.get("reasoning_content", "") + text
                case CallStart(name=name):
                    calls.append(self._started(name))
                case Arguments(text=text):
                    self._add_arguments(calls, text)
                case CallEnd():
                    self._complete.append(self._announced - 1)
                case CallBroken(cut=True) if finish is not None and finish.type == "length":
                    self._cut = self._announced - 1
                    break  # its text alone follows
                case CallBroken():
                    pass
        delta: dict[str, Any] = dict(texts)
        if "reasoning_content" in delta:
            delta["reasoning"] = delta["reasoning_content"]
        return {**delta, TOOL_CALLS: calls} if calls else delta

    def whole(
        self, events: Sequence[Event], finish: FinishReason | None, with_reasoning: bool
    ) -> dict[str, Any]:
        """The message, without malformed calls, whose text it has.

        Args:
            with_reasoning: "reasoning_content" is null if there is none, else left out.
        """
        delta = self.delta(events, finish)
        calls = [
            {name: value for name, value in call.items() if name != "index"}
            for call in delta.pop(TOOL_CALLS, [])
            if call["index"] in (*self._complete, self._cut)
        ]
        thought = delta.get("reasoning_content")
        content = delta.get("content", "")
        message = {"role": "assistant", "content": content or (None if calls or thought else "")}
        if with_reasoning:
            message |= {"reasoning_content": thought, "reasoning": thought}
        return {**message, TOOL_CALLS: calls} if calls else message

    def finish_reason(self, finish: FinishReason | None) -> str | None:
        if finish is None:
            return None
        return TOOL_CALLS if self._complete and finish.type == "stop" else finish.type

    def _started(self, name: str) -> dict[str, Any]:
        index, self._announced = self._announced, self._announced + 1
        return {
            "index": index,
            "id": f"call_{uuid4().hex}",
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }

    def _add_arguments(self, calls: list[dict[str, Any]], text: str) -> None:
        """Adds to the call in this delta, or makes a delta of its own."""
        index = self._announced - 1
        if not calls or calls[-1]["index"] != index:
            calls.append({"index": index, "function": {"arguments": ""}})
        calls[-1]["function"]["arguments"] += text
