"""Where a request's output ends: the one place that trims ids and text.

Stops are tested first, then the length: a stop on the last allowed token is a stop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from forerun.core.request import FinishReason, Request


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


@dataclass
class TextStream:
    """Text of a growing list of ids. A character is given out when all its bytes are there."""

    tokenizer: Tokenizer
    skip_special: bool
    text: str = ""
    _context: int = 0  # ids from here on are decoded again, as context for the next
    _done: int = 0  # ids before here are in `text`

    def extend(self, ids: list[int]) -> str:
        """Takes in `ids` (the whole output so far); returns the text so far."""
        # Some tokenizers strip or join at the start of a decode: decode with context, take the new.
        before = self._decode(ids[self._context : self._done])
        after = self._decode(ids[self._context :])
        if len(after) > len(before) and not after.endswith("\ufffd"):
            self.text += after[len(before) :]
            self._context, self._done = self._done, len(ids)
        return self.text

    def finish(self, ids: list[int]) -> str:
        """The text of all ids, broken characters included."""
        self.text = self._decode(ids)
        return self.text

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=self.skip_special)


class StopChecker:
    """Appends tokens to requests until a stop."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._streams: dict[str, TextStream] = {}

    def open(self, request: Request) -> None:
        if self.tokenizer is not None:
            self._streams[request.rid] = TextStream(
                self.tokenizer, request.params.skip_special_tokens
            )

    def close(self, request: Request) -> str:
        """The final text; forgets the request."""
        stream = self._streams.pop(request.rid, None)
        if stream is None:
            return ""
        reason = request.finish
        if reason is not None and isinstance(reason.matched, str):
            return stream.text  # trimmed at the stop string already
        return stream.finish(request.output)

    def text(self, request: Request) -> str:
        """The text so far, for streaming."""
        stream = self._streams.get(request.rid)
        if stream is None:
            return ""
        # With stop strings the text is kept current, and trimmed, by `take`.
        return stream.text if request.params.stop else stream.extend(request.output)

    def take(self, request: Request, tokens: list[int]) -> None:
        """Appends what was committed, up to and with the first stop."""
        params, output = request.params, request.output
        for token in tokens:
            output.append(token)
            if token in request.stop_ids:
                request.finish = FinishReason("stop", matched=token)
            elif params.stop:
                self._stop_string(request)
            if request.finish is None and len(output) >= params.max_new_tokens:
                request.finish = FinishReason("length", length=len(output))
            if request.finish is not None:
                return

    def _stop_string(self, request: Request) -> None:
        stream = self._streams[request.rid]
        seen = len(stream.text)
        text = stream.extend(request.output)
        if len(request.output) < request.params.min_new_tokens:
            return
        longest = max(map(len, request.params.stop))
        hits = [
            (at, stop)
            for stop in request.params.stop
            if (at := text.find(stop, max(0, seen - longest))) >= 0
        ]
        if not hits:
            return
        at, stop = min(hits)
        stream.text = text[:at]
        request.finish = FinishReason("stop", matched=stop)
        # Ids go with the text: the shortest prefix that still spells all of it.
        ids = request.output
        while ids and len(stream._decode(ids[:-1])) >= at:
            ids.pop()
