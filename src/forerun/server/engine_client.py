"""The API process's side of the engine: starts it, feeds it, and starts it again when it dies."""

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
from typing import Any

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError, RequestError
from forerun.core.executor import ExecutorInfo
from forerun.core.grammar import Grammar
from forerun.core.request import QUEUE_TIMEOUT, FinishReason
from forerun.engine.requests import RequestFactory
from forerun.server.backoff import MAX_QUICK_DEATHS, Backoff
from forerun.server.engine_link import EngineLink
from forerun.server.errors import (
    ApiError,
    EngineFailed,
    EngineUnavailable,
    QueueTimeout,
    ServerStartError,
)
from forerun.server.generation import Call, Generation
from forerun.server.messages import (
    Abort,
    Advance,
    Compile,
    NewRequest,
    Query,
    Reply,
    Step,
    Submit,
    ToEngine,
)
from forerun.server.metrics import ServerMetrics

log = logging.getLogger("forerun")


class EngineState(Enum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    CLOSED = "closed"


class EngineClient:
    """All methods belong to the event loop's thread."""

    def __init__(self, config: EngineConfig, model_path: Path, log_format: str = "plain") -> None:
        self.config = config
        self.model_path = model_path
        self.metrics = ServerMetrics()
        self._log_format = log_format
        self.state = EngineState.STARTING
        self.restarts = 0
        self._folder = Path(tempfile.mkdtemp(prefix="forerun-"))  # 0700
        self._link: EngineLink | None = None
        self._info: ExecutorInfo | None = None
        self._factory: RequestFactory | None = None
        self._calls: dict[str, tuple[Generation, Call]] = {}  # by request id
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
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def info(self) -> ExecutorInfo:
        """Of the engine that runs, or ran last."""
        assert self._info is not None
        return self._info

    @property
    def factory(self) -> RequestFactory:
        """Checks and makes requests as the engine does."""
        assert self._factory is not None
        return self._factory

    @property
    def pid(self) -> int | None:
        """Of the engine process, while there is one."""
        return self._link.pid if self._link is not None else None

    # --- requests -------------------------------------------------------------------------------

    @property
    def num_requests(self) -> int:
        """Requests in flight, running or waiting."""
        return len(self._calls)

    def is_known(self, rid: str) -> bool:
        return rid in self._calls

    def submit(self, call: Call) -> None:
        """Queues the generations of a call.

        Raises:
            EngineUnavailable: there is no engine at the moment.
        """
        link = self._ready()
        for generation in call.generations:
            generation.number = next(self._numbers)
        self._calls |= {generation.rid: (generation, call) for generation in call.generations}
        link.send(
            Submit(
                [
                    NewRequest(
                        g.rid,
                        list(g.record.prompt),
                        replace(g.params, sampling_seed=g.seed, n=1, stop=()),
                        logprobs=g.record.logprobs,
                        trace_context=call.trace_context,
                        # A call's own deadline is kept here: it holds while a step takes long.
                        scheduling=replace(g.scheduling, request_timeout=None),
                        number=g.number,
                    )
                    for g in call.generations
                ]
            )
        )

    def abort(self, rids: Sequence[str], reason: str = "disconnect") -> None:
        """Ends requests with what has arrived; their callers get it. Unknown ids are ignored.

        Args:
            reason: one of `ABORTED`, for the metrics; a call's deadline is known without it.
        """
        known = [rid for rid in rids if rid in self._calls]
        if known and self._link is not None:
            self._link.send(Abort(known))
        for rid in known:
            generation, call = self._calls.pop(rid)
            generation.end(FinishReason("abort", message="aborted by the user"))
            self.metrics.aborted[reason if call.error is None else "timeout"] += 1
            self.metrics.ended(generation, "abort")
            call.notify(ended=True)

    def abort_group(self, group: str) -> None:
        """`abort` of all samples of a prompt, by the id that the client gave."""
        rids = [rid for rid, (g, _) in self._calls.items() if g.group == group]
        self.abort(rids, "abort_request")

    def abort_all(self) -> None:
        self.abort(list(self._calls), "abort_request")

    async def query(self, what: str) -> dict[str, Any]:
        """Asks the engine between two steps.

        Raises:
            RequestError: it cannot do that now.
            EngineUnavailable: there is no engine at the moment, or it dies before it answers.
        """
        return await self._ask(lambda number: Query(number, what))

    async def compile_grammar(self, grammar: Grammar) -> None:
        """Compiles a grammar, so that a request that names it starts at once.

        Raises:
            RequestError: it is invalid or takes too long, or xgrammar is not installed.
            EngineUnavailable: as `query`.
        """
        await self._ask(lambda number: Compile(number, grammar))

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

    # --- the engine's messages ------------------------------------------------------------------

    async def _supervise(self) -> str:
        """Reads messages, and starts a new engine whenever one has ended. Returns why no more."""
        backoff = Backoff()
        while True:
            reason = await self._read()
            self.state = EngineState.RESTARTING
            self._lose(reason)
            while (delay := backoff.died()) is not None:
                log.error("%s It is started again in %.1f s.", reason, delay)
                await asyncio.sleep(delay)
                backoff.started()
                try:
                    await self._start()
                    break
                except (ConfigError, ServerStartError) as error:
                    reason = str(error)
            else:
                return f"{reason} It has died {MAX_QUICK_DEATHS + 1} times in a row."
            self.restarts += 1
            log.warning("The engine is ready again.")

    async def _start(self) -> None:
        if self._link is not None:
            await self._link.close(at_once=True)
        link = EngineLink(self.config, self.model_path, self._folder, self._log_format)
        link.on_end = self._engine_ended
        self._link = link
        self._info = await self._link.ready()
        self._factory = RequestFactory(self._info, self.config.random_seed)
        self.state = EngineState.READY

    def _engine_ended(self) -> None:
        """At once: what it said before is still read, but nothing new can be asked of it."""
        if self.state is EngineState.READY:
            self.state = EngineState.RESTARTING

    async def _read(self) -> str:
        """Takes messages until the process ends. Returns how it ended."""
        link = self._link
        assert link is not None
        while (message := await link.receive()) is not None:
            match message:
                case Step(advances=advances, metrics=metrics):
                    now = time.monotonic()
                    for advance in advances:
                        self._advance(advance, now)
                    if metrics is not None:
                        self.metrics.engine = metrics
                case Reply():
                    self._answer(message)
        return link.end()

    def _advance(self, advance: Advance, now: float) -> None:
        known = self._calls.get(advance.rid)
        # Ended by a stop string or its client while the step ran; its rid may be in use again.
        if known is None or known[0].number != advance.number:
            return
        generation, call = known
        if advance.tokens:
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
            else:
                self._fail(call, EngineFailed(reason.message or "aborted"))
            return
        if reason is not None:
            del self._calls[advance.rid]
            self.metrics.ended(generation, reason.type)
        call.notify(ended=reason is not None)

    def _fail(self, call: Call, error: ApiError) -> None:
        """Ends all generations of a call with an error."""
        call.fail(error)
        running = [g for g in call.generations if g.rid in self._calls]
        for generation in running:
            del self._calls[generation.rid]
            self.metrics.ended(generation, "error")
        if running and self._link is not None:
            self._link.send(Abort([generation.rid for generation in running]))

    def _answer(self, reply: Reply) -> None:
        future = self._queries.get(reply.number)
        if future is None or future.done():
            return
        if reply.error is not None:
            future.set_exception(RequestError(reply.error))
        else:
            future.set_result(reply.value or {})

    def _lose(self, reason: str) -> None:
        """Tells everyone who waits that the engine is gone."""
        error = EngineUnavailable(f"{reason} The request was lost.")
        for generation, call in self._calls.values():
            call.fail(error)
            self.metrics.ended(generation, "error")
        self._calls.clear()
        self.metrics.engine = None
        for future in self._queries.values():
            if not future.done():
                future.set_exception(error)
        self._queries.clear()
