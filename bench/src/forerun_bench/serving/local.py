"""A server of this machine for the time of a benchmark, started as users start it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

from forerun.core.errors import ConfigError

READY: Final = re.compile(r"Forerun is ready: (\S+)")
STOP_SECONDS: Final = 30.0


def command_line(settings: Mapping[str, Any]) -> list[str]:
    """Keywords as flags: `page_size=64` is `--page-size 64`."""
    out: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            out.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            out += [f"--{flag}", str(value)]
    return out


class LocalServer:
    """`forerun serve` on a free port of 127.0.0.1; a context manager, ready once entered."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """`settings`: of the engine, with defaults left out."""
        self.url = ""
        self._lines: list[str] = []
        self._ready = threading.Event()  # or ended
        self._process = subprocess.Popen(
            [sys.executable, "-m", "forerun", "serve", "--port", "0", *command_line(settings)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        """
        Raises:
            ConfigError: the server did not start; with its last line.
        """
        try:
            self._ready.wait()
        except BaseException:
            self._stop()
            raise
        if not self.url:
            self._stop()
            said = next((line for line in reversed(self._lines) if line.strip()), "no output")
            raise ConfigError(f"The server did not start: {said.strip()}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            found = READY.search(line)
            if found is not None:
                self.url = found[1]
                self._ready.set()
        self._ready.set()

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
