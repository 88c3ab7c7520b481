"""Grade-school word problems with checkable answers, generated without end.

The bundled target model is trained on these and scored on seeds it has never seen. Pure Python,
deterministic: the same ``seed`` and position give the same problem on every machine.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from forerun.evals import word_templates_a, word_templates_b
from forerun.evals.word_text import Draw

TRAIN_SEEDS: Final = range(0, 1_000_000)
"""Seeds that training may use."""
TEST_SEEDS: Final = range(1_000_000, 2_000_000)
"""Seeds that training never uses."""
TEST_SEED: Final = TEST_SEEDS[0]
"""The seed of the published scores.

Training also leaves out every exact question of its first problems.
"""

TEMPLATES: Final = (*word_templates_a.TEMPLATES, *word_templates_b.TEMPLATES)

_ANSWER = re.compile(r"####\s*(-?\d+)")


@dataclass(frozen=True)
class Problem:
    question: str
    answer_text: str
    answer: int


def stream(seed: int) -> Iterator[Problem]:
    """Problems of one seed, without end."""
    rng = random.Random(f"forerun word problems {seed}")
    while True:
        yield _one(rng)


def generate(seed: int, n: int) -> list[Problem]:
    """The first ``n`` problems of a seed."""
    problems = stream(seed)
    return [next(problems) for _ in range(n)]


def extract_answer(text: str) -> int | None:
    """The number after the last ``####``, or None where there is none."""
    found = _ANSWER.findall(text)
    return int(found[-1]) if found else None


def _one(rng: random.Random) -> Problem:
    question, lines, answer = rng.choice(TEMPLATES)(Draw(rng))
    return Problem(question, "\n".join([*lines, f"#### {answer}"]), answer)
