"""`forerun generate`, on a small target over token ids and on the bundled pair."""

from __future__ import annotations

import io
import json
import sys

import pytest

from forerun.speculative import registry
from tests.cli.support import GOLDEN_FLAGS, needs_pair
from tests.golden_engine import CASES, GOLDEN, golden_llm
from tests.toy_algorithms import Faulty

CASE = CASES[0]
IDS = ",".join(map(str, CASE["prompt"]))
GREEDY = ("--temperature", "0", "--max-new-tokens", "12")


def expected(count: int = 12) -> list[int]:
    with golden_llm(max_total_tokens=1024) as llm:
        params = {"temperature": 0, "max_new_tokens": count}
        return llm.generate(input_ids=CASE["prompt"], sampling_params=params).output_ids


def test_json_is_one_object_a_text(forerun) -> None:
    result = forerun(
        "generate", "--input-ids", IDS, "--input-ids", "1 2 3", "--json", *GREEDY, *GOLDEN_FLAGS
    )
    assert (result.code, result.err) == (0, "")
    first, second = map(json.loads, result.out.splitlines())
    assert first["prompt"] == CASE["prompt"]
    assert first["output_ids"] == expected()
    assert first["finish_reason"] == {"type": "length", "length": 12}
    assert first["meta_info"]["completion_tokens"] == 12
    assert second["prompt"] == [1, 2, 3]


def test_streamed_and_batched_ids_agree(forerun) -> None:
    args = ("generate", "--input-ids", IDS, *GREEDY, *GOLDEN_FLAGS)
    ids = " ".join(map(str, expected()))
    for flags in ((), ("--no-stream",)):
        result = forerun(*args, *flags)
        assert result.code == 0
        assert result.out == f"{ids}\n"
        assert result.err.startswith("12 tokens in ")
        assert "tok/s" in result.err
        assert "accept length" not in result.err  # plain decoding


def test_a_draft_changes_the_speed_only(forerun) -> None:
    draft = ("--speculative-algorithm=dflash", f"--speculative-draft-model-path={GOLDEN}/draft")
    result = forerun(
        "generate", "--input-ids", IDS, *GREEDY, *GOLDEN_FLAGS, *draft, "--no-speculative-adaptive"
    )
    assert result.out.split() == list(map(str, expected()))
    assert "accept length" in result.err


def test_several_texts_of_a_prompt(forerun) -> None:
    result = forerun(
        *("generate", "--input-ids", IDS, "--n", "2", "--sampling-seed", "1", "--json"),
        *("--max-new-tokens", "4", *GOLDEN_FLAGS),
    )
    assert [json.loads(line)["index"] for line in result.out.splitlines()] == [0, 1]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "no prompt"),
        (("--input-ids", "1,x"), "--input-ids must be integers, '1,2,3', got '1,x'."),
        (("-", "-"), "one prompt only"),
        (("--system", "s", "hello"), "--system needs --chat"),
        (("--chat", "--input-ids", "1"), "--chat takes text"),
        (("hello", "--temperature", "-1"), "temperature must be >= 0"),
        (("hello", "--n", "2", "--temperature", "0"), "n > 1 with temperature 0"),
        (("hello", "--page-size", "7"), "page_size must be one of 1, 16"),
        (("hello", "--dtype", "float8"), "dtype must be one of auto, bfloat16, float32"),
        (("hello", "--model-path", "no/such/folder"), "'no/such/folder' is not a folder"),
        (("hello", "--log-level", "loud"), "log_level"),
        (("hello", "--top-k", "99999999999999999999"), "top_k must be >= 1, or -1 or 0"),
        (("hello", "--max-new-tokens", "99999999999999999999"), "fit in 32 bits"),
        (("hello", "--context-length", "99999999999999999999"), "fit in 64 bits"),
        (("hello", "--stop", "x" * 5000), "at most 1024 characters"),
    ],
)
def test_bad_input(forerun, args: tuple[str, ...], says: str) -> None:
    assert says in forerun("generate", *args).error


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--input-ids", ""), "empty"),
        (("--input-ids", "1,99999999"), "vocabulary"),
        (("--input-ids", "1", "--context-length", "8", "--max-new-tokens", "99"), "context"),
        (("hello",), "skip_tokenizer_init"),
        (("--input-ids", "1", "--speculative-algorithm", "dflahs"), "Did you mean 'DFLASH'"),
        (("--input-ids", "1", "--device", "tpu"), "Known: auto, cpu, cuda, cuda:N"),
        (("--input-ids", "1", "--attention-backend", "torch_nativ"), "Did you mean 'torch_native'"),
    ],
)
def test_bad_input_that_the_engine_refuses(forerun, args: tuple[str, ...], says: str) -> None:
    assert says in forerun("generate", *GOLDEN_FLAGS, *args).error


@needs_pair
def test_text_streams_and_reads_standard_input(forerun, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("def add(a, b):\n"))
    streamed = forerun("generate", "-", *GREEDY)
    assert streamed.code == 0
    whole = forerun("generate", "def add(a, b):\n", "--json", *GREEDY)
    text = json.loads(whole.out)["text"]
    assert text
    assert streamed.out.rstrip("\n") == text.rstrip("\n")


@pytest.mark.exhaustive
@needs_pair
def test_chat_prompts_with_the_bundled_draft(forerun) -> None:
    question = "Tom has 3 apples and buys 4 more. How many apples does Tom have?"
    args = ("generate", question, "--chat", "--temperature", "0", "--max-new-tokens", "40")
    plain = forerun(*args)
    drafted = forerun(*args, "--speculative-algorithm", "DFLASH")
    assert plain.code == drafted.code == 0
    assert plain.out == drafted.out
    assert "accept length" in drafted.err


@needs_pair
@pytest.mark.exhaustive
@pytest.mark.parametrize("algorithm", ["NONE", "DFLASH"])
def test_a_stop_string_is_never_shown(forerun, algorithm: str) -> None:
    question = "Anna has 154 marbles. She gives 132 to Ben. How many marbles are left?"
    args = (
        *("generate", question, "--chat", "--temperature", "0", "--max-new-tokens", "40"),
        *("--speculative-algorithm", algorithm, "--dtype", "float32"),
    )
    text = forerun(*args).out.removesuffix("\n")
    stop = text[len(text) // 2 : len(text) // 2 + 14]
    assert len(stop) == 14
    want = text[: text.find(stop)]
    assert forerun(*args, "--stop", stop).out.removesuffix("\n") == want
    assert json.loads(forerun(*args, "--stop", stop, "--json").out)["text"] == want


@needs_pair
def test_an_unknown_algorithm(forerun) -> None:
    assert (
        "Did you mean 'DFLASH'" in forerun("generate", "x", "--speculative-algorithm=dfalsh").error
    )


@pytest.fixture
def drafter_that_fails(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an algorithm whose third proposal is a bug."""
    table = registry.Registry(registry.BUILT_IN, ())
    table.register("TOY-FAULTY", Faulty)
    monkeypatch.setattr(registry, "_registry", lambda: table)
    monkeypatch.setattr(Faulty, "fault", "raise")
    # Called in every step: a step that was recorded would not call it again.
    monkeypatch.setattr(Faulty, "supports_target_verify_for_draft", lambda self: False)
    return "TOY-FAULTY"


@pytest.mark.parametrize("form", [(), ("--no-stream",), ("--json",)])
def test_an_aborted_request_is_an_error(
    forerun, drafter_that_fails: str, form: tuple[str, ...]
) -> None:
    """What it has is still printed."""
    result = forerun(
        *("generate", "--input-ids", IDS, "--speculative-algorithm", drafter_that_fails),
        *("--max-new-tokens", "12", *form, "--temperature", "0", *GOLDEN_FLAGS),
    )
    assert result.code == 1
    errors = [line for line in result.err.splitlines() if line.startswith("forerun: error: ")]
    assert len(errors) == 1 and "the request was aborted: " in errors[0]
    assert "somebody else's bug" in errors[0]
    if form == ("--json",):
        assert json.loads(result.out)["finish_reason"]["type"] == "abort"
    else:
        assert result.out


@pytest.mark.parametrize("command", [("demo",), ("eval", "python"), ("bench", "vs-transformers")])
def test_measurements_of_no_tokens_are_refused(forerun, command: tuple[str, ...]) -> None:
    result = forerun(*command, "--max-new-tokens", "0")
    assert (result.code, result.error) == (2, "--max-new-tokens must be >= 1, got 0.")


@pytest.mark.covering(0)
@needs_pair
@pytest.mark.parametrize(
    "command",
    [
        ("eval", "python", "--num-examples", "2", "--speculative-algorithm"),
        ("demo", "--repetitions", "1", "--algorithm"),
    ],
)
def test_an_aborted_request_fails_a_measurement(
    forerun, drafter_that_fails: str, command: tuple[str, ...]
) -> None:
    result = forerun(*command, drafter_that_fails, "--max-new-tokens", "16", "--json")
    assert result.code == 1
    assert "somebody else's bug" in result.err.splitlines()[-1]
    assert json.loads(result.out)
