"""Compiling the CPU kernels: once, with the compiler that is there, or a reason why not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forerun.kernels.cpu import build
from forerun.kernels.cpu.build import CompileError, compile_library

# Writes its last argument's file; a line in the log for each call.
COMPILER = """#!/bin/sh
echo run >> "{log}"
while [ $# -gt 0 ]; do [ "$1" = -o ] && echo made > "$2"; shift; done
"""


def compiler(folder: Path, text: str) -> Path:
    path = folder / "compiler"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


def test_a_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("CXX", str(compiler(tmp_path, COMPILER.format(log=log))))
    first = compile_library(tmp_path)
    assert first.read_text() == "made\n"
    runs = len(log.read_text().splitlines())
    assert runs == len(build.sources()) + 1  # and the link
    assert compile_library(tmp_path) == first
    assert len(log.read_text().splitlines()) == runs
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset({"another_cpu"}))
    assert compile_library(tmp_path) != first


def test_a_failing_compiler_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = "#!/bin/sh\necho 'note' >&2\necho 'x.cpp:1: error: no such thing' >&2\nexit 1\n"
    monkeypatch.setenv("CXX", str(compiler(tmp_path, failing)))
    with pytest.raises(CompileError, match=r"failed: x\.cpp:1: error: no such thing"):
        compile_library(tmp_path)
    assert not list((tmp_path / "cpu-kernels").glob("*.so"))


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompileError, match=r"no C\+\+ compiler was found \(c\+\+, g\+\+, clang"):
        compile_library(tmp_path)


@pytest.mark.exhaustive
def test_text_without_a_compiler() -> None:
    """The engine's first command, on a machine that has none."""
    code = (
        "from forerun import LLM\n"
        "llm = LLM(dtype='float32', device='cpu')\n"
        "out = llm.generate('def add(a, b):', {'temperature': 0, 'max_new_tokens': 4})\n"
        "print(len(out.output_ids), llm.explain()['attention']['decode'].split(':')[0])\n"
    )
    environment = {"PATH": "/nonexistent", "PYTHONPATH": ":".join(sys.path), "HOME": "/nonexistent"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["4", "torch_native"]
