"""The automaton against a search through the whole text."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from forerun_lookback.automaton import SuffixAutomaton


def searched(text: list[int]) -> tuple[int, int]:
    """The longest suffix that occurred before, and where its first occurrence ends."""
    for length in range(len(text) - 1, 0, -1):
        suffix = text[-length:]
        for end in range(length - 1, len(text) - 1):
            if text[end - length + 1 : end + 1] == suffix:
                return length, end
    return 0, -1


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 9), max_size=20))
def test_every_repetition_is_the_one_a_search_finds(few: list[int], many: list[int]) -> None:
    automaton, text = SuffixAutomaton(), []
    for token in [*few, *many]:
        automaton.extend([token])
        text.append(token)
        assert automaton.tokens == text
        assert automaton.longest_repetition() == searched(text)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 12))
def test_a_continuation_repeats_what_followed(text: list[int], count: int) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    length, end = automaton.longest_repetition()
    if length:
        grown = [*text, *automaton.continuation(end, count)]
        period = len(text) - 1 - end
        assert len(grown) == len(text) + count
        assert all(grown[i] == grown[i - period] for i in range(len(text), len(grown)))


def test_an_empty_text_repeats_nothing() -> None:
    assert SuffixAutomaton().longest_repetition() == (0, -1)


def test_time_is_linear_in_the_text() -> None:
    def seconds(size: int) -> float:
        started = time.perf_counter()
        SuffixAutomaton().extend([7] * size + list(range(size)))
        return time.perf_counter() - started

    seconds(1000)
    assert seconds(64_000) < 64 * 8 * max(seconds(1000), 1e-4)
