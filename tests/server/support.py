"""A server in a process of its own, started as users start it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import httpx

from forerun_bench.serving.local import command_line

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

# A fixed width, so that figures of speculation do not depend on timing.
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_total_tokens": 24576,
    "max_running_requests": 8,
    "speculative_adaptive": False,
    "speculative_algorithm": "DFLASH",
    # The bundled model never stops writing spaces where any number is allowed.
    "constrained_json_disable_any_whitespace": True,
}
START_SECONDS = 180
PROMPT = "def add(a, b):\n"
QUESTION = "Each hour Kim packs 14 magnets while Simon packs only 12. How many after 11 hours?"
LONG = {"temperature": 0.0, "max_new_tokens": 3500, "ignore_eos": True}  # several seconds


def flags(**settings: Any) -> list[str]:
    """Keywords as a command line has them."""
    return command_line(settings)


class LiveServer:
    """`forerun serve` on a free port; a context manager."""

    def __init__(self, *arguments: str, key: str | None = None, **environment: str) -> None:
        self.key = key
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "forerun", "serve", "--port", "0", *arguments],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        try:
            self.url = self.wait_ready()
        except BaseException:
            self.process.kill()
            raise
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        self.http = httpx.Client(base_url=self.url, timeout=60, headers=headers)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.http.close()
        for _ in range(2):
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                time.sleep(0.1)
        self.wait_end()

    def wait_ready(self) -> str:
        """The URL of the ready line."""

        def ready() -> str | None:
            assert self.process.poll() is None, self.output
            found = re.search(r"Forerun is ready: (http\S+)", self.output)
            return found[1] if found else None

        return wait_for(ready, START_SECONDS)

    def wait_end(self, seconds: float = 30) -> int:
        """The exit code."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"The server did not end:\n{self.output}") from None
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    @property
    def output(self) -> str:
        """What it has printed."""
        return "".join(self.lines)

    def client(self, **options: Any) -> OpenAI:
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key=self.key or "none", **options)

    def async_client(self, **options: Any) -> AsyncOpenAI:
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key or "none", **options)

    def get(self, path: str) -> dict[str, Any]:
        return self.http.get(path).raise_for_status().json()

    def generate(self, **body: Any) -> Any:
        return self.http.post("/generate", json=body).raise_for_status().json()

    def wait_idle(self, seconds: float = 20) -> dict[str, Any]:
        """Waits until no request is left; all pages are free or cached then."""

        def idle() -> dict[str, Any] | None:
            loads = self.get("/v1/loads")
            busy = loads["num_requests"] + loads["num_running_reqs"] + loads["num_waiting_reqs"]
            return None if busy else loads

        loads = wait_for(idle, seconds)
        assert loads["num_free_pages"] + loads["num_cached_pages"] == loads["num_pages"]
        return loads

    def wait_running(self, count: int = 1) -> None:
        wait_for(lambda: self.get("/v1/loads")["num_running_reqs"] >= count, 20)

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)


def wait_for(condition: Callable[[], Any], seconds: float) -> Any:
    """The first true value of `condition`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s")
