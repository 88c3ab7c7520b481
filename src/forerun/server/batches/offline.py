"""A batch without a server: a file in, a file out. What is written already is not done again."""

from __future__ import annotations

import asyncio
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError, shown
from forerun.server.app import requests_app
from forerun.server.batches.lines import Line, read_lines
from forerun.server.batches.results import Results, read_results
from forerun.server.batches.runner import Answered, Client, Counts, Runner
from forerun.server.http.errors import ServerStartError
from forerun.server.run import make_service
from forerun.server.service import Service
from forerun.server.settings import ServerSettings

AHEAD = 2  # requests in flight for each that can run: the engine never waits for them


@dataclass(frozen=True)
class Files:
    """Input and output of a batch."""

    source: Path
    output: Path


def run_offline(
    settings: ServerSettings,
    config: EngineConfig,
    target: Path,
    files: Files,
    on_progress: Callable[[Counts], None],
) -> Counts:
    """Writes a result for each line of the input that has none yet.

    Args:
        on_progress: called with the counts so far, results of earlier runs included.

    Raises:
        ConfigError: a file or setting cannot be used, or the output is of another input.
        ServerStartError: an engine process ended before it was ready, or too often.
    """
    with _opened(files.output) as output:
        done = read_results(output, files.output)
        counts = _counts(files, done, settings.max_body_bytes)
        on_progress(counts)
        if counts.completed + counts.failed == counts.total:
            return counts

        def write(answered: Answered) -> None:
            output.write(answered.output)
            output.flush()
            counts.completed += answered.completed
            counts.failed += not answered.completed
            on_progress(counts)

        service = make_service(settings, config, target)
        try:
            asyncio.run(_run(service, files.source, set(done), write))
        finally:
            service.close()
        return counts


async def _run(
    service: Service, source: Path, done: set[int], write: Callable[[Answered], None]
) -> None:
    engine = service.engine
    try:
        await engine.start()
        room = engine.slots + service.settings.max_queued_requests
        width = min(AHEAD * engine.slots, room)
        runner = Runner(requests_app(service), Client("batch"), width, lambda: engine.is_ready)
        with source.open("rb") as file:
            lines = read_lines(file, service.settings.max_body_bytes)
            running = asyncio.ensure_future(
                runner.run((line for line in lines if line.number not in done), write)
            )
            await _unless_engines_give_up(running, service)
    finally:
        await engine.close(at_once=True)


async def _unless_engines_give_up(running: asyncio.Future[None], service: Service) -> None:
    """Waits for the requests.

    Raises:
        ServerStartError: all engines have died too often.
    """
    gave_up = asyncio.ensure_future(service.engine.gave_up())
    both: set[asyncio.Future[Any]] = {running, gave_up}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise ServerStartError(f"{gave_up.result()} The same command goes on from here.")
        running.result()
    finally:
        for task in both:
            task.cancel()
        await asyncio.wait(both)


def _opened(path: Path) -> BinaryIO:
    """The output, which no other process may write meanwhile.

    Raises:
        ConfigError: it cannot be written, is no file, or another process writes it.
    """
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
    except OSError as error:
        raise ConfigError(
            f"output {shown(str(path))} cannot be written: {error.strerror}."
        ) from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ConfigError(f"output {shown(str(path))} is not a file, which a batch goes on in.")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ConfigError(
            f"output {shown(str(path))} is being written by another process."
        ) from None
    return file


def _counts(files: Files, done: Results, max_bytes: int) -> Counts:
    """Counts the lines of the input and the results that are there.

    Raises:
        ConfigError: the input cannot be read or is empty, or the output is of another one.
    """
    counts, left = Counts(), set(done)
    for line in _input_lines(files.source, max_bytes):
        counts.total += 1
        if line.number in done:
            left.discard(line.number)
            custom_id, completed = done[line.number]
            if custom_id != line.custom_id:
                left.add(line.number)
                break
            counts.completed += completed
            counts.failed += not completed
    if left:
        raise ConfigError(
            f"output {shown(str(files.output))} has the result of another input in line"
            f" {min(left)}; name another file."
        )
    if not counts.total:
        raise ConfigError(f"input {shown(str(files.source))} is empty.")
    return counts


def _input_lines(path: Path, max_bytes: int) -> Iterator[Line]:
    try:
        with path.open("rb") as file:
            yield from read_lines(file, max_bytes)
    except OSError as error:
        raise ConfigError(f"input {shown(str(path))} cannot be read: {error.strerror}.") from None
