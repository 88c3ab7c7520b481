"""Processes that answer questions, where their parent ends before them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

CHILD = """
    import time
    from pathlib import Path
    from forerun.platform.limited_process import serve

    def answer(message: bytes) -> bytes:
        if message:
            Path({begun!r}).touch()
            time.sleep(60)
        return message

    serve(answer, 1 << 30, Path({cleared!r}).touch)
"""
PARENT = """
    import os, threading, time
    from forerun.platform.limited_process import LimitedProcess

    process = LimitedProcess({child!r})
    threading.Thread(target=process.ask, args=(b"x", 60.0), daemon=True).start()
    while not os.path.exists({begun!r}):
        time.sleep(0.02)
    os.kill(os.getpid(), 9)
"""


def test_a_busy_process_whose_parent_was_killed_clears_up(tmp_path: Path) -> None:
    child, begun, cleared = (str(tmp_path / name) for name in ("child.py", "begun", "cleared"))
    Path(child).write_text(textwrap.dedent(CHILD).format(begun=begun, cleared=cleared))
    parent = textwrap.dedent(PARENT).format(child=child, begun=begun)
    assert subprocess.run([sys.executable, "-c", parent], timeout=60).returncode == -9
    end = time.monotonic() + 30
    while not Path(cleared).exists():
        assert time.monotonic() < end, "it does not see that its parent is gone"
        time.sleep(0.05)
