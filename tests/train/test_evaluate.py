"""`forerun train evaluate`: its figures are the engine's, and its datasets are what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.core.errors import ConfigError
from forerun.evals.acceptance import Acceptance
from forerun.llm.bundled import bundled
from forerun.main import run
from forerun.models.tokenizer import load_tokenizer
from forerun_train.evaluate import Sampling, accepted, algorithm_of, open_dataset
from forerun_train.prompts import HELD_OUT, TOPICS, generate
from tests.cli.support import needs_pair
from tests.golden_engine import GOLDEN

pytestmark = needs_pair
TURNS = [
    {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"},
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(bundled("target"))


def test_a_conversation_is_asked_for_its_last_answer(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    lines: list[dict[str, Any]] = [
        {"messages": TURNS},
        {"messages": [TURNS[0], TURNS[2]]},
        {"prompt": "a"},
        {"text": "x = 1\n" * 200},
        {"text": "y = 2"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = open_dataset(str(path), tokenizer, 5, 0)
    assert found.name == "chats"
    want = [TURNS[:3], TURNS[:1], TURNS[:1]]
    for prompt, messages in zip(found.prompts, want, strict=False):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(list(prompt.ids)) == text
    ids = tokenizer(lines[3]["text"])["input_ids"]
    assert list(found.prompts[3].ids) == ids[:256]
    half = tokenizer("y = 2")["input_ids"]
    assert list(found.prompts[4].ids) == half[: len(half) // 2]
    assert len(open_dataset(str(path), tokenizer, 2, 0).prompts) == 2


@pytest.mark.parametrize("name", ["maths", "dialogue", "word-problems", "python"])
def test_named_datasets(tokenizer: Any, name: str) -> None:
    found = open_dataset(name, tokenizer, 3, 1)
    assert (found.name, len(found.prompts)) == (name, 3)
    if name in TOPICS:
        held = [line["messages"][0]["content"] for line in generate([name], 3, 1, HELD_OUT)]
        assert [prompt.text for prompt in found.prompts] == held


def test_what_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'nope' is neither a file nor a dataset; datasets: dia"):
        open_dataset("nope", tokenizer, 1, 0)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a"}\n{"a": 1}\n')
    with pytest.raises(ConfigError, match=r"bad\.jsonl:2: unknown form"):
        open_dataset(str(bad), tokenizer, 5, 0)
    bad.write_text("")
    with pytest.raises(ConfigError, match="has no prompts"):
        open_dataset(str(bad), tokenizer, 5, 0)
    with pytest.raises(ConfigError, match=r"there is no config\.json"):
        algorithm_of(tmp_path)


def test_the_algorithm_is_that_of_the_draft() -> None:
    assert algorithm_of(GOLDEN / "draft") == "DFLASH"
    assert algorithm_of(bundled("eagle3")) == "EAGLE3"


@pytest.mark.exhaustive
def test_acceptance_is_the_engines() -> None:
    """In batches; and each temperature has its own."""
    settings: dict[str, Any] = {
        "speculative_algorithm": "DFLASH", "speculative_adaptive": False, "dtype": "float32",
        "device": "cpu",
    }  # fmt: skip
    with LLM(**settings) as llm:
        dataset = open_dataset("word-problems", llm.tokenizer, 6, 0)
        sampling = Sampling(temperatures=(0.0, 1.0), max_new_tokens=48, seed=5)
        scores = accepted(llm, [dataset], sampling)
        for score in scores:
            params = SamplingParams(
                temperature=score.temperature, sampling_seed=5, max_new_tokens=48
            )
            ids = [list(prompt.ids) for prompt in dataset.prompts]
            outputs = llm.generate(input_ids=ids, sampling_params=params)
            whole = Acceptance.total(Acceptance.of(each.meta_info) for each in outputs)
            assert score.acceptance == whole
    lengths = [score.acceptance.accept_length for score in scores]
    assert lengths[0] is not None and lengths[1] is not None
    assert lengths[0] > lengths[1] > 4


@pytest.mark.exhaustive
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Its table has what its JSON has."""
    flags = ["train", "evaluate", "--draft", str(bundled("draft")), "--device", "cpu"]
    flags += ["--data", "word-problems,maths", "--num-prompts", "2", "--max-new-tokens", "24"]
    assert run([*flags, "--dtype", "float32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [score["dataset"] for score in found["scores"]] == ["word-problems", "maths"]
    for score in found["scores"]:
        assert score["identical"] == score["prompts"] == 2
        assert score["speedup"] > 0 and score["accept_length"] >= 1
        shares = score["acceptance_per_position"]
        assert shares == sorted(shares, reverse=True)
    assert found["confidence"] is None
    assert run([*flags, "--dtype", "float32", "--accept-only"]) == 0
    text = capsys.readouterr().out
    for score in found["scores"]:
        row = next(line for line in text.splitlines() if score["dataset"] in line)
        assert re.findall(r"\d+\.\d\d", row) == [f"{score['accept_length']:.2f}"]
    assert "speed-up" not in text


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--num-prompts", "0"], "--num-prompts must be >= 1, got 0."),
        (["--temperatures", "hot"], "--temperatures must be numbers, '0,1', got 'hot'."),
        (["--temperatures", ","], "--temperatures must be numbers, '0,1', got ','."),
        (["--temperatures", "-1"], "temperature"),
        (["--speculative-algorithm", "NGRAM", "--data", ","], "--data names no dataset."),
        (["--target", "t"], "give --draft FOLDER, or --speculative-algorithm"),
        (["--draft", "/nowhere"], "/nowhere is not the folder of a draft"),
    ],
)
def test_the_command_refuses(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", "evaluate", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
