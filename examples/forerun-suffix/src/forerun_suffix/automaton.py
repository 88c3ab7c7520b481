"""A suffix automaton that grows with its text. No torch, nothing of Forerun.

Its states are the classes of substrings that end at the same places. The link of the state that is
the whole text leads to its longest suffix that was seen before, and the state remembers where: so
after every token the longest repetition is known without a search. A token costs constant time on
average. (Blumer et al. 1985; for drafting: SAM Decoding, arXiv 2411.10666.)
"""

from __future__ import annotations

from collections.abc import Iterable


class SuffixAutomaton:
    """Of `tokens`, which `extend` appends to."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        # One entry a state; state 0 is the empty string.
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]  # of the longest substring of the state
        self._end = [-1]  # place of the last token of its first occurrence
        self._last = 0  # the state of the whole text

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._append(token)

    def longest_repetition(self) -> tuple[int, int]:
        """(length, place): how many of the newest tokens stood in the text before, at most, and
        where that ended the first time. (0, -1): the newest token is new."""
        state = max(self._link[self._last], 0)
        return self._length[state], self._end[state]

    def continuation(self, place: int, count: int) -> list[int]:
        """`count` tokens behind `place`; past the end of the text, of what was just returned."""
        out = self.tokens[place + 1 : place + 1 + count]
        known = len(self.tokens) - place - 1
        while len(out) < count:
            out.append(out[len(out) - known])
        return out

    def _append(self, token: int) -> None:
        place = len(self.tokens)
        self.tokens.append(token)
        new = self._state({}, -1, place + 1, place)
        state, self._last = self._last, new
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        self._link[new] = 0 if state < 0 else self._split(state, token)

    def _split(self, state: int, token: int) -> int:
        """The state of exactly `state`'s longest substring and `token`; made where it is part of
        a longer one."""
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
