"""Many clients at one server for a while, and what is left afterwards.

    python -m tests.server.soak --minutes 30

References are computed first, by plain decoding in this process. Then clients send requests of all
kinds, leave, abort, read slowly; the engine process is killed. At the end every completed answer
must have been equal to its reference, every page, slot and file be free again, and the metrics
agree with what was sent. Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.server.processes import Held, held, slope
from tests.server.soak.account import problems
from tests.server.soak.cases import make_cases, references
from tests.server.soak.clients import Clients
from tests.server.support import ENGINE, LiveServer, flags
from tests.server.wire import fetch, request

# Few pages, so that requests wait and lose theirs; a short queue, so that it is full at times.
SERVER: dict[str, Any] = {
    **ENGINE,
    "speculative_adaptive": True,
    "max_total_tokens": 12288,
    "max_queued_requests": 24,
}
# oneDNN and PyTorch's layer above it each keep 1,024 GEMMs, one for every number of tokens and
# shape of a weight. Until both are full, memory grows; small caches are full within the warm-up, so
# that other growth can be seen.
ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
PLAIN = {name: value for name, value in ENGINE.items() if name != "speculative_algorithm"}
HEALTH_SECONDS, MEMORY_SECONDS = 0.5, 5.0  # between two looks
WARM_UP = 0.25  # part of a process's life that its memory may grow in
MAX_GROWTH = 2.0  # MiB per minute afterwards
RESTART_SECONDS = 120.0


@dataclass
class Watch:
    """What is seen from outside while the clients run."""

    server: LiveServer
    clients: Clients
    health: list[float] = field(default_factory=list)  # seconds
    memory: dict[str, list[tuple[float, Held]]] = field(default_factory=dict)
    noticed: list[float] = field(default_factory=list)  # seconds from a kill to an unhealthy answer
    engines: int = 1
    engine_pid: int = 0

    async def look_at_health(self) -> None:
        while True:
            started = time.monotonic()
            answer = await fetch(self.server.url, request("GET", "/health"))
            self.health.append(time.monotonic() - started)
            if answer.status != 200 and not self.clients.was_down(started):
                self.clients.failures.append(f"/health is {answer.status} while the engine is up")
            metrics = await fetch(self.server.url, request("GET", "/metrics"))
            if metrics.status != 200:
                self.clients.failures.append(f"/metrics is {metrics.status}")
            await asyncio.sleep(HEALTH_SECONDS)

    async def look_at_memory(self) -> None:
        while True:
            now = time.monotonic()
            for name, pid in (
                ("API process", self.server.process.pid),
                (f"engine process {self.engines}", self.engine_pid),
            ):
                try:
                    self.memory.setdefault(name, []).append((now, held(pid)))
                except (OSError, KeyError):  # it was killed
                    continue
            await asyncio.sleep(MEMORY_SECONDS)

    async def kill(self) -> None:
        """Kills the engine process and waits for the next one."""
        down = len(self.clients.down)
        self.clients.down.append((time.monotonic(), float("inf")))
        os.kill(self.engine_pid, signal.SIGKILL)
        self.noticed.append(await self._until_health_is(503))
        await self._until_health_is(200)
        self.clients.down[down] = (self.clients.down[down][0], time.monotonic())
        await self.find_engine()
        self.engines += 1

    async def _until_health_is(self, status: int) -> float:
        """Seconds that it took."""
        start = time.monotonic()
        while (await fetch(self.server.url, request("GET", "/health"))).status != status:
            if time.monotonic() > start + RESTART_SECONDS:
                raise AssertionError(f"/health does not become {status}.")
            await asyncio.sleep(0.01)
        return time.monotonic() - start

    async def find_engine(self) -> None:
        answer = await fetch(self.server.url, request("GET", "/server_info"))
        if answer.status != 200:
            raise AssertionError(f"/server_info: {answer.status} {answer.body!r}")
        self.engine_pid = answer.json()["engine_pid"]


async def load(watch: Watch, options: argparse.Namespace) -> None:
    """All clients for the whole time, and the kills."""
    await watch.find_engine()
    start = time.monotonic()
    seconds = options.minutes * 60
    looks = [asyncio.create_task(look()) for look in (watch.look_at_health, watch.look_at_memory)]
    running = [
        asyncio.create_task(watch.clients.run(start + seconds)) for _ in range(options.clients)
    ]
    for kill in range(options.kills):
        due = start + seconds * (kill + 1) / (options.kills + 1)
        await asyncio.sleep(max(due - time.monotonic(), 0))
        await watch.kill()
    await asyncio.gather(*running)
    for look in looks:
        look.cancel()
    for result in await asyncio.gather(*looks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


def check(server: LiveServer, clients: Clients, before: Held) -> list[str]:
    """What is wrong once everything has ended."""
    found = list(clients.failures)
    loads = server.wait_idle(60)
    server.http.post("/flush_cache").raise_for_status()
    after = server.get("/v1/loads")
    if after["num_free_pages"] != after["num_pages"] or after["num_cached_pages"]:
        found.append(f"pages are not free: {loads}, then {after}")
    server.http.close()
    time.sleep(1)  # until the server has closed its side
    now = held(server.process.pid)
    if now.files > before.files:
        found.append(f"{before.files} open files before, {now.files} after")
    return found


def report(watch: Watch, seconds: float) -> list[str]:
    """Prints the figures. Returns what is wrong with the memory."""
    clients, found = watch.clients, []
    total = sum(clients.outcomes.values())
    print(f"{total} actions, {len(clients.sent)} requests in {seconds / 60:.1f} min;", end=" ")
    print(f"{clients.tokens} tokens compared")
    for outcome, count in clients.outcomes.most_common():
        print(f"  {count:7} {outcome}")
    print(f"the engine was killed {len(clients.down)} times; without one for", end=" ")
    print(", ".join(f"{end - start:.1f} s" for start, end in clients.down) or "0 s", end="; ")
    print("noticed after", ", ".join(f"{each * 1e3:.0f} ms" for each in watch.noticed))
    health = sorted(watch.health)
    marks = ", ".join(f"p{p} {health[len(health) * p // 100] * 1e3:.0f}" for p in (50, 99))
    print(f"/health: {marks}, max {health[-1] * 1e3:.0f} ms of {len(health)}")
    for name, points in watch.memory.items():
        start, end = points[0][0], points[-1][0]
        warm = [(t, h) for t, h in points if t >= start + WARM_UP * (end - start)]
        growth = slope([((t - start) / 60, h.rss) for t, h in warm])
        files = {h.files for _, h in points}
        print(
            f"{name}: RSS {points[0][1].rss:.0f} MiB at first, {warm[0][1].rss:.0f} warm,"
            f" {points[-1][1].rss:.0f} at the end; slope {growth:+.2f} MiB/min over"
            f" {(end - warm[0][0]) / 60:.1f} min; {min(files)} to {max(files)} files"
        )
        if growth > MAX_GROWTH and end - start > 300:
            found.append(f"the memory of {name} grows by {growth:.2f} MiB a minute")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.server.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--cases", type=int, default=150)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    cases = make_cases(options.cases, rng)
    answers = references(cases, **PLAIN)
    print(f"{len(cases)} references by plain decoding", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        serve = flags(**SERVER, log_level="info", log_format="json")
        with LiveServer(*serve, TMPDIR=folder, **ENVIRONMENT) as server:
            server.get("/health")
            before = held(server.process.pid)
            clients = Clients(server.url, cases, answers, rng)
            watch = Watch(server, clients)
            started = time.monotonic()
            asyncio.run(load(watch, options))
            seconds = time.monotonic() - started
            found = check(server, clients, before)
            metrics = fetch(server.url, request("GET", "/metrics"))
            found += problems(clients.sent, list(server.lines), asyncio.run(metrics).body.decode())
            server.process.send_signal(signal.SIGTERM)
            code = server.wait_end()
        if code != 0:
            found.append(f"exit code {code}")
        left = [str(path) for path in Path(folder).iterdir()]
        if left:
            found.append(f"files are left: {left}")
    if "Traceback" in server.output:
        found.append("a traceback in the log:\n" + server.output[-5000:])
    found += report(watch, seconds)
    for problem in found[:50]:
        print("FAILED", problem[:2000])
    print(f"{len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
