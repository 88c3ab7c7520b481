"""The generator: repeatable, right in every sum, test seeds that training cannot reach."""

from __future__ import annotations

import random
import re

import pytest

from forerun.evals.word_problems import (
    TEMPLATES,
    TEST_SEED,
    TEST_SEEDS,
    TRAIN_SEEDS,
    extract_answer,
    generate,
)
from forerun.evals.word_text import Draw, over, plus, times

_SUM = re.compile(r"[\d(][\d+\-*/() ]*(?:= [\d+\-*/() ]*\d)+")


def _value(expression: str) -> float:
    assert re.fullmatch(r"[\d+\-*/() ]+", expression)
    return float(eval(expression))  # digits and operators only


def test_same_seed_same_problems() -> None:
    assert generate(7, 50) == generate(7, 50)
    assert generate(7, 50)[:20] == generate(7, 20)
    assert generate(7, 20) != generate(8, 20)


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
