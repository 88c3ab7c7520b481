"""Compiling the CPU kernels: once, with the compiler that is there, or a reason why not."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from forerun.kernels.cpu import build, library
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


def test_a_compiler_that_macos_only_offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (stub := tmp_path / "xcode-select").write_text("#!/bin/sh\nexit 2\n", encoding="utf-8")
    stub.chmod(0o755)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert build.find_compiler() == "/usr/bin/c++"
    monkeypatch.setattr(build.platform, "system", lambda: "Darwin")
    assert build.find_compiler() is None
    stub.write_text("#!/bin/sh\nexit 0\n", encoding="utf-8")
    assert build.find_compiler() == "/usr/bin/c++"


def test_without_a_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(build.Path, "home", nobody)
    with pytest.raises(CompileError, match="no home directory for the cache; set XDG_CACHE_HOME"):
        compile_library()


def test_one_warning_says_why_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (not_a_folder := tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(not_a_folder))
    monkeypatch.setenv("CXX", str(compiler(tmp_path, "#!/bin/sh\nexit 1\n")))
    monkeypatch.setattr(library, "compiled", cache(library.compiled.__wrapped__))
    monkeypatch.setattr(library, "_load", library.compiled)
    for _ in range(2):
        assert library.library() is None
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "set XDG_CACHE_HOME" in record.getMessage()
    assert library.why_missing() in record.getMessage()


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
