"""Where an output ends: ids, text and reason together."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.core.request import Request
from forerun.core.sampling_params import SamplingParams
from forerun.engine.detokenizer import StopChecker, TextStream

EOS = 0


class Bytes:
    """Ids are bytes; 0 is a special token without text."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        kept = [t for t in token_ids if t != EOS or not skip_special_tokens]
        return bytes(kept).decode("utf-8", errors="replace")


def ids(text: str) -> list[int]:
    return list(text.encode())


def run(steps: list[list[int]], **params: Any) -> tuple[Request, str, list[str]]:
    """Takes the steps' tokens until the end; returns the request, its text, the texts streamed."""
    stopper = StopChecker(Bytes())
    request = Request("r", (1,), SamplingParams(**params), 0, frozenset({EOS}))
    stopper.open(request)
    streamed = []
    for tokens in steps:
        if request.finish is None:
            stopper.take(request, tokens)
            streamed.append(stopper.text(request))
    return request, stopper.close(request), streamed


def test_stop_id_inside_an_accepted_run_cuts_the_rest() -> None:
    request, text, _ = run([ids("ab"), [*ids("cd"), EOS, *ids("junk")]])
    assert request.output == [*ids("abcd"), EOS]
    assert text == "abcd"
    assert request.finish is not None and request.finish.as_dict() == {
        "type": "stop",
        "matched": EOS,
    }


def test_stop_on_the_last_allowed_token_is_a_stop() -> None:
    request, text, _ = run([[*ids("ab"), EOS]], max_new_tokens=3)
    assert request.finish is not None and request.finish.type == "stop"
    assert text == "ab"


def test_length_cuts_an_accepted_run() -> None:
    request, text, _ = run([ids("abcdef")], max_new_tokens=4)
    assert text == "abcd" and request.output == ids("abcd")
    assert request.finish is not None and request.finish.as_dict() == {
        "type": "length",
        "length": 4,
    }


@pytest.mark.parametrize("split", range(1, 9))
def test_stop_string_over_any_step_boundary(split: int) -> None:
    tokens = ids("one END two")
    request, text, streamed = run([tokens[:split], tokens[split:]], stop="END")
    assert text == "one "
    assert request.output == ids("one ")  # ids go with the text
    assert request.finish is not None and request.finish.matched == "END"
    assert all(not s.endswith("END") for s in streamed)


def test_the_earliest_stop_string_wins() -> None:
    request, text, _ = run([ids("a stop b halt c")], stop=["halt", "stop"])
    assert text == "a " and request.finish is not None and request.finish.matched == "stop"


def test_stop_string_waits_for_min_new_tokens() -> None:
    request, text, _ = run([ids("xx..xx..yy")], stop="..", min_new_tokens=6, max_new_tokens=9)
    assert text == "xx..xx"
    assert request.finish is not None and request.finish.type == "stop"


def test_token_that_holds_text_before_the_stop_is_kept() -> None:
    class Words(Bytes):
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
            return "".join({1: "hel", 2: "lo.", 3: " x"}[t] for t in token_ids)

    stopper = StopChecker(Words())
    request = Request("r", (1,), SamplingParams(stop="."), 0, frozenset())
    stopper.open(request)
    stopper.take(request, [1, 2, 3])
    assert request.output == [1, 2]  # 2 spells "lo" too
    assert stopper.close(request) == "hello"


def test_characters_come_out_whole() -> None:
    text = "héllo → 漢字 🙂!"
    tokens = ids(text)
    stream, seen = TextStream(Bytes(), True), []
    for end in range(1, len(tokens) + 1):
        seen.append(stream.extend(tokens[:end]))
    assert all(text.startswith(s) for s in seen)
    assert seen[-1] == text == stream.finish(tokens)


def test_a_broken_character_at_the_end_is_shown_in_the_final_text_only() -> None:
    tokens = ids("a🙂")[:-1]
    stream = TextStream(Bytes(), True)
    assert stream.extend(tokens) == "a" or stream.extend(tokens) == ""
    assert stream.finish(tokens).startswith("a")
