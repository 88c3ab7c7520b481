"""Calls in new processes that have loaded torch, but nothing that reads the environment.

One process loads torch, which takes seconds, and is forked for each call.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from typing import Any

SECONDS = 240
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["forerun.main", "forerun.llm.llm"])


def call(env: dict[str, str], function: Callable[..., Any], *args: Any) -> CompletedProcess[str]:
    """Exit code and output of `sys.exit(function(*args))` with the environment `env`."""
    with TemporaryDirectory() as folder:
        paths = Path(folder) / "out", Path(folder) / "err"
        process = CONTEXT.Process(target=_child, args=(env, *paths, function, args))
        process.start()
        process.join(SECONDS)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"{function.__name__}{args} takes longer than {SECONDS} s")
        out, err = (path.read_text() for path in paths)
        return CompletedProcess(args, process.exitcode, out, err)


def _child(
    env: dict[str, str], out: Path, err: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    assert "huggingface_hub" not in sys.modules
    os.environ.clear()
    os.environ.update(env)
    for number, path in ((1, out), (2, err)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    sys.exit(function(*args))
