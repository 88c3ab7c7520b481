"""Signals of a terminal and the processes that are started from it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_ctrl_c() -> Iterator[None]:
    """Processes started in the block never see SIGINT, from their first instruction on.

    Ctrl-C in a terminal reaches all processes; what becomes of these, their parent decides.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
