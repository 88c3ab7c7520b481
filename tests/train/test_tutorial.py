"""The commands of docs/train-a-draft.md run in order, in a folder of their own, in fewer steps."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.support import needs_pair
from tests.test_docs_blocks import BLOCKS

PAGE = "docs/train-a-draft.md"
SHORTER = {
    "forerun train prompts": "--count 400",
    "forerun train dflash": "--max-steps 90 --validate-every 90 --device cpu",
    "forerun train evaluate": "--num-prompts 8 --max-new-tokens 64 --json",
}


def commands() -> list[str]:
    chosen = [block for block in BLOCKS if block.page == PAGE and block.reason is None]
    return [line for block in chosen for line in block.lines]


def shortened(line: str) -> str:
    """With flags that come last and so replace the page's."""
    return " ".join([line, *(more for start, more in SHORTER.items() if line.startswith(start))])


@needs_pair
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_the_tutorial_makes_a_draft_that_serves(tmp_path: Path) -> None:
    lines = commands()
    kinds = [" ".join(line.split()[:3]) for line in lines]
    assert kinds[:4] == [
        f"forerun train {k}" for k in ("prompts", "regenerate", "dflash", "evaluate")
    ]
    assert set(SHORTER) <= set(kinds)
    printed = {}
    paths = os.pathsep.join(sys.path)
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    for line in lines:
        words = [sys.executable, "-m", *shlex.split(shortened(line))]
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (line, done.stdout[-2000:], done.stderr[-2000:])
        printed[" ".join(line.split()[:3])] = done.stdout
    scores = json.loads(printed["forerun train evaluate"])["scores"]
    assert [score["dataset"] for score in scores] == ["word-problems", "maths"]
    for score in scores:
        assert score["accept_length"] > 1.5
        assert score["identical"] == score["prompts"]
