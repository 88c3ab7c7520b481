"""Code blocks of the README and docs/ run, as a reader would run them.

A block that cannot run says why in a comment before it: `<!-- not run: REASON -->`. Blocks with
the name of a file are held by `examples/test_guide.py`, `console` blocks by `test_docs.py`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cli.support import needs_pair
from tests.server.support import LiveServer

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?```(?P<kind>python|bash|sh)(?P<name>[^\n]*)\n"
    r"(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
URL = "http://127.0.0.1:30000"  # of the server in the documentation


@dataclass(frozen=True)
class Block:
    """Of a page, from line `line` on; `reason`: why it is not run."""

    page: str
    line: int
    kind: str
    text: str
    reason: str | None

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def lines(self) -> list[str]:
        """Of a block of commands: each whole, without comments."""
        text = re.sub(r"<<'END'\n.*?\nEND$", "<<'END'", self.text, flags=re.DOTALL | re.MULTILINE)
        text = text.replace("\\\n", " ")
        whole = re.sub(r"'\{\n.*?\}'", lambda m: m[0].replace("\n", " "), text, flags=re.DOTALL)
        return [line for line in whole.splitlines() if line.strip()]


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            if not match["name"].strip():
                line = text.count("\n", 0, match.start("kind")) + 1
                name = page.relative_to(ROOT).as_posix()
                yield Block(name, line, match["kind"], match["text"], match["reason"])


BLOCKS = list(blocks())
PYTHON = [block for block in BLOCKS if block.kind == "python"]
# Smaller than in the documentation: the same command within seconds.
SMALLER = {"forerun eval word-problems": "--num-examples 2 --max-new-tokens 8"}
LEFT_OUT = {
    "Qwen/": "downloads a model",
    "--preset qwen3-8b  ": "16 GB of random weights",
    "forerun train ": "tests/train/test_tutorial.py, in order and in a folder",
    "--speculative-draft-model-path run/draft": "the tutorial's draft, there too",
    "forerun bench one-batch --batch-size": "a minute; tests/bench/test_cli_measure.py",
    "forerun bench http": "a minute; tests/server/test_bench_http.py",
    "forerun bench serving": "tests/bench/serving loads a server",
    "forerun serve": "the server that the blocks run with",
    "requests.jsonl": "`test_a_batch_runs`, in a folder of its own",
}
COMMANDS = [
    line
    for block in BLOCKS
    if block.kind != "python" and block.reason is None
    for line in block.lines
    if not any(part in line for part in LEFT_OUT)
]


def test_blocks_are_found() -> None:
    fences = sum(
        len(re.findall(r"^```(?:python|bash|sh)\n", page.read_text(encoding="utf-8"), re.MULTILINE))
        for page in PAGES
    )
    assert len(BLOCKS) == fences > 20


@pytest.mark.parametrize(
    "block",
    [b for b in PYTHON if not re.match("an (outline|excerpt)", b.reason or "")],
    ids=lambda block: block.name,
)
def test_names_are_imported(block: Block) -> None:
    """Nothing is missing to copy them, also where they are not run."""
    before = [b.text for b in PYTHON if b.page == block.page and b.line < block.line]
    own = block.text if "import" in block.text else "".join([*before, block.text])
    check = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E9,F821", "-"]
    done = subprocess.run(check, input=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer("--speculative-algorithm", "DFLASH", "--max-total-tokens", "16384") as live:
        yield live


@needs_pair
@pytest.mark.exhaustive
@pytest.mark.parametrize("page", dict.fromkeys(b.page for b in PYTHON if b.reason is None))
def test_python_runs(page: str, request: pytest.FixtureRequest) -> None:
    """The blocks of a page, in order: later ones use what earlier ones have defined."""
    defined: dict[str, Any] = {"__name__": "docs"}
    for block in (b for b in PYTHON if b.page == page and b.reason is None):
        text = block.text
        if page == "docs/server.md":
            text = text.replace(URL, request.getfixturevalue("server").url)
        exec(compile(text, block.name, "exec"), defined)


@needs_pair
@pytest.mark.exhaustive
@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: line.partition("#")[0][:50].strip())
def test_commands_run(line: str, request: pytest.FixtureRequest) -> None:
    for start, settings in SMALLER.items():
        if line.startswith(start):
            line = f"{line.partition('#')[0]} {settings}"
    if URL in line:
        line = line.replace(URL, request.getfixturevalue("server").url) + " --fail-with-body"
    command = line.replace("forerun ", f"{shlex.quote(sys.executable)} -m forerun ", 1)
    done = subprocess.run(
        command,
        shell=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_pair
@pytest.mark.exhaustive
def test_a_batch_runs(tmp_path: Path) -> None:
    (block,) = (block for block in BLOCKS if "> requests.jsonl" in block.text)
    done = subprocess.run(
        block.text.replace("\nforerun ", f"\n{shlex.quote(sys.executable)} -m forerun "),
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    results = {each["custom_id"]: each for each in map(json.loads, lines)}
    assert set(results) == {"a", "b"}
    assert all(each["error"] is None for each in results.values())
    assert all(each["response"]["status_code"] == 200 for each in results.values())
