"""The engine thread: the only thread that steps the engine.

Callers of any thread submit their requests through a thread-safe queue and wait on a queue of
their own, so the requests of all calls share one batch. Without requests the thread sleeps and
does not touch the engine: benchmarks then step it themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeVar

from forerun.core.errors import EngineClosedError
from forerun.core.request import Request, State
from forerun.engine.engine import Engine
from forerun.llm.output import Progress
from forerun.llm.text import OutputText

T = TypeVar("T")


@dataclass(eq=False)
class Job:
    """One request of a call: sample `index` of prompt `prompt_index`."""

    request: Request
    prompt_index: int
    index: int
    # Detokenized step by step in the engine thread; None: by the caller, once it has ended.
    text: OutputText | None
    num_seen: int = 0  # output tokens handled so far


class Event(NamedTuple):
    """New tokens of a job, or its end."""

    job: Job
    text: str  # what was added to `job.text`
    progress: Progress


@dataclass(eq=False)
class Call:
    """The jobs of one `generate`. Its events end with None."""

    jobs: list[Job]
    partial: bool  # an event for every step; otherwise only when a job ends
    events: SimpleQueue[Event | BaseException | None] = field(default_factory=SimpleQueue)


class EngineLoop:
    """Steps an engine in a thread of its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._running: dict[Job, Call] = {}
        self._lock = threading.Lock()  # nothing is queued after the command to stop
        self._closed = False  # for callers
        self._stopping = False  # for the thread
        self._thread = threading.Thread(target=self._run, name="forerun-engine", daemon=True)
        self._thread.start()

    # --- callers, from any thread ---------------------------------------------------------------

    def submit(self, call: Call) -> None:
        """Queues the requests of a call.

        Raises:
            EngineClosedError: after `close`.
        """
        self._post(lambda: self._start(call))

    def do(self, action: Callable[[], T]) -> T:
        """Runs `action` in the engine's thread between two steps, and waits for it.

        Raises:
            EngineClosedError: after `close`.
        """
        future: Future[T] = Future()
        self._post(lambda: _resolve(future, action))
        return future.result()

    def abandon(self, call: Call) -> None:
        """Aborts a call's running requests, and waits until none is left."""
        if threading.current_thread() is self._thread:
            self.abandon_later(call)
            return
        try:
            self.do(lambda: self._abandon(call))
        except EngineClosedError:
            return  # `close` has aborted it

    def abandon_later(self, call: Call) -> None:
        """`abandon` without waiting or locks, for finalizers: they may run at any point."""
        self._commands.put(lambda: self._abandon(call))

    def check_open(self) -> None:
        """
        Raises:
            EngineClosedError: after `close`.
        """
        if self._closed:
            raise EngineClosedError("This LLM was closed and cannot be used again; make a new one.")

    def close(self) -> None:
        """Aborts all requests, then ends the thread."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._commands.put(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, command: Callable[[], None]) -> None:
        with self._lock:
            self.check_open()
            self._commands.put(command)

    # --- the engine's thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                while not self._stopping and (command := self._next_command()) is not None:
                    command()
                if self._running:
                    self._step()
        finally:
            self._shut_down()

    def _next_command(self) -> Callable[[], None] | None:
        """Waits while there is nothing to do or the device is busy; None: a step is due."""
        spare = self._engine.spare_seconds() if self._running else None
        try:
            return self._commands.get(spare != 0.0, spare)
        except Empty:
            return None

    def _step(self) -> None:
        """One step. An exception ends all running calls with it; the engine continues."""
        try:
            self._engine.step()
        except Exception as error:  # noqa: BLE001  raised again in every caller
            self._fail(error, set(self._running.values()))
            return
        events = self._advance()
        # Callers that have read the end of their call may step the engine themselves: from here on
        # this thread does not touch it unless something runs.
        for call, event in events:
            call.events.put(event)

    def _advance(self) -> list[tuple[Call, Event | None]]:
        """The events of the last step. Ends requests whose text contains a stop string."""
        events: list[tuple[Call, Event | None]] = []
        for job, call in list(self._running.items()):
            if job not in self._running:  # its call just failed
                continue
            try:
                event = self._progress(job, call.partial)
            except Exception as error:  # noqa: BLE001  in one text: other calls are not affected
                self._fail(error, [call])
                continue
            if event is not None:
                events.append((call, event))
        still = set(self._running.values())
        ended = dict.fromkeys(c for c, e in events if e and e.progress.finished and c not in still)
        return [*events, *((call, None) for call in ended)]

    def _progress(self, job: Job, partial: bool) -> Event | None:
        request, text = job.request, job.text
        new = len(request.output) > job.num_seen
        job.num_seen = len(request.output)
        if new and text is not None:
            self._look_for_stop(request, text)
        if request.state is State.FINISHED:
            rest = text.take_rest() if text is not None else ""
            self._engine.close_request(request)
            del self._running[job]
            return Event(job, rest, Progress.of(request))
        if not (new and partial):
            return None
        shown, num_tokens = ("", job.num_seen) if text is None else text.take()
        return Event(job, shown, Progress.of(request, num_tokens))

    def _look_for_stop(self, request: Request, text: OutputText) -> None:
        found = text.find_stop(request)
        if found is not None:
            self._engine.finish(request, *found)

    def _start(self, call: Call) -> None:
        if not call.jobs:
            call.events.put(None)
        self._running |= dict.fromkeys(call.jobs, call)
        try:
            for job in call.jobs:
                self._engine.submit(job.request)
        except Exception as error:  # noqa: BLE001  raised again by the caller
            self._fail(error, [call])

    def _abandon(self, call: Call) -> None:
        self._drop(call, "aborted by the user")
        call.events.put(None)

    def _fail(self, error: BaseException, calls: Iterable[Call]) -> None:
        for call in calls:
            self._drop(call, f"{type(error).__name__}: {error}")
            call.events.put(error)
            call.events.put(None)

    def _drop(self, call: Call, message: str) -> None:
        """Aborts the running requests of a call."""
        for job in call.jobs:
            if self._running.pop(job, None) is not None:
                self._engine.drop(job.request, message)

    def _stop(self) -> None:
        self._stopping = True

    def _shut_down(self) -> None:
        """Ends every call, also if this thread has failed: no caller may wait forever."""
        with self._lock:
            self._closed = True
        try:
            self._engine.abort_all("the engine was closed")
            for call, event in self._advance():
                call.events.put(event)
            self._engine.drain()
        finally:
            self._engine.close()
            while not self._commands.empty():
                self._commands.get()()
            error = EngineClosedError("The engine ended before its requests did.")
            self._fail(error, set(self._running.values()))


def _resolve(future: Future[T], action: Callable[[], T]) -> None:
    try:
        future.set_result(action())
    except Exception as error:  # noqa: BLE001  raised again by `Future.result`
        future.set_exception(error)
