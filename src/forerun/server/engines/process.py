"""The engine process: builds the engine, and steps it for requests that arrive over ZeroMQ.

It knows token ids only. Between two steps it takes whatever messages have arrived, and after each
step it sends one message with everything the step added, a few times a second with metrics. Without
requests it sleeps.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import shutil
import signal
import threading
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import zmq

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError, ExecutorError, RequestError
from forerun.core.request import FinishReason, Request, State
from forerun.engine.engine import Engine
from forerun.engine.metrics import EngineMetrics
from forerun.platform.garbage import freeze_loaded
from forerun.platform.signals import without_ctrl_c
from forerun.platform.stacks import offer_stacks
from forerun.server.engines.messages import (
    Abort,
    Advance,
    Compile,
    Finish,
    NewRequest,
    Ping,
    Pong,
    Query,
    Ready,
    Refused,
    Reply,
    Shutdown,
    StartProfile,
    Step,
    StopProfile,
    Submit,
    ToEngine,
    decode_to_engine,
    encode,
)
from forerun.server.engines.slow_answers import SlowAnswers
from forerun.server.logs import set_up_logging

log = logging.getLogger("forerun")
MAX_FAILURES = 3  # failed steps in a row
ANSWERING_SECONDS = 0.005  # between two looks for messages, while only threads work
METRICS_SECONDS = 0.25  # between two snapshots while requests run


@dataclass(frozen=True)
class EngineTask:
    """What the child process is started with."""

    config: EngineConfig
    model_path: str
    folder: Path  # of the sockets
    number: int  # of this process among those of the server
    log_format: str = "plain"
    cpus: tuple[int, ...] = ()  # that it may use; empty: all

    @property
    def inbox(self) -> str:
        """ZeroMQ address that the engine process reads."""
        return f"ipc://{self.folder}/{self.number}-in"

    @property
    def outbox(self) -> str:
        """Descriptor of the pipe that it writes."""
        return f"ipc://{self.folder}/{self.number}-out"


def run_engine(task: EngineTask) -> None:
    """The body of the child process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A group of its own, with which whatever it starts can be killed. It may write to a terminal.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.setpgid(0, 0)
    offer_stacks(task.folder)
    if task.cpus:
        os.sched_setaffinity(0, task.cpus)
    threading.Thread(target=_end_with_parent, args=(task.folder,), daemon=True).start()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own lines are no log
    set_up_logging(task.config.log_level, task.log_format)
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket in (inbox, outbox):
        socket.set_hwm(0)  # never wait for a slow API process: messages are a few bytes per token
        socket.linger = 1000  # milliseconds
    inbox.bind(task.inbox)
    outbox.connect(task.outbox)
    try:
        _serve(task, inbox, outbox)
    finally:
        inbox.close()
        outbox.close()
        context.term()


def _end_with_parent(folder: Path) -> None:
    """Ends this process as soon as the API process is gone, however that ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _serve(task: EngineTask, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]) -> None:
    from forerun.executor.start import start_executor
    from forerun.platform.progress import progress

    try:
        executor = start_executor(task.config, Path(task.model_path))
    except ConfigError as error:
        outbox.send(encode(Refused(str(error))))
        return
    with progress("preparing grammars"):
        executor.prepare_grammars()
    engine = Engine(task.config, executor)
    freeze_loaded()
    outbox.send(encode(Ready(engine.info)))
    EngineServer(engine, inbox, outbox).run()
    engine.close()  # not after an error: other nodes would take it for the end of the server


@dataclass(eq=False)
class _Running:
    """A request, and how much of it was sent."""

    request: Request
    number: int  # of the `NewRequest`
    num_tokens: int = 0
    num_steps: int = 0
    num_prompt_logprobs: int = 0

    def advance(self) -> Advance | None:
        """What is new since the last call."""
        request = self.request
        ended = request.state is State.FINISHED
        if len(request.output) == self.num_tokens and not ended:
            return None
        new, steps, num_prompt_logprobs = self.num_tokens, self.num_steps, self.num_prompt_logprobs
        self.num_tokens = len(request.output)
        self.num_steps = len(request.accept_lengths)
        self.num_prompt_logprobs = len(request.prompt_logprobs)
        scored = request.logprobs is not None
        return Advance(
            rid=request.rid,
            tokens=request.output[new:],
            accept_lengths=request.accept_lengths[steps:],
            correct_drafts=request.correct_drafts[steps:],
            proposed=request.proposed,
            cached_tokens=request.cached_tokens,
            finish=request.finish if ended else None,
            output_logprobs=request.output_logprobs[new:] if scored else [],
            prompt_logprobs=request.prompt_logprobs[num_prompt_logprobs:] if scored else [],
            pooled=request.pooled if ended else [],
            number=self.number,
        )


class EngineServer:
    """Steps an engine while it has requests, and takes messages in between."""

    def __init__(self, engine: Engine, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]) -> None:
        self._engine, self._inbox, self._outbox = engine, inbox, outbox
        self._running: dict[str, _Running] = {}
        self._slow_answers = SlowAnswers()
        self._stopping = False
        self._failures = 0  # steps in a row
        self._metrics_due = 0.0  # time.monotonic()

    def run(self) -> None:
        """Runs until `Shutdown`."""
        self._send([], self._metrics())
        while not self._stopping:
            self._receive()
            if self._running:
                self._step()
        self._drop(list(self._running), "the server was stopped")
        self._slow_answers.close()
        self._engine.drain()

    def _receive(self) -> None:
        """Takes all messages that have arrived; waits for one if nothing runs."""
        while not self._stopping:
            for reply in self._slow_answers.replies():
                self._outbox.send(encode(reply))
            busy = self._running or self._slow_answers
            try:
                data = self._inbox.recv(zmq.NOBLOCK if busy else 0)
            except zmq.Again:
                if self._running:
                    # The device is busy: what comes until it is not can be in the next step.
                    spare = int(1000 * self._engine.spare_seconds())
                    if spare == 0 or not self._inbox.poll(spare):
                        return
                    continue
                self._slow_answers.wait(ANSWERING_SECONDS)
                continue
            self._take(decode_to_engine(data))

    def _take(self, message: ToEngine) -> None:
        match message:
            case Submit(requests=requests):
                for new in requests:
                    self._submit(new)
            case Finish(rid=rid, reason=reason, num_tokens=num_tokens):
                running = self._running.pop(rid, None)
                if running is not None:
                    self._engine.finish(running.request, reason, num_tokens)
                    self._engine.close_request(running.request)
                    self._settle()
            case Abort(rids=rids):
                self._drop(rids, "aborted by the user")
            case Query(number=number, what=what):
                self._outbox.send(encode(self._answer(number, what)))
            case Compile(number=number, grammar=grammar, client=client):
                compile_grammar = partial(self._engine.executor.compile_grammar, grammar, client)
                self._slow_answers.start(number, grammar, compile_grammar)
            case StartProfile() | StopProfile():
                self._profile(message)
            case Ping():
                self._outbox.send(encode(Pong()))
            case Shutdown():
                self._stopping = True

    def _submit(self, new: NewRequest) -> None:
        try:
            request = self._engine.make_request(
                new.prompt,
                new.params,
                new.rid,
                logprobs=new.logprobs,
                scheduling=new.scheduling,
                pooling=new.pooling,
            )
            self._engine.submit(request, new.trace_context)
        except RequestError as error:  # the API process has checked it: settings differ
            self._send([_failed(new.rid, new.number, str(error))])
            return
        self._running[new.rid] = _Running(request, new.number)

    def _answer(self, number: int, what: str) -> Reply:
        try:
            match what:
                case "flush_cache":
                    self._engine.flush_cache()
                    self._send([], self._metrics())
                    return Reply(number, {})
                case "load":
                    return Reply(number, dict(self._engine.load()))
                case "stats":
                    return Reply(number, self._engine.stats())
        except RequestError as error:
            return Reply(number, None, str(error))
        raise AssertionError(what)

    def _profile(self, message: StartProfile | StopProfile) -> None:
        profiling, number = self._engine.profiling, message.number
        try:
            if isinstance(message, StartProfile):
                profiling.start(message.params)
                self._outbox.send(encode(Reply(number, {})))
            else:
                params = profiling.stop()
                self._slow_answers.start(number, params, partial(profiling.wait_written, params))
        except RequestError as error:
            self._outbox.send(encode(Reply(number, None, str(error))))

    def _step(self) -> None:
        """One step. An exception ends all running requests with it; the engine continues.

        After several in a row the device is taken to be lost, and the process ends.
        """
        try:
            self._engine.step()
            self._failures = 0
        except Exception as error:
            log.exception("A step failed.")
            self._failures += 1
            if self._failures == MAX_FAILURES or isinstance(error, ExecutorError):
                raise  # a process that has ended does not come back
            reason = f"{type(error).__name__}: {error}"
            failed = [_failed(rid, each.number, reason) for rid, each in self._running.items()]
            self._drop(list(self._running), reason)
            self._send(failed)
            return
        advances = []
        for rid, running in list(self._running.items()):
            advance = running.advance()
            if advance is not None:
                advances.append(advance)
                if advance.finish is not None:
                    self._engine.close_request(running.request)
                    del self._running[rid]
        if advances or time.monotonic() >= self._metrics_due:
            self._send(advances, self._metrics_if_due())
            self._settle()

    def _drop(self, rids: list[str], message: str) -> None:
        for rid in rids:
            running = self._running.pop(rid, None)
            if running is not None:
                self._engine.drop(running.request, message)
        self._settle()

    def _settle(self) -> None:
        """Releases, before it sleeps, the slots and pages of requests that have ended."""
        if not self._running:
            self._engine.drain()
            self._send([], self._metrics())

    def _send(self, advances: list[Advance], metrics: EngineMetrics | None = None) -> None:
        self._outbox.send(encode(Step(advances, metrics)))

    def _metrics(self) -> EngineMetrics:
        self._metrics_due = time.monotonic() + METRICS_SECONDS
        return self._engine.metrics()

    def _metrics_if_due(self) -> EngineMetrics | None:
        return self._metrics() if time.monotonic() >= self._metrics_due else None


def _failed(rid: str, number: int, message: str) -> Advance:
    finish = FinishReason("abort", message=message)
    return Advance(rid, [], [], [], 0, 0, finish, number=number)


def start_engine(task: EngineTask) -> BaseProcess:
    """Starts the child process, with `spawn`, which CUDA requires."""
    # A daemonic process may not start ranks.
    daemon = task.config.tp_size == 1
    process = multiprocessing.get_context("spawn").Process(
        target=run_engine, args=(task,), name="forerun-engine", daemon=daemon
    )
    with without_ctrl_c():
        process.start()
    if not daemon:  # this process waits for such a child before it exits
        atexit.register(process.kill)
    return process
