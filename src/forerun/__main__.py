"""The `forerun` command, and `python -m forerun` where the script is not installed.

Little is imported before Ctrl-C is taken care of.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False

if TYPE_CHECKING:
    from types import FrameType


def main() -> None:
    """The console script."""
    signal.signal(signal.SIGINT, on_ctrl_c)
    from forerun.main import main as run

    run()


def on_ctrl_c(number: int, frame: FrameType | None) -> None:
    """Ends the process at once while a module is imported: there C code may swallow an exception,
    and one that is not swallowed leaves half a module.

    Raises:
        KeyboardInterrupt: elsewhere.
    """
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":  # not in a spawned process, which imports this file again
    main()
