"""The generator of grade-school word problems with checkable answers.

The bundled target is trained on these and scored on seeds it has never seen. Pure Python,
deterministic: the same ``seed`` and position give the same problem on every machine.

    python -m forerun_train.toys.word_problems src/forerun/evals/data/word_problems.jsonl

writes the problems that ship with `forerun`.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forerun.evals.word_problems import TEST_SEED
from forerun_train.toys import word_templates_a, word_templates_b
from forerun_train.toys.word_text import Draw

TRAIN_SEEDS: Final = range(0, 1_000_000)
"""Seeds that training may use; `forerun.evals.word_problems.TEST_SEEDS` are the others."""
SHIPPED: Final = 1024
"""So many problems of the test seed ship with `forerun`."""

TEMPLATES: Final = (*word_templates_a.TEMPLATES, *word_templates_b.TEMPLATES)


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


def shipped_lines() -> Iterator[str]:
    """JSON lines of the problems that ship, without the worked answers."""
    for p in generate(TEST_SEED, SHIPPED):
        yield json.dumps({"question": p.question, "answer": p.answer})


def _one(rng: random.Random) -> Problem:
    question, lines, answer = rng.choice(TEMPLATES)(Draw(rng))
    return Problem(question, "\n".join([*lines, f"#### {answer}"]), answer)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("".join(f"{line}\n" for line in shipped_lines()))
