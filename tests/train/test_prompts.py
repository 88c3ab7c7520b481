"""Generated prompts: the same for a seed, diverse, and disjoint between the splits."""

from __future__ import annotations

import ast
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from forerun.core.errors import ConfigError
from forerun.main import run
from forerun_train.prompts import HELD_OUT, TOPICS, TRAIN, generate
from forerun_train.prompts.draw import SHARED, WORDS, Draw
from forerun_train.prompts.sources import (
    Sources,
    functions_of,
    is_held_out,
    module_files,
    parts,
)

SLOT = re.compile(r"\{\w+(:\d+-\d+)?\}")


def texts(split: str, count: int, seed: int = 0, topics: tuple[str, ...] = TOPICS) -> list[str]:
    found = generate(topics, count, seed, split)
    return ["\n".join(m["content"] for m in line["messages"]) for line in found]


def test_a_seed_fixes_the_prompts() -> None:
    made = ("dialogue", "maths", "instructions")
    assert list(generate(made, 40, 3, TRAIN)) == list(generate(made, 40, 3, TRAIN))
    assert texts(TRAIN, 40, 3, made) != texts(TRAIN, 40, 4, made)


@pytest.mark.exhaustive
def test_a_seed_fixes_what_is_read() -> None:
    read = ("code", "summary")
    assert list(generate(read, 20, 3, TRAIN)) == list(generate(read, 20, 3, TRAIN))


@pytest.mark.exhaustive
@pytest.mark.parametrize("split", [TRAIN, HELD_OUT])
def test_prompts_are_whole_and_different(split: str) -> None:
    lines = list(generate(TOPICS, 500, 0, split))
    assert Counter(line["topic"] for line in lines) == dict.fromkeys(TOPICS, 100)
    assert len({line["id"] for line in lines}) == 500
    found = ["\n".join(m["content"] for m in line["messages"]) for line in lines]
    assert len(set(found)) == 500
    assert all(10 <= len(text) <= 2700 for text in found)
    made = [
        t for t, line in zip(found, lines, strict=True) if line["topic"] not in ("code", "summary")
    ]
    assert not any(SLOT.search(text) for text in made)
    assert len({text[:25] for text in made}) > 150
    assert all(m["role"] == "user" and m["content"].strip() for x in lines for m in x["messages"])
    assert any(len(line["messages"]) > 1 for line in lines)


def test_the_splits_share_no_prompt() -> None:
    """Nor a word of the lists, where these are not very short."""
    for seed in range(3):
        assert not set(texts(TRAIN, 300, seed, ("maths",))) & set(
            texts(HELD_OUT, 300, seed + 1, ("maths",))
        )
    for kind, words in WORDS.items():
        if kind in SHARED:
            continue
        sides = [
            {Draw(random.Random(i), held_out).one(words) for i in range(1000)}
            for held_out in (False, True)
        ]
        assert not sides[0] & sides[1]
        assert sides[0] | sides[1] == set(words)
        assert len(sides[1]) >= 3


@pytest.mark.exhaustive
def test_the_splits_share_no_module() -> None:
    for held_out in (False, True):
        sources = Sources(held_out, 0)
        rng = random.Random(0)
        modules = {sources.function(rng).module for _ in range(50)}
        modules |= {sources.text(rng).module for _ in range(50)}
        assert len(modules) > 10
        assert {is_held_out(module) for module in modules} == {held_out}
    share = sum(is_held_out(module) for module, _ in module_files()) / len(module_files())
    assert 0.08 < share < 0.25


CODE = '''
class A:
    def area(self, a: int,
             b: int) -> int:
        """The area of a rectangle.

        More about it.
        """
        # the product
        return a * b  # in square metres, whatever the units of the sides may be

    def bare(self):
        return 1

    def _only(self):
        """A docstring and nothing else, so that there is no code to ask about at all."""
'''


def test_functions_are_cut_out_whole() -> None:
    (found,) = functions_of("m", ast.parse(CODE), CODE)
    assert (found.name, found.purpose) == ("area", "The area of a rectangle.")
    assert found.signature == "def area(self, a: int,\n         b: int) -> int:"
    for source in (found.source, found.bare):
        (node,) = ast.parse(source).body
        assert isinstance(node, ast.FunctionDef)
    assert "rectangle" in found.source and "rectangle" not in found.bare
    assert "a * b" in found.bare


def test_paragraphs_are_prose() -> None:
    prose = "This sentence is about nothing, but it is long enough to be a part of one. " * 2
    text = f"{prose}\n\n{prose}\n\n>>> f(1)\n1\n\nx : int\n    A number.\n\n{prose * 2}\n\nshort"
    assert len(list(parts(text))) == 2
    for part in parts(text):
        assert ">>>" not in part and "x : int" not in part
        assert 240 <= len(part) <= 2400


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "folder" / "p.jsonl"
    flags = ["--output", str(output), "--count", "9", "--topics", "maths,dialogue"]
    assert run(["train", "prompts", *flags]) == 0
    assert "5 maths, 4 dialogue" in capsys.readouterr().err.replace("\n", " ")
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert lines == list(generate(["maths", "dialogue"], 9, 0, TRAIN))
    for wrong, message in (
        (["--topics", "math"], "unknown topic 'math'. Did you mean 'maths'? Known: dialogue,"),
        (["--split", "test"], "unknown split 'test'"),
        (["--count", "0"], "count must be at least 1"),
    ):
        assert run(["train", "prompts", *flags, *wrong]) == 2
        assert message in capsys.readouterr().err


def test_there_are_not_endlessly_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun_train.prompts.dialogue", lambda draw: ["Always the same text."])
    with pytest.raises(ConfigError, match="topic dialogue has no more than about"):
        list(generate(["dialogue"], 5, 0, TRAIN))
        list(generate(["dialogue"], 5, 0, HELD_OUT))
