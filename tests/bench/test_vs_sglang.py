"""The benchmark beside SGLang: command lines, the table, and what it says without SGLang."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from forerun_bench.serving.config import LoadConfig
from tests.scripts import BENCHMARKS, load_script

SCRIPT = BENCHMARKS / "vs_sglang.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(SCRIPT)


def test_without_sglang_it_says_how_to_get_it(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    command = [sys.executable, str(SCRIPT), "--model-path", "m", "--sglang-python", str(python)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stdout == ""
    assert "pip install sglang" in ended.stderr and str(python) in ended.stderr
    assert "--only-forerun" in ended.stderr


def test_both_servers_have_the_same_flags(script: ModuleType) -> None:
    given = script.arguments(
        ["--model-path", "m", "--sglang-flags", "--tp 1", "--", "--dtype", "bfloat16"]
    )
    forerun, sglang = (script.server_command(name, given, 7) for name in script.NAMES)
    assert forerun[:4] == [sys.executable, "-m", "forerun", "serve"]
    assert "sglang.launch_server" in sglang and sglang[-4:] == ["--tp", "1", "--dtype", "bfloat16"]
    assert [part for part in sglang[3:] if part not in ("--tp", "1")] == forerun[4:]


def test_the_client_knows_its_flags(script: ModuleType) -> None:
    given = script.arguments(["--model-path", "m"])
    for load in script.loads(given):
        command = script.client_command("http://x", load, given)
        names = {part[2:].replace("-", "_") for part in command if part.startswith("--")}
        assert names - {"json"} <= set(LoadConfig.__dataclass_fields__)


def test_the_table_has_both(script: ModuleType) -> None:
    result = dict(zip(script.COLUMNS, (1234.5, 20.04, 31.0, 5.0, 9.99), strict=True))
    lines = script.table({"256 at once": {"Forerun": result, "SGLang": result}}).splitlines()
    assert lines[2] == (
        "| 256 at once | 1,234 / 1,234 | 20.0, 31 / 20.0, 31 | 5.0, 10.0 / 5.0, 10.0 |"
    )
