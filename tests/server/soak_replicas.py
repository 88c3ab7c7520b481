"""Two replicas under load, of which one is killed again and again.

    python -m tests.server.soak_replicas --kills 4

Every answer must have the tokens that were made before the first kill. Requests may be lost only as
streams that have begun. Exit code 1 if something is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from typing import Any

import httpx

from tests.server.support import ENGINE, LiveServer, flags, wait_for
from tests.server.test_metrics import scrape

SETTINGS = {**ENGINE, "max_total_tokens": 16384, "max_running_requests": 8, "dp_size": 2}
NAMES = ("zebra", "tower", "river", "violin", "lamp", "chair")
PROMPTS = [f"# {name}\n" + f"def {name}(a, b):\n    return a + b\n\n" * 8 for name in NAMES]
PARAMS = {"temperature": 0.0, "max_new_tokens": 60, "ignore_eos": True}
CLIENTS, SECONDS = 8, 5.0  # between two kills


class Load:
    """Clients that ask for whole answers and streams, or leave in the middle."""

    def __init__(self, url: str, want: dict[str, list[int]]) -> None:
        self._url, self._want = url, want
        self.ends: Counter[str] = Counter()
        self.problems: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        with httpx.Client(base_url=self._url, timeout=60) as http:
            while not self._stop.is_set():
                prompt, kind = rng.choice(PROMPTS), rng.random()
                body = {"text": prompt, "sampling_params": PARAMS}
                if kind < 0.6:
                    answer = http.post("/generate", json=body)
                    self._check("whole", prompt, answer.json())
                else:
                    self._stream(http, prompt, body, leaves=kind > 0.85)

    def _stream(self, http: httpx.Client, prompt: str, body: dict[str, Any], leaves: bool) -> None:
        last: dict[str, Any] = {}
        with http.stream("POST", "/generate", json={**body, "stream": True}) as response:
            for number, line in enumerate(response.iter_lines()):
                if line.startswith("data: {"):
                    last = json.loads(line.removeprefix("data: "))
                if leaves and number > 4:
                    self.ends["left"] += 1
                    return
        self._check("stream", prompt, last)

    def _check(self, kind: str, prompt: str, answer: dict[str, Any]) -> None:
        if answer.get("output_ids") == self._want[prompt]:
            self.ends[f"{kind}, complete"] += 1
        elif kind == "stream" and "was lost" in str(answer.get("error")):
            self.ends["stream, lost"] += 1
        else:
            self.problems.append(f"{kind}: {str(answer)[:200]}")


def soak(kills: int) -> list[str]:
    """What went wrong."""
    with LiveServer(*flags(**SETTINGS)) as live:
        answers = [live.generate(text=prompt, sampling_params=PARAMS) for prompt in PROMPTS]
        want = {p: a["output_ids"] for p, a in zip(PROMPTS, answers, strict=True)}
        load = Load(live.url, want)
        for number in range(kills):
            time.sleep(SECONDS)
            os.kill(live.get("/server_info")["engine_pids"][number % 2], signal.SIGKILL)
            wait_for(lambda: not _up(live), 10)
            wait_for(lambda: _up(live), 90)
        time.sleep(SECONDS)
        load.stop()
        live.wait_idle()
        figures = scrape(live)
        retried, lost = (
            figures["forerun_requests_retried_total"],
            figures["vllm:request_success_total{error}"],
        )
        print(f"{kills} kills, {dict(load.ends)}, {retried:.0f} requests ran again")
        problems = load.problems
        if lost > load.ends["stream, lost"] + load.ends["left"]:
            problems.append(f"{lost:.0f} requests failed, more than streams were lost")
        if figures["forerun_engine_restarts_total"] != kills:
            problems.append("not every kill was followed by one start")
    return problems


def _up(live: LiveServer) -> bool:
    figures = scrape(live)
    return all(figures[f"forerun_replica_up{{{index}}}"] for index in (0, 1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=4)
    found = soak(parser.parse_args().kills)
    print(*found, f"{len(found)} problems", sep="\n")
    sys.exit(bool(found))
