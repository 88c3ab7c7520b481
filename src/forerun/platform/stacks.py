"""Where processes hang: each writes its stacks to a file when it is asked by a signal.

The handler is C code, so it also works for a process that waits in native code or holds Python's
lock. A stopped process has to be continued for it.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from pathlib import Path

FOLDER_VARIABLE = "FORERUN_STACKS"  # set by `offer_stacks`, for the processes that it starts
WRITING_SECONDS = 1.0  # until a process has written its stacks, or never will
LOOK_SECONDS = 0.02


def offer_stacks(folder: Path | None = None) -> None:
    """Lets `where_it_hangs` show the stacks of this process from now on.

    Args:
        folder: only this user may enter it; None: that of the process which started this one, if
            it had one.
    """
    if folder is not None:
        os.environ[FOLDER_VARIABLE] = str(folder)
    elif FOLDER_VARIABLE not in os.environ:
        return
    file = _file(os.getpid(), Path(os.environ[FOLDER_VARIABLE])).open("w")
    faulthandler.register(signal.SIGUSR2, file)  # which keeps the file open


def where_it_hangs(pid: int, folder: Path | None = None) -> list[str]:
    """What is known of a process and of those that it has started: a text for each.

    It may continue stopped processes: they are to be killed afterwards.

    Args:
        folder: where they offer their stacks; None: where this process does.
    """
    folder = folder or Path(os.environ.get(FOLDER_VARIABLE, os.devnull))
    return [_describe(each, folder) for each in (pid, *_descendants(pid))]


def _describe(pid: int, folder: Path) -> str:
    status = _read(Path(f"/proc/{pid}/status"))
    state = re.search(r"^State:\s*(.+)$", status, re.MULTILINE)
    waits_in = _read(Path(f"/proc/{pid}/wchan"))
    lines = [f"process {pid}, state {state[1] if state else 'unknown'}"]
    if waits_in not in ("", "0"):
        lines[0] += f", in the kernel's {waits_in}"
    kernel = _read(Path(f"/proc/{pid}/stack")).strip()  # for root only
    lines += [f"Stack in the kernel:\n{kernel}"] if kernel else []
    return "\n".join([*lines, _stacks(pid, folder) or "It has written no Python stacks."])


def _stacks(pid: int, folder: Path) -> str:
    file = _file(pid, folder)
    if not file.exists():  # the signal would end the process
        return ""
    try:
        os.kill(pid, signal.SIGUSR2)
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return ""
    end, text = time.monotonic() + WRITING_SECONDS, ""
    while time.monotonic() < end:
        time.sleep(LOOK_SECONDS)
        before, text = text, _read(file)
        if text and text == before:
            break
    return text.strip()


def _descendants(pid: int) -> list[int]:
    """Linux; elsewhere none are known."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, _read(children).split()):
            found += [child, *_descendants(child)]
    return found


def _file(pid: int, folder: Path) -> Path:
    return folder / f"{pid}.stacks"


def _read(file: Path) -> str:
    """Empty if there is no such file, or not for this user."""
    try:
        return file.read_text(errors="replace").strip("\0")
    except OSError:
        return ""
