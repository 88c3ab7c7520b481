"""Compiles the C++ kernels for CPUs when they are first used, and caches the library on disk.

The compiler is the system's. What is compiled depends on the CPU (`-march=native`), so the cache
key has the CPU besides sources, flags and compiler. Nothing of PyTorch is included, and calls go
through ctypes, so that compiling takes a few seconds and needs no headers but the compiler's own.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from forerun.platform import cache
from forerun.platform.device import cpu_flags
from forerun.platform.progress import progress

FOLDER = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-pthread", "-Wall",
    "-ffp-contract=off",  # vec.h says why
    "-fvisibility=hidden",  # else two of these libraries in a process would share static variables
)  # fmt: skip
SECONDS = 300  # that a compiler may take


class CompileError(RuntimeError):
    """There is no C++ compiler, or it fails."""


def find_compiler() -> str | None:
    """The compiler that CXX names, else the first on PATH."""
    named = os.environ.get("CXX")
    candidates = (named,) if named else COMPILERS
    found = (path for name in candidates if (path := shutil.which(name)))
    return next((path for path in found if not _only_asks(path)), None)


def _only_asks(compiler: str) -> bool:
    """Whether this is macOS's /usr/bin/c++ without the command line tools: it opens a dialog."""
    if platform.system() != "Darwin" or not compiler.startswith("/usr/bin/"):
        return False
    return subprocess.run(["xcode-select", "-p"], capture_output=True).returncode != 0


def cache_folder() -> Path:
    """Returns where compiled libraries are kept.

    Raises:
        CompileError: the user has no home directory.
    """
    try:
        return cache.cache_folder()
    except OSError as error:
        raise CompileError(str(error)) from None


def native_flag(machine: str) -> str:
    """The flag that compiles for this CPU; GCC and Clang spell it by architecture."""
    return "-mcpu=native" if machine in ("aarch64", "arm64") else "-march=native"


def compile_library(cache: Path | None = None, target: tuple[str, ...] | None = None) -> Path:
    """The shared library for this CPU, from the cache if it is there.

    Args:
        cache: default: `cache_folder()`.
        target: flags that choose instructions, default: those for this CPU.

    Raises:
        CompileError: with a one-line reason.
        OSError: the cache cannot be written.
    """
    compiler = find_compiler()
    if compiler is None:
        wanted = os.environ.get("CXX") or ", ".join(COMPILERS)
        raise CompileError(f"no C++ compiler was found ({wanted}); install one or set CXX")
    folder = (cache or cache_folder()) / "cpu-kernels"
    folder.mkdir(parents=True, exist_ok=True)
    flags = [*FLAGS, *(target or (native_flag(platform.machine()),))]
    library = folder / f"{_key(compiler, flags)}.so"
    if library.exists():
        return library
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed: other processes wait, then find it
        if not library.exists():
            with progress("compiling CPU kernels, once for this machine"):
                _compile(compiler, flags, library)
    return library


def sources() -> list[Path]:
    return sorted(FOLDER.glob("*.cpp"))


def _key(compiler: str, flags: list[str]) -> str:
    """A hash of all that the library depends on."""
    binary = Path(compiler).resolve().stat()
    files = sorted((*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h")))
    parts = [path.read_text(encoding="utf-8") for path in files]
    parts += [compiler, str(binary.st_size), str(binary.st_mtime_ns), *flags]
    parts += [platform.machine(), platform.processor(), *sorted(cpu_flags())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _compile(compiler: str, flags: list[str], library: Path) -> None:
    """Compiles the sources side by side, links them and moves the library into place."""
    with tempfile.TemporaryDirectory(dir=library.parent) as name:
        folder = Path(name)
        objects = [folder / f"{source.stem}.o" for source in sources()]
        running = [
            subprocess.Popen(
                [compiler, *flags, "-c", str(source), "-o", str(target)],
                stderr=subprocess.PIPE,
                text=True,
            )
            for source, target in zip(sources(), objects, strict=True)
        ]
        _wait_for(running)
        linked = folder / "library.so"
        link = [compiler, "-shared", "-pthread", *map(str, objects), "-o", str(linked)]
        _wait_for([subprocess.Popen(link, stderr=subprocess.PIPE, text=True)])
        os.replace(linked, library)


def _wait_for(processes: list[subprocess.Popen[str]]) -> None:
    """Raises CompileError if one of them fails or takes too long; none is left running."""
    logs = []
    try:
        logs = [process.communicate(timeout=SECONDS)[1] for process in processes]
    except subprocess.TimeoutExpired:
        raise CompileError(f"the C++ compiler took more than {SECONDS} s") from None
    finally:
        for process in processes[len(logs) :]:
            process.kill()
            process.wait()
    for process, log in zip(processes, logs, strict=True):
        if process.returncode != 0:
            lines = log.splitlines() or ["no reason given"]
            error = next((line for line in lines if "error" in line), lines[0])
            raise CompileError(f"the C++ compiler failed: {error.strip()}")
