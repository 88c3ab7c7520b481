"""Grade-school word problems with checkable answers, as the bundled target was trained on.

The first problems of the test seed ship as data. The generator of all others is part of the
training package (`training/` in the repository), which also wrote that file.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from importlib.resources import files
from typing import Final

from forerun.core.errors import ConfigError

TEST_SEEDS: Final = range(1_000_000, 2_000_000)
"""Seeds that training never uses."""
TEST_SEED: Final = TEST_SEEDS[0]
"""The seed of the published scores; training also leaves out each of its first questions."""

GENERATORS: Final = "forerun.word_problems"
"""Entry points: (seed, count) -> problems. The training package declares one."""

_ANSWER = re.compile(r"####\s*(-?\d+)")


@dataclass(frozen=True)
class Problem:
    question: str
    answer: int


def problems(count: int, seed: int = TEST_SEED) -> list[Problem]:
    """The first `count` problems of a seed.

    Raises:
        ConfigError: they do not ship, and the training package is not installed.
    """
    shipped = _shipped()
    if seed == TEST_SEED and count <= len(shipped):
        return list(shipped[:count])
    generators = entry_points(group=GENERATORS)
    if not generators:
        raise ConfigError(
            f"Only the first {len(shipped)} word problems of seed {TEST_SEED} ship with Forerun."
            " The generator of more is in the repository: pip install ./training."
        )
    generate = next(iter(generators)).load()
    return [Problem(p.question, p.answer) for p in generate(seed, count)]


def extract_answer(text: str) -> int | None:
    """The number after the last ``####``, or None."""
    found = _ANSWER.findall(text)
    return int(found[-1]) if found else None


@cache
def _shipped() -> tuple[Problem, ...]:
    text = (files("forerun.evals") / "data" / "word_problems.jsonl").read_text(encoding="utf-8")
    return tuple(Problem(**json.loads(line)) for line in text.splitlines())
