"""Compiling the CPU kernels: once, with the compiler that is there, or a reason why not."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from forerun.kernels.cpu import build, library
from forerun.kernels.cpu.build import CompileError, compile_library
from tests.kernels.cpu_levels import LEVELS, runs_here

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


def test_a_library_per_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    text = COMPILER.format(log=log).replace("echo run", 'echo "$@"')
    monkeypatch.setenv("CXX", str(compiler(tmp_path, text)))
    native, other = (compile_library(tmp_path, target) for target in (None, ("-march=some",)))
    assert native != other
    assert compile_library(tmp_path, ("-march=some",)) == other
    compiles = [line for line in log.read_text().splitlines() if " -c " in line]
    assert sum("-march=some" in line for line in compiles) == len(compiles) / 2
    assert all("-ffp-contract=off" in line for line in compiles)


def compile_all(command: list[str], folder: Path) -> None:
    """Every source: quickly, with warnings as errors."""
    for source in build.sources():
        target = str(folder / "object.o")
        more = ["-O0", "-Werror", "-Wno-psabi", "-c", str(source), "-o", target]
        run = subprocess.run([*command, *build.FLAGS, *more], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr


# Levels that this CPU cannot run, and CPUs with instructions that only some of a level have.
COMPILED = {name: flags for name, (flags, _) in LEVELS.items() if not runs_here(name)}
COMPILED |= {name: (f"-march={name}",) for name in ("alderlake", "sapphirerapids")}


@pytest.mark.exhaustive
@pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")
@pytest.mark.skipif(build.platform.machine() != "x86_64", reason="flags of x86-64")
@pytest.mark.parametrize("target", COMPILED)
def test_other_x86_cpus_are_compiled_for(target: str, tmp_path: Path) -> None:
    compile_all([build.find_compiler() or "", *COMPILED[target]], tmp_path)


def arm_compiler() -> list[str] | None:
    """A cross compiler for Arm: GCC's, or the Clang that the package `ziglang` brings."""
    if gcc := shutil.which("aarch64-linux-gnu-g++"):
        return [gcc]
    if importlib.util.find_spec("ziglang") is None:
        return None
    return [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-gnu"]


@pytest.mark.exhaustive
@pytest.mark.skipif(arm_compiler() is None, reason="no cross compiler for Arm (pip: ziglang)")
@pytest.mark.parametrize("dot_product", [False, True])
def test_arm_is_compiled_for(dot_product: bool, tmp_path: Path) -> None:
    command = arm_compiler() or []
    if command[0] == sys.executable:
        flags = [f"-mcpu=generic{'+dotprod' * dot_product}"]
    else:
        flags = [f"-march=armv8.2-a{'+dotprod' * dot_product}"]
    compile_all([*command, *flags], tmp_path)


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
