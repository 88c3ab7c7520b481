"""Batches that a server runs beside its other requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from forerun.core.errors import ConfigError
from forerun.server.batches.folder import (
    BATCH,
    ENDED,
    FILE,
    BatchFolder,
    KeyFolder,
    Record,
    new_ident,
)
from forerun.server.batches.lines import read_lines
from forerun.server.batches.results import read_results
from forerun.server.batches.runner import Answered, Client, Counts, Runner
from forerun.server.http.errors import ApiError

log = logging.getLogger("forerun")

WINDOW, WINDOW_SECONDS = "24h", 24 * 3600
RESULTS = ("output_file_id", "error_file_id")  # files of a batch
DEFAULTS = {"priority": -1}  # requests that somebody waits for go first


@dataclass(eq=False)
class Job:
    """One batch that waits or runs."""

    folder: KeyFolder
    record: Record
    max_line: int  # bytes
    counts: Counts = field(default_factory=Counts)
    cancelled: bool = False

    async def run(self, runner: Runner) -> None:
        """Runs its requests that have no result yet. Cancelled from outside, it can go on later."""
        self.note("in_progress")
        try:
            async with asyncio.timeout(self.record["expires_at"] - time.time()):
                await self._answer_all(runner)
            self.end("completed")
        except TimeoutError:
            self.end("expired")
        except ApiError as error:
            self.fail(error.message)

    def fail(self, why: str) -> None:
        """Ends the batch with an error; the results so far stay."""
        problem = {"code": "batch_failed", "message": why, "line": None, "param": None}
        self.record["errors"] = {"object": "list", "data": [problem]}
        self.end("failed")

    def end(self, status: str) -> None:
        """Writes down how the batch has ended. Files without a result are deleted."""
        for name in RESULTS:
            ident = self.record[name]
            if not self.folder.content(ident).stat().st_size:
                self.folder.delete_file(ident)
                self.record[name] = None
        self.note(status)

    def note(self, status: str) -> None:
        """Writes down what the batch is now."""
        self.record |= {"status": status, f"{status}_at": int(time.time())}
        self.folder.save(self.now())

    def now(self) -> Record:
        """The batch as it is, with the counts so far."""
        return {**self.record, "request_counts": vars(self.counts)}

    async def _answer_all(self, runner: Runner) -> None:
        record, folder = self.record, self.folder
        source = folder.content(record["input_file_id"])
        paths = [folder.content(record[name]) for name in RESULTS]
        with paths[0].open("r+b") as output, paths[1].open("r+b") as errors:
            done = {**read_results(output, paths[0]), **read_results(errors, paths[1])}
            self.counts = Counts(0, 0, 0)
            with source.open("rb") as file:
                for _ in read_lines(file, self.max_line, record["endpoint"]):
                    self.counts.total += 1
                    await asyncio.sleep(0)
            for _, completed in done.values():
                self._count(completed)
            with source.open("rb") as file:
                lines = read_lines(file, self.max_line, record["endpoint"])
                left = (line for line in lines if line.number not in done)
                await runner.run(left, lambda answered: self._write(answered, output, errors))

    def _write(self, answered: Answered, output: BinaryIO, errors: BinaryIO) -> None:
        """
        Raises:
            ApiError: the key has no room for more.
        """
        self.folder.check_size()
        file = output if answered.completed else errors
        file.write(answered.output)
        file.flush()
        self._count(answered.completed)

    def _count(self, completed: bool) -> None:
        self.counts.completed += completed
        self.counts.failed += not completed


class BatchJobs:
    """All batches that wait or run; one of each API key at a time."""

    def __init__(
        self,
        folder: BatchFolder,
        make_runner: Callable[[Client], Runner],
        client_of: Callable[[str | None], Client | None],
        max_line: int,
    ) -> None:
        """
        Args:
            client_of: who has a key, by its name; None: there is no such key any more.
        """
        self.folder, self._client_of = folder, client_of
        self._make_runner, self._max_line = make_runner, max_line
        self._jobs: dict[str, tuple[Job, asyncio.Task[None]]] = {}
        self._turns: dict[str | None, asyncio.Lock] = {}

    def start(self, key: str | None, record: Record) -> Record:
        """Lets a batch of a key wait for its turn, and returns it as it is now."""
        job = Job(self.folder.of(key), record, self._max_line)
        task = asyncio.create_task(self._in_turn(job, key))
        ident = record["id"]
        self._jobs[ident] = job, task
        task.add_done_callback(lambda _: self._jobs.pop(ident, None))
        return job.now()

    def get(self, key: str | None, ident: str) -> Record:
        """
        Raises:
            ApiError: 404, this key has no such batch.
        """
        record = self.folder.of(key).get(BATCH, ident)
        job, _ = self._jobs.get(ident, (None, None))
        return record if job is None else job.now()

    async def cancel(self, key: str | None, ident: str) -> Record:
        """Ends a batch. What was answered stays.

        Raises:
            ApiError: there is no such batch.
        """
        record = self.get(key, ident)
        if ident in self._jobs:
            job, task = self._jobs[ident]
            job.cancelled = True
            task.cancel()
            await asyncio.wait({task})
            return job.now()
        return record

    def resume(self) -> None:
        """Goes on with the batches of an earlier server, of keys that there still are."""
        for key in self.folder.owners():
            for record in self.folder.of(key).records(BATCH):
                if record["status"] not in ENDED and self._client_of(key) is not None:
                    self.start(key, record)
                    log.warning("The batch %s goes on.", record["id"])

    def stop(self) -> None:
        """Ends all requests; the batches go on when a server starts again."""
        for _, task in list(self._jobs.values()):
            task.cancel()

    async def _in_turn(self, job: Job, key: str | None) -> None:
        try:
            async with self._turns.setdefault(key, asyncio.Lock()):
                client = self._client_of(key)
                if client is None:
                    job.fail("Its API key is gone.")
                else:
                    await job.run(self._make_runner(client))
        except asyncio.CancelledError:
            if not job.cancelled:
                raise
            job.end("cancelled")
        except (OSError, ConfigError) as error:
            log.error("The batch %s failed: %s", job.record["id"], error)
            job.fail("The server could not read or write its files.")


def new_batch(folder: KeyFolder, asked: Mapping[str, Any]) -> Record:
    """Makes a batch, with files for its results.

    Raises:
        ApiError: its input is unknown, or there is no room.
    """
    source = folder.get(FILE, asked["input_file_id"])
    folder.check_room(2)
    folder.make_batch_room()
    ident = new_ident("batch_")
    files = [
        folder.add_file(f"{ident}_{name}.jsonl", "batch_output")["id"]
        for name in ("output", "error")
    ]
    now = int(time.time())
    moments = (
        "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled",
    )  # fmt: skip
    record: Record = {
        "id": ident,
        "object": BATCH,
        "endpoint": asked["endpoint"],
        "errors": None,
        "input_file_id": source["id"],
        "completion_window": WINDOW,
        "status": "validating",
        "output_file_id": files[0],
        "error_file_id": files[1],
        "created_at": now,
        "expires_at": now + WINDOW_SECONDS,
        **{f"{moment}_at": None for moment in moments},
        "request_counts": vars(Counts()),
        "metadata": asked.get("metadata") or {},
    }
    folder.save(record)
    return record
