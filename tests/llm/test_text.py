"""Where an output ends: ids, text and reason together. What is shown is never taken back."""

from __future__ import annotations

import copy
import itertools
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.request import FinishReason, Request
from forerun.core.sampling_params import SamplingParams
from forerun.llm.bundled import bundled
from forerun.llm.text import MAX_PENDING, Detokenizer, OutputText, StopStrings, detokenize
from forerun.scheduler.stop_checker import append_tokens
from tests.property_examples import examples

EOS = 0


class Bytes:
    """Ids are bytes; 0 is a special token without text."""

    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool = True,
        clean_up_tokenization_spaces: bool = True,
    ) -> str:
        assert not clean_up_tokenization_spaces
        kept = [t for t in token_ids if t != EOS or not skip_special_tokens]
        return bytes(kept).decode("utf-8", errors="replace")


class Words(Bytes):
    """Ids are pieces of text, separated by bars; a leading space is stripped, as by Llama's."""

    def __init__(self, pieces: str) -> None:
        self.pieces = pieces.split("|")

    def decode(self, token_ids: list[int], **options: bool) -> str:  # type: ignore[override]
        return "".join(self.pieces[t] for t in token_ids).removeprefix(" ")


def ids(text: str) -> list[int]:
    return list(text.encode())


def run(
    steps: list[list[int]], tokenizer: Bytes | None = None, **params: Any
) -> tuple[Request, str, list[tuple[str, int]]]:
    """Takes the steps' tokens until the end, as the engine and its thread do.

    Returns the request, its text, and (text, tokens) shown after every step.
    """
    request = Request("r", (1,), SamplingParams(**params), 0, frozenset({EOS}))
    text = OutputText(tokenizer or Bytes(), request.params)
    shown, streamed = "", []
    for tokens in steps:
        kept = append_tokens(request, tokens)
        request.accept_lengths.append(kept)
        request.correct_drafts.append(min(kept, len(tokens) - 1))
        found = text.feed(
            request.output, request.finish is not None and request.finish.type == "stop"
        )
        if found is not None:
            request.trim(found[1])
            request.finish = FinishReason("stop", matched=found[0])
        if request.finish is not None:
            break
        new, count = text.take()
        shown += new
        streamed.append((shown, count))
    return request, shown + text.take_rest(), streamed


def split(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(tokens), *(c % (len(tokens) + 1) for c in cuts)})
    return [tokens[a:b] for a, b in itertools.pairwise(edges)]


def test_stop_id_inside_an_accepted_run_cuts_the_rest() -> None:
    request, text, _ = run([ids("ab"), [*ids("cd"), EOS, *ids("junk")]])
    assert request.output == [*ids("abcd"), EOS]
    assert text == "abcd"
    assert request.finish == FinishReason("stop", matched=EOS)
    assert (request.accept_lengths, request.correct_drafts) == ([2, 3], [1, 3])


def test_stop_on_the_last_allowed_token_is_a_stop() -> None:
    request, text, _ = run([[*ids("ab"), EOS]], max_new_tokens=3)
    assert request.finish is not None and request.finish.type == "stop"
    assert text == "ab"
    request, text, _ = run([ids("a.b")], max_new_tokens=2, stop=".")
    assert request.finish == FinishReason("stop", matched=".") and text == "a"


def test_a_stop_id_is_tested_before_stop_strings() -> None:
    request, text, _ = run([[*ids("ab"), EOS]], stop="b\0", skip_special_tokens=False)
    assert request.finish == FinishReason("stop", matched=EOS)
    assert text == "ab\0"


def test_length_cuts_an_accepted_run() -> None:
    request, text, _ = run([ids("abcdef")], max_new_tokens=4)
    assert text == "abcd" and request.output == ids("abcd")
    assert request.finish == FinishReason("length", length=4)


@pytest.mark.parametrize("end", ["length", "stop id"])
def test_a_stop_string_wins_over_a_later_end_in_the_same_step(end: str) -> None:
    tokens = [*ids("ab.cd"), EOS]
    params = {"max_new_tokens": 5} if end == "length" else {}
    request, text, _ = run([tokens], stop=".", **params)
    assert text == "ab" and request.output == ids("ab")
    assert request.finish == FinishReason("stop", matched=".")


@pytest.mark.parametrize("at", range(1, 9))
def test_stop_string_over_any_step_boundary(at: int) -> None:
    tokens = ids("one END two")
    request, text, streamed = run([tokens[:at], tokens[at:]], stop="END")
    assert text == "one "
    assert request.output == ids("one ")  # ids go with the text
    assert request.finish == FinishReason("stop", matched="END")
    assert sum(request.accept_lengths) == len(request.output)  # figures, too
    assert streamed == [("one "[:at], min(at, 4))] or at > 6


def test_figures_of_steps_that_a_stop_string_wipes_out() -> None:
    request, _, _ = run([ids("ab"), ids("cd"), ids("ef"), ids("gh")], stop="bcdefg")
    assert request.output == ids("a")
    assert request.accept_lengths == [1, 0, 0, 0] and request.correct_drafts == [1, 0, 0, 0]


def test_the_earliest_stop_string_wins() -> None:
    request, text, _ = run([ids("a stop b halt c")], stop=["halt", "stop"])
    assert text == "a " and request.finish is not None and request.finish.matched == "stop"
    words = Words("|ab|cdef|x")
    request, text, _ = run([[1, 2, 3]], words, stop=["de", "bcd"])  # one token completes both
    assert text == "a" and request.finish is not None and request.finish.matched == "bcd"


def test_stop_string_waits_for_min_new_tokens() -> None:
    request, text, _ = run([ids("xx..xx..yy")], stop="..", min_new_tokens=6, max_new_tokens=9)
    assert text == "xx..xx" and request.finish == FinishReason("stop", matched="..")
    # A shorter one that was complete before does not come back through a longer one's window.
    request, text, _ = run([ids("a.bcdefgh")], stop=[".", "efgh"], min_new_tokens=3)
    assert text == "a.bcd"
    # What began before, but ends after, counts.
    request, text, _ = run([ids("abcdef")], stop="bcd", min_new_tokens=4)
    assert text == "a"


def test_token_that_holds_text_before_the_stop_is_kept() -> None:
    request, text, _ = run([[1, 2, 3]], Words("|hel|lo.|x"), stop=".")
    assert request.output == [1, 2]  # 2 spells "lo" too
    assert text == "hello"


def test_all_bytes_of_a_character_before_the_stop_are_kept() -> None:
    request, text, _ = run([ids("a🙂.")], stop=".")
    assert text == "a🙂" and request.output == ids("a🙂")


def test_held_back_text_is_emitted_if_it_is_no_stop_string() -> None:
    _, text, streamed = run([[t] for t in ids("ab STO STOP")], stop=" STOP")
    assert text == "ab STO"
    assert [s for s, _ in streamed] == ["a", "ab", *["ab"] * 4, *["ab STO"] * 4]
    assert [n for _, n in streamed] == [1, 2, *[2] * 4, *[6] * 4]
    _, text, streamed = run([ids("ab STO")], stop=" STOP", max_new_tokens=6)
    assert text == "ab STO" and not streamed


def test_without_stop_strings_nothing_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    monkeypatch.setattr(StopStrings, "scan", lambda self, text: searched.append(text))
    _, text, streamed = run([[t] for t in ids("ab STO")])
    assert text == "ab STO" and [s for s, _ in streamed] == [
        "a",
        "ab",
        "ab ",
        "ab S",
        "ab ST",
        text,
    ]
    assert not searched
    run([[t] for t in ids("ab")], stop="b")
    assert searched == ["a", "b"]


def test_characters_come_out_whole() -> None:
    text = "héllo → 漢字 🙂!"
    detokenizer, seen = Detokenizer(Bytes(), True), ""
    for token in ids(text):
        seen += detokenizer.push(token)
        assert text.startswith(seen)
    assert seen == text and detokenizer.flush() == ""


def test_a_broken_character_at_the_end_is_shown_in_the_final_text_only() -> None:
    detokenizer = Detokenizer(Bytes(), True)
    assert "".join(map(detokenizer.push, ids("a🙂")[:-1])) == "a"
    assert detokenizer.flush() == "\ufffd"


def test_a_leading_space_is_stripped_once() -> None:
    words = Words(" the| cat||")
    tokens = [0, 1, *[2] * 100, *[1] * 100]
    detokenizer = Detokenizer(words, True)
    assert "".join(map(detokenizer.push, tokens)) == "the" + " cat" * 101
    assert len(detokenizer._window) < 64  # neither text nor special tokens pile up


def test_endless_garbage_is_shown_in_time() -> None:
    detokenizer = Detokenizer(Bytes(), True)
    pieces = [detokenizer.push(0xFF) for _ in range(200)]
    assert pieces.count("") <= 200 - 200 // (MAX_PENDING + 1)
    assert "".join(pieces) + detokenizer.flush() == "\ufffd" * 200


# --- properties -----------------------------------------------------------------------------------

TEXTS = st.one_of(
    st.text(alphabet="ab.é🙂", max_size=40),
    st.text(max_size=20, alphabet=st.characters(exclude_categories=("Cs",))),
)
STOPS = st.lists(st.text(alphabet="ab.é🙂", min_size=1, max_size=6), max_size=4)
TOKENS = st.one_of(
    TEXTS.map(lambda text: [t or 1 for t in ids(text)]),
    st.lists(st.integers(1, 255), max_size=40),
)
CUTS = st.lists(st.integers(0, 40), max_size=10)


@examples(400)
@given(tokens=TOKENS, stops=STOPS, cuts=CUTS, min_new=st.integers(0, 12))
def test_nothing_shown_is_taken_back_and_steps_change_nothing(
    tokens: list[int], stops: list[str], cuts: list[int], min_new: int
) -> None:
    params = {"stop": stops, "min_new_tokens": min_new, "max_new_tokens": 200}
    request, text, streamed = run(split(tokens, cuts), **params)
    shown = [*streamed, (text, len(request.output))]
    for (before, some), (after, more) in itertools.pairwise(shown):
        assert after.startswith(before) and some <= more
    alone, same, _ = run([[t] for t in tokens], **params)  # one token a step: plain decoding
    assert (same, alone.output, alone.finish) == (text, request.output, request.finish)
    assert sum(request.accept_lengths) == len(request.output)
    if request.finish is None:
        assert text == detokenize(Bytes(), tokens, True)
        if min_new <= 1:
            assert not any(stop in text for stop in stops if "\ufffd" not in stop)
    else:
        matched = str(request.finish.matched)
        whole = detokenize(Bytes(), tokens, True)
        assert matched in stops and whole.startswith(text + matched)
        kept = detokenize(Bytes(), request.output, True)
        assert kept.startswith(text)  # ids spell all of the text,
        if request.output:  # and no fewer do
            short = Detokenizer(Bytes(), True)
            assert len("".join(map(short.push, request.output[:-1]))) < len(text)


@examples(300)
@given(text=st.text(alphabet="ab", max_size=40), stops=STOPS, cuts=CUTS)
def test_stop_strings_against_a_plain_search(text: str, stops: list[str], cuts: list[int]) -> None:
    finder, seen, done = StopStrings(stops), "", 0
    for cut in [*sorted(c % (len(text) + 1) for c in cuts), len(text)]:
        piece = text[done:cut]
        seen, before, done = seen + piece, done, max(cut, done)
        match = finder.scan(piece)
        ends = [
            (start, stop)
            for stop in stops
            for start in range(len(seen))
            if seen.startswith(stop, start) and start + len(stop) > before
        ]
        assert match == min(ends, default=None)
        beginnings = [s[:n] for s in stops for n in range(1, len(s)) if seen.endswith(s[:n])]
        assert finder.held == max(map(len, beginnings), default=0)


@cache
def bundled_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(bundled("target")), local_files_only=True)


@examples(200)
@given(data=st.data())
def test_incremental_text_is_the_whole_text(data: st.DataObject) -> None:
    """A byte-level tokenizer, on text and on any ids."""
    tokenizer = bundled_tokenizer()
    text = data.draw(TEXTS)
    if data.draw(st.booleans()):
        tokens = tokenizer(text)["input_ids"]
    else:
        tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=60))
    for skip in (True, False):
        detokenizer = Detokenizer(tokenizer, skip)
        made = "".join(map(detokenizer.push, tokens)) + detokenizer.flush()
        assert made == detokenize(tokenizer, tokens, skip)
        whole = tokenizer.decode(tokens, skip_special_tokens=skip)
        if "\ufffd" * (MAX_PENDING // 2) not in whole:
            assert made == whole


def test_a_tokenizer_with_its_own_decoding_keeps_it() -> None:
    """The library is called directly only where transformers adds nothing to it."""
    tokenizer = bundled_tokenizer()
    tokens = tokenizer("def add(a, b):")["input_ids"]

    class Shouting(type(tokenizer)):  # type: ignore[misc]
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return str(super()._decode(*args, **kwargs)).upper()

    assert detokenize(tokenizer, tokens, True) == "def add(a, b):"
    tokenizer = copy.copy(tokenizer)
    tokenizer.__class__ = Shouting
    assert detokenize(tokenizer, tokens, True) == "DEF ADD(A, B):"
