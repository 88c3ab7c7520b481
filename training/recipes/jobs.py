"""`forerun train` commands side by side: each on a GPU, until all have ended or time is up."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

POLL_SECONDS = 0.2
GRACE_SECONDS = 30.0

Process = subprocess.Popen[bytes]


@dataclass(frozen=True)
class Job:
    """A `forerun train` command. What it prints is in `output` once it has ended well."""

    name: str
    arguments: Sequence[str | Path]
    output: Path

    @property
    def log(self) -> Path:
        """What it says besides: progress and errors, of earlier processes too."""
        return self.output.with_suffix(".log")

    @property
    def _unfinished(self) -> Path:
        return self.output.with_suffix(".part")

    def start(self, gpu: str | None) -> Process:
        """Runs it, in a group of its own: Ctrl-C reaches it through `run_jobs` alone."""
        self.output.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "forerun", "train", *map(str, self.arguments)]
        environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
        with self._unfinished.open("wb") as out, self.log.open("ab") as log:
            return subprocess.Popen(
                command, stdout=out, stderr=log, env=environment, process_group=0
            )

    def end(self, code: int) -> str | None:
        """Keeps what it has printed; or returns a line that says why it failed."""
        if code:
            said = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            return f"{self.name}: {said[-1] if said else f'exit status {code}'} (see {self.log})"
        self._unfinished.replace(self.output)
        print(f"{self.name} has ended", flush=True)
        return None


def run_jobs(jobs: Sequence[Job], gpus: Sequence[str | None], minutes: float = math.inf) -> None:
    """Runs the jobs that have not ended before, each on the next GPU that is free (None: any).

    After `minutes` those that run are interrupted; they and the rest go on another time.

    Raises:
        SystemExit: one or more have failed, in one line. The others have ended.
    """
    waiting, free = [job for job in jobs if not job.output.exists()], list(gpus)
    running: list[tuple[Job, str | None, Process]] = []
    failed: list[str] = []
    end = time.monotonic() + 60 * minutes
    try:
        while (waiting or running) and time.monotonic() < end:
            while waiting and free:
                job, gpu = waiting.pop(0), free.pop(0)
                running.append((job, gpu, job.start(gpu)))
            for each in list(running):
                job, gpu, process = each
                if (code := process.poll()) is not None:
                    running.remove(each)
                    free.append(gpu)
                    failed += filter(None, [job.end(code)])
            time.sleep(POLL_SECONDS)
    finally:
        _interrupt([process for _, _, process in running])
    if failed:
        sys.exit(failed[0] + (f"; {len(failed) - 1} more failed" if failed[1:] else ""))


def _interrupt(processes: Sequence[Process]) -> None:
    """Sends Ctrl-C and waits; kills what goes on."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    end = time.monotonic() + GRACE_SECONDS
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))
        process.kill()
        process.wait()
