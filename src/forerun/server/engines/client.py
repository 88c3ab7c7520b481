"""The API process's side of an engine: starts it, feeds it, and starts it again when it dies."""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from forerun.core.errors import ConfigError, RequestError
from forerun.core.executor import ExecutorInfo
from forerun.core.grammar import Grammar
from forerun.core.plan import GRAMMAR_ERROR
from forerun.core.profile import ProfileParams
from forerun.core.request import QUEUE_TIMEOUT, FinishReason
from forerun.engine.metrics import EngineMetrics
from forerun.server.engines.backoff import MAX_QUICK_DEATHS, Backoff
from forerun.server.engines.link import EngineLink
from forerun.server.engines.messages import (
    Abort,
    Advance,
    Compile,
    NewRequest,
    Query,
    Reply,
    StartProfile,
    Step,
    StopProfile,
    Submit,
    ToEngine,
)
from forerun.server.engines.metrics import ServerMetrics
from forerun.server.engines.placement import Placement
from forerun.server.engines.routing import Load
from forerun.server.engines.watchdog import WATCHDOG_TIMEOUT
from forerun.server.generation import Call, Generation
from forerun.server.http.errors import (
    ApiError,
    EngineFailed,
    EngineUnavailable,
    GrammarBusy,
    QueueTimeout,
    ServerStartError,
    bad_request,
)

log = logging.getLogger("forerun")


class EngineState(Enum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    GIVEN_UP = "not started again: it has died too often"
    CLOSED = "closed"


class Running(NamedTuple):
    """A request in flight, and the call that waits for it."""

    generation: Generation
    call: Call


class EngineClient:
    """One engine process after the other. All methods belong to the event loop's thread."""

    def __init__(
        self,
        placement: Placement,
        model_path: Path,
        metrics: ServerMetrics,
        log_format: str = "plain",
        name: str = "The engine",
        watchdog_timeout: float = WATCHDOG_TIMEOUT,
    ) -> None:
        """
        Args:
            name: in log messages.
            watchdog_timeout: seconds after which a silent engine is taken to hang; 0: never.
        """
        self.metrics = metrics
        self.name = name
        self.state = EngineState.STARTING
        self.restarts = 0
        self.snapshot: EngineMetrics | None = None  # the newest; None: there is no engine
        # Called with the requests of an engine that has ended, and what to tell who waits.
        self.on_lost: Callable[[list[Running], ApiError], None] = self.fail_all
        self.on_ready: Callable[[], None] = lambda: None  # called after a restart
        self._placement, self._model_path, self._log_format = placement, model_path, log_format
        self._watchdog_timeout = watchdog_timeout
        self._folder: Path | None = None  # of the sockets
        self._link: EngineLink | None = None
        self._info: ExecutorInfo | None = None
        self._running: dict[str, Running] = {}  # by request id
        self._queued_tokens: dict[str, int] = {}  # prompt tokens of those without a token yet
        self._num_queued_tokens = 0
        self._queries: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()  # of queries, and of requests
        self._supervisor: asyncio.Task[str] | None = None

    # --- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts the engine and waits until it is ready.

        Raises:
            ConfigError: the settings cannot work.
            ServerStartError: the process ended.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="forerun-"))  # 0700
        await self._start()
        self._supervisor = asyncio.create_task(self._supervise(), name="forerun-supervisor")

    async def gave_up(self) -> str:
        """Waits until the engine has died too often, and says how."""
        assert self._supervisor is not None
        return await asyncio.shield(self._supervisor)

    async def close(self, at_once: bool = False) -> None:
        """Ends the engine; requests in flight fail."""
        self.state = EngineState.CLOSED
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait({self._supervisor})
        self._lose("The server is shutting down.")
        if self._link is not None:
            await self._link.close(at_once)
            self._link = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def info(self) -> ExecutorInfo:
        """Facts of the engine that runs, or ran last."""
        assert self._info is not None
        return self._info

    @property
    def pid(self) -> int | None:
        """Process id of the engine, while there is one."""
        return self._link.pid if self._link is not None else None

    # --- requests -------------------------------------------------------------------------------

    @property
    def num_requests(self) -> int:
        """Requests in flight, running or waiting."""
        return len(self._running)

    @property
    def load(self) -> Load:
        return Load(len(self._running), self._num_queued_tokens)

    def is_known(self, rid: str) -> bool:
        return rid in self._running

    def submit(self, generations: Sequence[Generation], call: Call) -> None:
        """Queues generations of a call.

        Raises:
            EngineUnavailable: there is no engine at the moment.
        """
        link = self._ready()
        for generation in generations:
            generation.number = next(self._numbers)
            self._running[generation.rid] = Running(generation, call)
            self._queued_tokens[generation.rid] = generation.uncached_tokens
            self._num_queued_tokens += generation.uncached_tokens
        link.send(
            Submit(
                [
                    NewRequest(
                        g.rid,
                        list(g.record.prompt),
                        replace(g.params, sampling_seed=g.seed, n=1, stop=()),
                        logprobs=g.record.logprobs,
                        pooling=g.record.pooling,
                        trace_context=call.trace_context,
                        # A call's own deadline is kept here: it holds while a step takes long.
                        scheduling=replace(g.scheduling, request_timeout=None),
                        number=g.number,
                    )
                    for g in generations
                ]
            )
        )

    def abort(self, rids: Sequence[str], reason: str = "disconnect") -> None:
        """Ends requests with what has arrived; their callers get it. Unknown ids are ignored.

        Args:
            reason: one of `ABORTED`, for the metrics; a call's deadline is known without it.
        """
        known = [rid for rid in rids if rid in self._running]
        if known and self._link is not None:
            self._link.send(Abort(known))
        for rid in known:
            generation, call = self._forget(rid)
            if call.error is not None and not call.is_late:  # in another part of the call
                self.metrics.ended(generation, "error")
                continue
            generation.end(FinishReason("abort", message="aborted by the user"))
            self.metrics.aborted["timeout" if call.is_late else reason] += 1
            self.metrics.ended(generation, "abort")
            call.notify(ended=True)

    def abort_group(self, group: str, belongs: Callable[[Call], bool]) -> None:
        """`abort` of all samples of a prompt, by the id that the client gave or got.

        Args:
            belongs: whether the client may end a call.
        """
        rids = [
            rid
            for rid, (generation, call) in self._running.items()
            if group in (generation.group, call.answer_id) and belongs(call)
        ]
        self.abort(rids, "abort_request")

    def abort_all(self) -> None:
        self.abort(list(self._running), "abort_request")

    def fail_all(self, running: Sequence[Running], error: ApiError) -> None:
        """Ends requests that are no longer in flight with an error."""
        for generation, call in running:
            call.fail(error)
            self.metrics.ended(generation, "error")

    async def query(self, what: str) -> dict[str, Any]:
        """Asks the engine between two steps.

        Raises:
            RequestError: it cannot do that now.
            EngineUnavailable: there is no engine at the moment, or it dies before it answers.
        """
        return await self._ask(lambda number: Query(number, what))

    async def compile_grammar(self, grammar: Grammar, client: str = "") -> None:
        """Compiles a grammar, so that a request that names it starts at once.

        Raises:
            RequestError: it is invalid or takes too long, or xgrammar is not installed.
            GrammarBusy: it cannot be compiled now.
            EngineUnavailable: as `query`.
        """
        await self._ask(lambda number: Compile(number, grammar, client))

    async def start_profile(self, params: ProfileParams) -> None:
        """Records steps of the engine.

        Raises:
            RequestError: a profile is running.
            EngineUnavailable: as `query`.
        """
        await self._ask(lambda number: StartProfile(number, params))

    async def stop_profile(self) -> None:
        """Ends the profile, and waits until its files are written.

        Raises:
            RequestError: none is running, or its files cannot be written.
            EngineUnavailable: as `query`.
        """
        await self._ask(StopProfile)

    @property
    def num_questions(self) -> int:
        """How many are not answered yet."""
        return len(self._queries)

    def end_questions(self) -> None:
        """Those that are not answered yet fail."""
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(EngineUnavailable("The server is shutting down."))

    async def _ask(self, question: Callable[[int], ToEngine]) -> dict[str, Any]:
        link, number = self._ready(), next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._queries[number] = answer
        link.send(question(number))
        try:
            return await answer
        finally:
            self._queries.pop(number, None)

    def _ready(self) -> EngineLink:
        if self._link is None or self.state is not EngineState.READY:
            raise EngineUnavailable(f"The engine is {self.state.value}; try again later.")
        return self._link

    def _forget(self, rid: str) -> Running:
        """A request is no longer in flight."""
        self._begun(rid)
        return self._running.pop(rid)

    def _begun(self, rid: str) -> None:
        """Its prompt is computed, or need not be any more."""
        self._num_queued_tokens -= self._queued_tokens.pop(rid, 0)

    # --- the engine's messages ------------------------------------------------------------------

    async def _supervise(self) -> str:
        """Reads messages, and starts a new engine whenever one has ended. Returns why no more."""
        backoff = Backoff()
        while True:
            reason = await self._read()
            self.state = EngineState.RESTARTING
            self._lose(reason)
            await self._end_hanging()
            while (delay := backoff.died()) is not None:
                log.error("%s: %s It is started again in %.1f s.", self.name, reason, delay)
                await asyncio.sleep(delay)
                backoff.started()
                try:
                    await self._start()
                    break
                except (ConfigError, ServerStartError) as error:
                    reason = str(error)
            else:
                self.state = EngineState.GIVEN_UP
                return f"{reason} It has died {MAX_QUICK_DEATHS + 1} times in a row."
            self.restarts += 1
            self.on_ready()
            log.warning("%s is ready again.", self.name)

    async def _start(self) -> None:
        assert self._folder is not None
        if self._link is not None:
            await self._link.close(at_once=True)
        link = EngineLink(
            self._placement,
            self._model_path,
            self._folder,
            self._log_format,
            self._watchdog_timeout,
        )
        link.on_end = self._engine_ended
        self._link = link
        self._info = await self._link.ready()
        self.state = EngineState.READY

    async def _end_hanging(self) -> None:
        """Kills an engine that hangs, once the log says where."""
        assert self._link is not None
        if self._link.hangs:
            self.metrics.watchdog_restarts += 1
            await self._link.log_stacks()
            await self._link.close(at_once=True)
            self._link = None

    def _engine_ended(self) -> None:
        """Forgets it at once: what it said is still read, but nothing new can be asked of it."""
        if self.state is EngineState.READY:
            self.state = EngineState.RESTARTING

    async def _read(self) -> str:
        """Takes messages until the process ends or hangs. Returns how."""
        link = self._link
        assert link is not None
        while (message := await link.receive()) is not None:
            match message:
                case Step(advances=advances, metrics=metrics):
                    now = time.monotonic()
                    for advance in advances:
                        self._advance(advance, now)
                    if metrics is not None:
                        self.snapshot = metrics
                case Reply():
                    self._answer(message)
        return link.end()

    def _advance(self, advance: Advance, now: float) -> None:
        known = self._running.get(advance.rid)
        # Ended by a stop string or its client while the step ran; its rid may be in use again.
        if known is None or known[0].number != advance.number:
            return
        generation, call = known
        if advance.tokens:
            self._begun(advance.rid)
            self.metrics.generated(generation, len(advance.tokens), now)
        try:
            finish = generation.apply(advance)
        except Exception as error:  # in one text: other requests are not affected
            log.exception("Detokenization failed.")
            self._fail(call, EngineFailed(f"{type(error).__name__}: {error}"))
            return
        if finish is not None and self._link is not None:
            self._link.send(finish)
        reason = generation.record.finish
        if reason is not None and reason.type == "abort":
            if reason.err_type == QUEUE_TIMEOUT:
                self.metrics.aborted[QUEUE_TIMEOUT] += 1
                self._fail(call, QueueTimeout(str(reason.message)))
            elif reason.err_type == GRAMMAR_ERROR:
                self._fail(call, bad_request(str(reason.message), code=GRAMMAR_ERROR))
            else:
                self._fail(call, EngineFailed(reason.message or "aborted"))
            return
        if reason is not None:
            self._forget(advance.rid)
            self.metrics.ended(generation, reason.type)
        call.notify(ended=reason is not None)

    def _fail(self, call: Call, error: ApiError) -> None:
        """Ends all generations of a call with an error."""
        call.fail(error)
        running = [g for g in call.generations if g.rid in self._running]
        for generation in running:
            self._forget(generation.rid)
            self.metrics.ended(generation, "error")
        if running and self._link is not None:
            self._link.send(Abort([generation.rid for generation in running]))

    def _answer(self, reply: Reply) -> None:
        future = self._queries.get(reply.number)
        if future is None or future.done():
            return
        if reply.error is not None and reply.busy:
            future.set_exception(GrammarBusy(reply.error))
        elif reply.error is not None:
            future.set_exception(RequestError(reply.error))
        else:
            future.set_result(reply.value or {})

    def _lose(self, reason: str) -> None:
        """Tells everyone who waits that the engine is gone."""
        error = EngineUnavailable(f"{reason} The request was lost.")
        lost = [self._forget(rid) for rid in list(self._running)]
        self.on_lost(lost, error)
        self.snapshot = None
        for future in self._queries.values():
            if not future.done():
                future.set_exception(error)
        self._queries.clear()
