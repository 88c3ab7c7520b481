"""A suffix automaton that is extended token by token. No torch, nothing of Forerun.

A state is a class of substrings that end at the same positions. The suffix link of the whole text's
state leads to the longest suffix that occurred before, and each state knows where it first ended:
so the longest repetition is known after every token without a search. Extending is amortized
constant time per token. (Blumer et al. 1985; for drafting: SAM Decoding, arXiv 2411.10666.)
"""

from __future__ import annotations

from collections.abc import Iterable


class SuffixAutomaton:
    """The automaton of `tokens`, to which `extend` appends."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        # One entry per state; state 0 is the empty string.
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]  # of the longest substring of the state
        self._end = [-1]  # index of the last token of its first occurrence
        self._last = 0  # the state of the whole text

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._append(token)

    def longest_repetition(self) -> tuple[int, int]:
        """(length, end) of the longest suffix that occurred before: its length, and the index at
        which its first occurrence ends. (0, -1): the last token is new."""
        state = max(self._link[self._last], 0)
        return self._length[state], self._end[state]

    def continuation(self, end: int, count: int) -> list[int]:
        """The `count` tokens after index `end`; past the end of the text, they repeat."""
        out = self.tokens[end + 1 : end + 1 + count]
        period = len(self.tokens) - end - 1
        while len(out) < count:
            out.append(out[len(out) - period])
        return out

    def _append(self, token: int) -> None:
        end = len(self.tokens)
        self.tokens.append(token)
        new = self._state({}, -1, end + 1, end)
        state, self._last = self._last, new
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        self._link[new] = 0 if state < 0 else self._split(state, token)

    def _split(self, state: int, token: int) -> int:
        """The state of `state`'s longest substring followed by `token`, split off from a longer
        one where necessary."""
        longer = self._next[state][token]
        length = self._length[state] + 1
        if self._length[longer] == length:
            return longer
        exact = self._state(
            self._next[longer].copy(), self._link[longer], length, self._end[longer]
        )
        self._link[longer] = exact
        while state >= 0 and self._next[state].get(token) == longer:
            self._next[state][token] = exact
            state = self._link[state]
        return exact

    def _state(self, following: dict[int, int], link: int, length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        return len(self._link) - 1
