"""The generator: repeatable, right in every sum, test seeds that training cannot reach."""

from __future__ import annotations

import random
import re
import tomllib
from importlib.metadata import EntryPoint
from importlib.resources import files
from pathlib import Path

import pytest

from forerun.core.errors import ConfigError
from forerun.evals import word_problems
from forerun.evals.prompts import word_prompts
from forerun.evals.word_problems import (
    GENERATORS,
    TEST_SEED,
    TEST_SEEDS,
    extract_answer,
    problems,
)
from forerun_train.toys.word_problems import (
    SHIPPED,
    TEMPLATES,
    TRAIN_SEEDS,
    generate,
    shipped_lines,
)
from forerun_train.toys.word_text import Draw, over, plus, times

ROOT = Path(__file__).resolve().parent.parent.parent
_SUM = re.compile(r"[\d(][\d+\-*/() ]*(?:= [\d+\-*/() ]*\d)+")


def _value(expression: str) -> float:
    assert re.fullmatch(r"[\d+\-*/() ]+", expression)
    return float(eval(expression))  # digits and operators only


def test_same_seed_same_problems() -> None:
    assert generate(7, 50) == generate(7, 50)
    assert generate(7, 50)[:20] == generate(7, 20)
    assert generate(7, 20) != generate(8, 20)


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("template", TEMPLATES, ids=lambda t: t.__name__)
def test_every_sum_of_every_template_is_right(template) -> None:  # type: ignore[no-untyped-def]
    rng = random.Random(5)
    for _ in range(200):
        question, lines, answer = template(Draw(rng))
        sums = _SUM.findall("\n".join(lines))
        assert sums, lines
        for chain in sums:
            assert len({_value(part) for part in chain.split("=")}) == 1, chain
        assert any(_value(chain.split("=")[-1]) == answer for chain in sums), (lines, answer)
        assert re.search(rf"\b{answer}\b", lines[-1]), (lines, answer)
        assert answer > 0
        assert question.endswith("?")
        assert "  " not in question


def test_enough_templates() -> None:
    assert len(TEMPLATES) >= 25
    assert len({t.__name__ for t in TEMPLATES}) == len(TEMPLATES)


def test_test_seeds_are_apart() -> None:
    assert TEST_SEED in TEST_SEEDS
    assert not set(TRAIN_SEEDS) & set(TEST_SEEDS)
    trained = {p.question for seed in range(3) for p in generate(seed, 3000)}
    test = [p.question for p in generate(TEST_SEED, 1000)]
    assert sum(q in trained for q in test) < 30


def test_answers_can_be_read_back() -> None:
    for p in generate(TEST_SEED, 200):
        assert extract_answer(p.answer_text) == p.answer
    assert extract_answer("no number") is None
    assert extract_answer("#### 3\n#### -12") == -12


def test_sums_are_written_in_small_steps() -> None:
    assert plus(3, 4, 5) == "3 + 4 + 5 = 7 + 5 = 12"
    assert times(24, 7) == "24 * 7 = 20 * 7 + 4 * 7 = 140 + 28 = 168"
    assert times(7, 12) == "7 * 12 = 84"
    assert over(96, 4) == "96 / 4 = 80 / 4 + 16 / 4 = 20 + 4 = 24"
    with pytest.raises(ValueError, match="whole"):
        over(7, 2)


def test_the_shipped_problems_are_the_generators() -> None:
    data = files("forerun.evals") / "data" / "word_problems.jsonl"
    assert data.read_text(encoding="utf-8").splitlines() == list(shipped_lines())
    expected = [(p.question, p.answer) for p in generate(TEST_SEED, SHIPPED)]
    assert [(p.question, p.answer) for p in problems(SHIPPED)] == expected
    assert problems(3) == problems(SHIPPED)[:3]


@pytest.mark.parametrize(("count", "seed"), [(SHIPPED + 5, TEST_SEED), (4, TEST_SEED + 1)])
def test_other_problems_need_the_generator(
    count: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = ROOT / "training" / "pyproject.toml"
    points = tomllib.loads(declared.read_text(encoding="utf-8"))["project"]["entry-points"]
    ((name, target),) = points[GENERATORS].items()
    found = [EntryPoint(name, target, GENERATORS)]
    monkeypatch.setattr(word_problems, "entry_points", lambda group: found)
    made = problems(count, seed)
    assert [p.answer for p in made] == [p.answer for p in generate(seed, count)]
    found.clear()  # the training package is not installed
    with pytest.raises(ConfigError, match=r"^Only the first 1024 .* pip install \./training"):
        problems(count, seed)
    assert len(problems(SHIPPED)) == SHIPPED  # without it


def test_trained_seeds_are_refused() -> None:
    with pytest.raises(ConfigError, match="may have been trained on"):
        word_prompts(lambda text: [1], 2, seed=TRAIN_SEEDS[7])
