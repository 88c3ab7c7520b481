"""What is said of a process that hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.platform.stacks import FOLDER_VARIABLE, where_it_hangs

CHILD = """
import subprocess, sys, time
from pathlib import Path
from forerun.platform.stacks import offer_stacks
offer_stacks(Path(sys.argv[1]))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
def a_step_that_never_ends():
    print("hangs", flush=True)
    time.sleep(60)
a_step_that_never_ends()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stopped_process_is_described_with_its_children(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "hangs\n"
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        own, child = where_it_hangs(process.pid, tmp_path)
        assert own.startswith(f"process {process.pid}, state T (stopped)")
        assert "in a_step_that_never_ends" in own
        assert "no Python stacks" in child  # it offers none: the signal would have ended it
        assert process.poll() is None
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert "state unknown" in where_it_hangs(process.pid, tmp_path)[0]


def test_without_a_folder_nothing_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal would still end the process, so it is not sent."""
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    assert "no Python stacks" in where_it_hangs(os.getpid())[0]
