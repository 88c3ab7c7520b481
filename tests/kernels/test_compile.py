"""Every Triton kernel compiles ahead of time for every target; `compiled.py` says what is checked.

To add kernels, add `cases_FAMILY.py` to this folder, with a list `CASES` of `Case`.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.compiled import TARGETS

pytest.importorskip("triton")

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "src" / "forerun"
FAMILIES = sorted(path.stem.removeprefix("cases_") for path in HERE.glob("cases_*.py"))
LARGE = ("moe", "attention", "gemm")  # families that take minutes: a process per target
PARTS = [family for family in FAMILIES if family not in LARGE]
PARTS += [f"{family}:{target}" for family in LARGE for target in TARGETS]


def test_every_launched_kernel_has_a_case() -> None:
    launched = {
        name
        for path in PACKAGE.rglob("*.py")
        if "kernels.runtime.jit" in path.read_text() and path.name != "jit.py"
        for name in re.findall(r"^ +(\w+)\[.*\]\(", path.read_text(), re.MULTILINE)
    }
    assert len(launched) >= 30
    cases = "".join(path.read_text() for path in HERE.glob("cases_*.py"))
    assert [name for name in sorted(launched) if not re.search(rf"\b{name}\b", cases)] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_cases(family: str) -> None:
    """What the exhaustive test below imports is there."""
    assert importlib.import_module(f"tests.kernels.cases_{family}").CASES


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", PARTS)
def test_compiles_for_every_target(part: str) -> None:
    check(part)


def check(*families: str) -> None:
    """In one process, because each has to import torch and Triton."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiled", *families],
        cwd=HERE.parent.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    facts = [json.loads(line) for line in result.stdout.splitlines()]
    found = {fact["family"] for fact in facts}
    assert found == {name.partition(":")[0] for name in families}, "a file has no cases"
    assert [problem for fact in facts for problem in fact["problems"]] == []
    groups: dict[tuple[str, str], set[str]] = {}
    for fact in facts:
        groups.setdefault((fact["alike"], fact["target"]), set()).update(fact["layouts"])
    assert {group: layouts for group, layouts in groups.items() if len(layouts) > 1} == {}
