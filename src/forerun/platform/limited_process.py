"""Child processes that answer questions, have limits, and can be ended.

What may take any time or memory, and cannot be interrupted, runs in one: it is a Python file that
is started by its path and ends with `serve(answer)`. Of Forerun it imports this module only, so
that it is there at once. Both sides send bytes over a socket; if one ends, so does the other.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

START_SECONDS = 60.0  # until a process that does not start is given up
PARENT_SECONDS = 0.5  # between two looks whether the parent is there
PACKAGES = str(Path(__file__).parents[2])  # where this package is imported from


class ProcessTimeoutError(Exception):
    """A process took longer than it may."""


class ProcessEndedError(Exception):
    """A process ended before it answered."""

    def __init__(self, code: int) -> None:
        super().__init__(f"its process ended with exit code {code}")
        self.code = code


class LimitedProcess:
    """One process, the parent's side."""

    def __init__(self, path: str) -> None:
        """Starts the file `path` and waits until it is ready.

        Raises:
            ProcessTimeoutError, ProcessEndedError: it does not start.
        """
        self._connection, theirs = socket.socketpair()
        packages = [PACKAGES, *filter(None, [os.environ.get("PYTHONPATH")])]
        with theirs:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-P", path],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(packages)},
                process_group=0,  # Ctrl-C is not for it; in a session of its own, "nice" is ignored
            )
        self.ask(b"", START_SECONDS)  # its imports take time that is not the question's

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, message: bytes, seconds: float) -> bytes:
        """The process's answer. After an error there is no process.

        Raises:
            ProcessTimeoutError: it takes longer than `seconds`.
            ProcessEndedError: it ended.
        """
        try:
            self._connection.settimeout(seconds)
            send(self._connection, message)
            return receive(self._connection)
        except TimeoutError:
            self.close()
            raise ProcessTimeoutError(f"it takes longer than {seconds:g} s") from None
        except (EOFError, OSError):
            raise ProcessEndedError(self.close()) from None
        except BaseException:  # Ctrl-C: the answer would be taken for that of the next message
            self.close()
            raise

    def close(self) -> int:
        """Ends the process; returns its exit code."""
        self._connection.close()
        self._process.kill()
        return self._process.wait()


# --- both sides ---------------------------------------------------------------------------------


def read(connection: socket.socket, size: int) -> bytes:
    """
    Raises:
        EOFError: the other side is gone.
    """
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def receive(connection: socket.socket) -> bytes:
    """A message: its length in 8 bytes, then the message."""
    return read(connection, int.from_bytes(read(connection, 8), "big"))


def send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(len(message).to_bytes(8, "big") + message)


# --- the child process --------------------------------------------------------------------------


def serve(
    answer: Callable[[bytes], bytes], memory: int, orphaned: Callable[[], None] = lambda: None
) -> None:
    """Answers messages on the socket that is the standard input, until that is closed.

    Args:
        memory: how many bytes the process may take, beside those that it has now.
        orphaned: called in a thread before the process ends because its parent has ended.
    """
    import resource

    connection = socket.socket(fileno=0)
    parent = os.getppid()
    threading.Thread(target=_end_with_parent, args=(parent, orphaned), daemon=True).start()
    limit(resource.RLIMIT_AS, _memory() + memory)
    limit(resource.RLIMIT_CORE, 0)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            message = receive(connection)
            send(connection, answer(message) if message else b"")  # "": are you there?


def _end_with_parent(parent: int, orphaned: Callable[[], None]) -> None:
    """Ends this process when it has another parent, though it may be in the middle of an answer."""
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    try:
        orphaned()
    finally:
        os._exit(1)


def limit_cpu(seconds: int) -> None:
    """Limits CPU time from now on; after it the kernel ends this process with SIGXCPU."""
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + seconds)


def limit(what: int, value: int) -> None:
    """Sets a limit; some systems lack some."""
    import resource

    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(what, (value, resource.getrlimit(what)[1]))


def _memory() -> int:
    """Bytes of this process's address space; 0 where the system does not say."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return 0
