"""Prompts: the lengths that were asked for, the same for the same seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.core.errors import ConfigError
from forerun_bench.serving.config import LoadConfig
from forerun_bench.serving.dataset import Prompt, load_prompts
from forerun_bench.serving.vocabulary import Vocabulary
from tests.cli.support import PAIR, needs_pair


def no_vocabulary() -> Vocabulary:
    raise AssertionError("not needed")


def ids(count: int = 50) -> Vocabulary:
    return Vocabulary(tuple(range(count)))


@pytest.mark.parametrize("name", ["python", "word-problems"])
def test_bundled_prompts_need_no_tokenizer(name: str) -> None:
    config = LoadConfig(dataset_name=name, num_prompts=5, output_len=9)
    prompts = load_prompts(config, no_vocabulary)
    assert len(set(prompts)) == 5
    assert all(isinstance(p.content, str) and p.output_len == 9 for p in prompts)
    assert prompts == load_prompts(config, no_vocabulary)
    assert prompts != load_prompts(LoadConfig(dataset_name=name, num_prompts=5, seed=2), ids)
    many = load_prompts(LoadConfig(dataset_name=name, num_prompts=700), no_vocabulary)
    assert len(many) == 700 and len(set(many)) < 700  # they repeat


def test_random_prompts_have_the_lengths_of_the_range() -> None:
    config = LoadConfig(
        dataset_name="random", num_prompts=300,
        random_input_len=20, random_output_len=10, random_range_ratio=0.5,
    )  # fmt: skip
    prompts = load_prompts(config, ids)
    assert {len(p.content) for p in prompts} == set(range(10, 21))
    assert {p.output_len for p in prompts} == set(range(5, 11))
    assert {id for p in prompts for id in p.content} == set(range(50))
    assert prompts == load_prompts(config, ids)
    assert prompts != load_prompts(config, ids, run=1)  # a sweep must not hit the prefix cache


@pytest.mark.parametrize(("ratio", "least"), [(1.0, 6), (0.0, 1)])
def test_the_ends_of_the_range_ratio(ratio: float, least: int) -> None:
    config = LoadConfig(
        dataset_name="random", num_prompts=200, random_input_len=6, random_range_ratio=ratio
    )
    lengths = {len(p.content) for p in load_prompts(config, ids)}
    assert (min(lengths), max(lengths)) == (least, 6)


@needs_pair
def test_random_prompts_of_a_chat_are_text() -> None:
    config = LoadConfig(
        dataset_name="random", backend="openai-chat", num_prompts=2, random_input_len=8
    )
    for prompt in load_prompts(config, lambda: Vocabulary.load(str(PAIR / "target"))):
        assert isinstance(prompt.content, str)
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        load_prompts(config, ids)


@needs_pair
def test_a_vocabulary_has_no_special_tokens() -> None:
    vocabulary = Vocabulary.load(str(PAIR / "target"))
    assert vocabulary.tokenizer is not None
    special = vocabulary.tokenizer.get_added_tokens_decoder()
    assert special and not set(vocabulary.ids) & special.keys()
    assert vocabulary.count("def add(a, b):") > 2


def test_a_config_is_enough_for_ids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 11}')
    assert Vocabulary.load(str(tmp_path)).ids == tuple(range(11))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "There is no tokenizer at"),
        ({"config.json": "{}"}, "has no vocab_size"),
        ({"config.json": "[]"}, "has no vocab_size"),
        ({"config.json": "x"}, "has no vocab_size"),
        ({"tokenizer.json": "{}"}, "is not a tokenizer"),
    ],
)
def test_folders_without_a_vocabulary(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        Vocabulary.load(str(tmp_path))


def test_no_vocabulary_at_all() -> None:
    with pytest.raises(ConfigError, match="Give --tokenizer"):
        Vocabulary.load(None)
    with pytest.raises(ConfigError, match="There is no tokenizer at 'no/such'"):
        Vocabulary.load("no/such")


def sharegpt(tmp_path: Path, rows: Any) -> str:
    path = tmp_path / "share.json"
    path.write_text(rows if isinstance(rows, str) else json.dumps(rows), encoding="utf-8")
    return str(path)


def turns(*texts: Any, key: str = "value") -> list[dict[str, Any]]:
    return [{"from": "human" if i % 2 == 0 else "gpt", key: t} for i, t in enumerate(texts)]


def test_sharegpt_takes_first_question_and_answer(tmp_path: Path) -> None:
    rows = [
        {"conversations": turns("a b c", "x y", "later", "later")},
        {"conversation": turns("d e f", "x y z", key="content")},
        {"conversations": turns("alone")},
        {"conversations": turns("", "x y")},
        {"conversations": turns(None, "x y")},
        {"conversations": "text"},
        {},
    ]
    path = sharegpt(tmp_path, rows)
    config = LoadConfig(dataset_name="sharegpt", dataset_path=path, num_prompts=3, output_len=4)
    prompts = load_prompts(config, no_vocabulary)
    assert len(prompts) == 3  # two, and one of them again
    assert set(prompts) == {Prompt("a b c", 4), Prompt("d e f", 4)}


class Words(Vocabulary):
    def count(self, text: str) -> int:
        return len(text.split())


def test_sharegpt_answers_are_as_long_as_recorded(tmp_path: Path) -> None:
    rows = [
        {"conversations": turns("a b c", "x y z")},
        {"conversations": turns("a", "x y z")},  # too short
        {"conversations": turns("a b c d", "x")},  # too short
    ]
    config = LoadConfig(
        dataset_name="sharegpt", dataset_path=sharegpt(tmp_path, rows), num_prompts=3
    )
    assert load_prompts(config, lambda: Words(())) == [Prompt("a b c", 3)] * 3


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("{", "is not JSON"),
        ({"a": 1}, "must hold a JSON list"),
        ([1], "must hold a JSON list"),
        ([], "has no conversation"),
        ([{"conversations": turns("alone")}], "has no conversation"),
    ],
)
def test_files_that_are_not_sharegpts(tmp_path: Path, rows: Any, message: str) -> None:
    config = LoadConfig(
        dataset_name="sharegpt", dataset_path=sharegpt(tmp_path, rows), output_len=4
    )
    with pytest.raises(ConfigError, match=message):
        load_prompts(config, no_vocabulary)


def test_a_missing_file(tmp_path: Path) -> None:
    path = str(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="No such file"):
        load_prompts(LoadConfig(dataset_name="sharegpt", dataset_path=path), no_vocabulary)
