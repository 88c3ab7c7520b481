"""Turns token ids into text: incremental detokenization and stop strings.

The engine produces token ids. Here they become text, stop strings are found, and text and ids are
trimmed together. Streamed text is never taken back: bytes of an incomplete character and what may
be the beginning of a stop string are held back.

The text is a function of the token ids alone, however many of them a step produced.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from forerun.core.request import FinishReason, RequestRecord
from forerun.core.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"  # written by decoders for bytes that are not a (complete) character
MAX_PENDING = 16  # tokens that may wait for the rest of a character (UTF-8 has at most 4 bytes)
WINDOW = 8  # tokens that are decoded again, as context, before the window is moved


class Tokenizer(Protocol):
    """The method of a Hugging Face tokenizer that is used."""

    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool = ...,
        clean_up_tokenization_spaces: bool = ...,
    ) -> str: ...


def _decoder(tokenizer: Any, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """Decodes ids. What transformers does around the tokenizers library takes longer than it."""
    kind: Any = type(tokenizer)
    if _only_wraps(kind):
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=skip_special_tokens)
    # Cleaning up would join what was emitted already ("do n't").
    return partial(
        tokenizer.decode,
        skip_special_tokens=skip_special_tokens,
        clean_up_tokenization_spaces=False,
    )


@cache
def _only_wraps(kind: type[Any]) -> bool:
    """Whether `decode` of this class calls the tokenizers library and adds nothing."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    return (
        issubclass(kind, PreTrainedTokenizerFast)
        and kind.decode is PreTrainedTokenizerBase.decode
        and kind._decode is PreTrainedTokenizerFast._decode
    )


class Detokenizer:
    """Incremental detokenization: a character is emitted when all its bytes are known."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._decode = _decoder(tokenizer, skip_special_tokens)
        # Decoders may strip or join at the start. So new tokens are decoded together with some that
        # were emitted already, and what the text grows by is new.
        self._window: list[int] = []
        self._done = 0  # tokens of the window whose text was emitted
        self._length = 0  # characters of the window's text that were emitted
        self._last = 0  # index of the first token that was emitted last

    def push(self, token: int) -> str:
        """The characters that one more token completes."""
        self._window.append(token)
        text = self._decode(self._window)
        full = len(self._window) - self._done > MAX_PENDING
        if len(text) <= self._length:
            if full:  # special tokens that are skipped: no context for what follows
                del self._window[self._done :]
            return ""
        if text.endswith(REPLACEMENT) and not full:
            return ""
        new, self._length = text[self._length :], len(text)
        self._last, self._done = self._done, len(self._window)
        if self._done > WINDOW:
            del self._window[: self._last]
            self._last, self._done = 0, len(self._window)
            self._length = len(self._decode(self._window))
        return new

    def flush(self) -> str:
        """The text that is still held back: bytes that never became a character."""
        text = self._decode(self._window)
        new, self._length = text[self._length :], max(len(text), self._length)
        self._done = len(self._window)
        return new


def detokenize(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool) -> str:
    """The text of `ids`; a `Detokenizer` gives the same token by token."""
    text = _decoder(tokenizer, skip_special_tokens)(list(ids))
    if REPLACEMENT not in text:
        return text
    detokenizer = Detokenizer(tokenizer, skip_special_tokens)  # decoders differ on invalid bytes
    return "".join([*map(detokenizer.push, ids), detokenizer.flush()])


def text_ends(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """Characters of the text of `ids` after each token, special tokens included."""
    detokenizer, length, ends = Detokenizer(tokenizer, skip_special_tokens=False), 0, []
    for token in ids:
        length += len(detokenizer.push(token))
        ends.append(length)
    ends[-1] += len(detokenizer.flush())
    return ends


class StopMatch(NamedTuple):
    """A stop string that begins at character `start` of the text."""

    start: int
    stop: str


class StopStrings:
    """Finds stop strings in a growing text (Knuth, Morris and Pratt 1977; one state per string).

    `held` is the length of the longest suffix of the text that is a prefix of a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._states = [0] * len(stops)  # per string: length of its prefix that the text ends with
        self._seen = 0

    @property
    def held(self) -> int:
        return max(self._states, default=0)

    def scan(self, text: str) -> StopMatch | None:
        """Scans more text; of the matches that end in it, returns the one that begins first."""
        matches: list[StopMatch] = []
        for i, (stop, borders) in enumerate(self._stops):
            state = self._states[i]
            for at, char in enumerate(text, self._seen + 1):
                while state and char != stop[state]:
                    state = borders[state]
                state += char == stop[state]
                if state == len(stop):
                    matches.append(StopMatch(at - state, stop))
                    state = borders[state]
            self._states[i] = state
        self._seen += len(text)
        return min(matches, default=None)


def _borders(stop: str) -> list[int]:
    """Entry n: length of the longest proper prefix of stop[:n] that is also its suffix."""
    borders, state = [0, 0], 0
    for char in stop[1:]:
        while state and char != stop[state]:
            state = borders[state]
        state += char == stop[state]
        borders.append(state)
    return borders


class OutputText:
    """The text of one request's output, and where a stop string ends it."""

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, with_text: bool = False
    ) -> None:
        """`with_text`: a token is shown together with its text, also without stop strings."""
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._stops = StopStrings(params.stop) if params.stop else None
        self._with_text = with_text or bool(params.stop)
        self._min_tokens = params.min_new_tokens
        self._text = ""
        self._ends: list[int] = []  # characters of the text after each token
        self._shown = 0  # characters emitted
        self._end: int | None = None  # where a stop string begins

    def feed(self, output: Sequence[int], stop_id: bool = False) -> tuple[str, int] | None:
        """Detokenizes the new tokens of `output` (all tokens so far), up to a stop string.

        A stop string counts if the `min_new_tokens`-th token or a later one completes it.

        Args:
            stop_id: the last token is a stop id, which takes precedence over stop strings.

        Returns:
            The stop string and the number of tokens that spell the text before it, if one is found.
        """
        for token in output[len(self._ends) :]:
            new = self._detokenizer.push(token)
            self._text += new
            self._ends.append(len(self._text))
            match = None if self._stops is None else self._stops.scan(new)
            if stop_id and len(self._ends) == len(output):
                return None
            if match is not None and len(self._ends) >= self._min_tokens:
                self._end = match.start
                return match.stop, self.num_tokens(match.start)
        return None

    def find_stop(self, record: RequestRecord) -> tuple[FinishReason, int] | None:
        """`feed` with a request's output: how a stop string ends it, and after how many tokens."""
        ended = record.finish
        match = self.feed(record.output, stop_id=ended is not None and ended.type == "stop")
        return None if match is None else (FinishReason("stop", matched=match[0]), match[1])

    def take(self) -> tuple[str, int]:
        """New text of a running request, and the number of tokens to show in all.

        With stop strings or `with_text`, tokens are held back together with their text.
        """
        end = len(self._text) - (0 if self._stops is None else self._stops.held)
        new, self._shown = self._text[self._shown : end], end
        return new, self.num_tokens(end) if self._with_text else len(self._ends)

    def take_rest(self) -> str:
        """The rest of the text, of a request that has ended."""
        if self._end is None:
            self._text += self._detokenizer.flush()
        return self._text[self._shown : self._end]

    @property
    def text(self) -> str:
        """All of it, shown or not."""
        return self._text

    def offset(self, index: int) -> int:
        """Where a token's text begins. The tokens of one character begin where it does."""
        return self._ends[index - 1] if index else 0

    def token_texts(self, num_tokens: int, text: str) -> list[str]:
        """`text`, which begins the output's text, split into the parts of its first tokens.

        A token's part are the characters that it completed. The last token has the rest.
        """
        ends = [min(end, len(text)) for end in self._ends[:num_tokens]]
        if ends:
            ends[-1] = len(text)
        return [text[start:end] for start, end in pairwise([0, *ends])]

    def num_tokens(self, end: int) -> int:
        """The fewest tokens that spell the first `end` characters."""
        return bisect_left(self._ends, end) + 1 if end else 0
