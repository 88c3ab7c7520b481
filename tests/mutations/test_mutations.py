"""Damaged checkpoints end in one line or in the right text (`python -m tests.mutations`: more)."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.llm.bundled import bundled
from tests.mutations.damage import damaged
from tests.mutations.outcome import completion, outcome, transformers_ids

SAMPLE, MORE = range(4), range(4, 60)


@pytest.fixture(scope="module")
def reference() -> tuple[int, ...]:
    return completion(bundled("target"), bundled("draft"))[1]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "seed", [*SAMPLE, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in MORE)]
)
def test_damage_is_refused_in_one_line_or_harmless(
    seed: int, reference: tuple[int, ...], tmp_path: Path
) -> None:
    damage = damaged(bundled("target").parent, tmp_path, seed)
    got = outcome(damage, reference, transformers_ids)
    assert got.kind != "wrong", f"{damage}: {got.detail}"


def test_a_number_draws_the_same_damage(tmp_path: Path) -> None:
    first, again = (damaged(bundled("target").parent, tmp_path / name, 7) for name in "ab")
    assert (first.part, first.file, first.what) == (again.part, again.file, again.what)
    file, other = (each.folder / each.part / each.file for each in (first, again))
    assert file.read_bytes() == other.read_bytes()
