"""All engines of a server: each request goes to one of them, and what concerns all goes to all.

A replica that dies fails only the requests that ran on it. Of those, the ones of which no client
has seen anything run again on another replica.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forerun.config.engine_config import EngineConfig
from forerun.core.executor import ExecutorInfo
from forerun.core.grammar import Grammar
from forerun.core.profile import ProfileParams
from forerun.engine.metrics import EngineMetrics, combined
from forerun.engine.requests import RequestFactory
from forerun.server.engines.client import EngineClient, EngineState, Running
from forerun.server.engines.metrics import ServerMetrics
from forerun.server.engines.placement import place_replicas
from forerun.server.engines.routing import Router, block_size
from forerun.server.engines.watchdog import WATCHDOG_TIMEOUT
from forerun.server.generation import Call, Generation
from forerun.server.http.errors import ApiError, EngineUnavailable
from forerun.server.prompt import Prompt

log = logging.getLogger("forerun")

MAX_RESTARTS = 1  # of a request: it may be what its replica died of


class Replicas:
    """All methods belong to the event loop's thread."""

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        count: int = 1,
        method: str = "cache_aware",
        log_format: str = "plain",
        watchdog_timeout: float = WATCHDOG_TIMEOUT,
    ) -> None:
        """
        Args:
            config: of every replica; their devices follow from `count`.
            method: how requests are routed.
            watchdog_timeout: seconds after which a silent engine is replaced; 0: never.

        Raises:
            ConfigError: there are too few GPUs.
        """
        self.config, self.model_path = config, model_path
        self.metrics = ServerMetrics()
        self._method = method
        self.clients: list[EngineClient] = []
        self._past: EngineMetrics | None = None  # counters of engines that have ended
        self._router: Router[int] | None = None
        self._factory: RequestFactory | None = None
        self._num_pages = 0  # that it knows
        self._closed = False
        for index, placement in enumerate(place_replicas(config, count)):
            name = "The engine" if count == 1 else f"Replica {index}"
            client = EngineClient(
                placement, model_path, self.metrics, log_format, name, watchdog_timeout
            )
            client.on_lost = self._on_lost(client, index)
            client.on_ready = self._update_factory
            self.clients.append(client)

    # --- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts all engines, and waits until they are ready.

        Raises:
            ConfigError: the settings cannot work.
            ServerStartError: a process ended.
        """
        starting = [asyncio.ensure_future(client.start()) for client in self.clients]
        try:
            await asyncio.gather(*starting)
        finally:
            for task in starting:
                task.cancel()
            await asyncio.wait(starting)
        caches = not self.config.disable_radix_cache
        self._router = Router(self._method, block_size(self.info.limits.page_size))
        for index, client in enumerate(self.clients):
            self._router.add(index, _capacity(client.info) if caches else 0)
        self._update_factory()

    async def gave_up(self) -> str:
        """Waits until all engines have died too often, and says how the last one did."""
        left = [asyncio.ensure_future(client.gave_up()) for client in self.clients]
        try:
            for number, each in enumerate(asyncio.as_completed(left), 1):
                reason = await each
                if number < len(left):
                    log.critical(
                        "%s %d of %d replicas are left.", reason, len(left) - number, len(left)
                    )
        finally:
            for task in left:
                task.cancel()
        return reason

    async def close(self, at_once: bool = False) -> None:
        """Ends all engines; requests in flight fail."""
        self._closed = True
        await asyncio.gather(*(client.close(at_once) for client in self.clients))

    @property
    def state(self) -> EngineState:
        """READY if one replica serves."""
        states = [client.state for client in self.clients]
        return EngineState.READY if EngineState.READY in states else states[0]

    @property
    def info(self) -> ExecutorInfo:
        """Facts of the replica with the fewest pages: what it can serve, all can."""
        return min((client.info for client in self.clients), key=lambda info: info.num_pages)

    @property
    def is_ready(self) -> bool:
        """Whether a replica serves."""
        return self.state is EngineState.READY

    @property
    def slots(self) -> int:
        """Requests that can run at the same time."""
        return sum(client.info.limits.slots for client in self.clients)

    @property
    def factory(self) -> RequestFactory:
        """Checks and makes requests as the engines do."""
        assert self._factory is not None
        return self._factory

    @property
    def restarts(self) -> int:
        return sum(client.restarts for client in self.clients)

    # --- requests -------------------------------------------------------------------------------

    @property
    def num_requests(self) -> int:
        """Requests in flight, running or waiting."""
        return sum(client.num_requests for client in self.clients)

    def is_known(self, rid: str) -> bool:
        return any(client.is_known(rid) for client in self.clients)

    def place(self, prompts: Sequence[Prompt]) -> list[tuple[int, int]]:
        """Gives every prompt a replica, and how many of its tokens are probably not cached there.

        Raises:
            EngineUnavailable: none serves at the moment.
        """
        assert self._router is not None
        loads = {index: client.load for index, client in enumerate(self.clients)}
        serving = [index for index in loads if self.clients[index].state is EngineState.READY]
        if not serving:
            raise EngineUnavailable(f"The engine is {self.state.value}; try again later.")
        placed = []
        for prompt in prompts:
            among = serving if prompt.replica is None else [prompt.replica]
            replica, cached = self._router.choose(prompt.ids, {i: loads[i] for i in among})
            uncached = len(prompt.ids) - cached
            loads[replica] = loads[replica].plus(prompt.n, uncached)
            self.metrics.routed[replica] += prompt.n
            self.metrics.routed_cached_tokens += cached
            placed.append((replica, uncached))
        return placed

    async def compile_grammar(self, grammar: Grammar, replica: int, client: str = "") -> None:
        """Compiles a grammar where a request that names it goes, so that it starts at once.

        Raises:
            RequestError: it is invalid or takes too long, or xgrammar is not installed.
            GrammarBusy: it cannot be compiled now.
            EngineUnavailable: no replica serves at the moment.
        """
        chosen = self.clients[replica]
        others = [c for c in self.clients if c is not chosen and c.state is EngineState.READY]
        for each in (chosen, *others):
            try:
                return await each.compile_grammar(grammar, client)
            except EngineUnavailable as error:
                unavailable = error  # another one may still refuse it
        raise unavailable

    def submit(self, call: Call) -> None:
        """Queues the generations of a call on their replicas, or on others if those have died.

        Raises:
            EngineUnavailable: none serves at the moment.
        """
        by_replica: dict[int, list[Generation]] = {}
        for generation in call.generations:
            if self.clients[generation.replica].state is not EngineState.READY:
                self._move(generation)
            by_replica.setdefault(generation.replica, []).append(generation)
        for replica, generations in by_replica.items():
            self.clients[replica].submit(generations, call)

    def abort(self, rids: Sequence[str], reason: str = "disconnect") -> None:
        """Ends requests with what has arrived; their callers get it. Unknown ids are ignored."""
        for client in self.clients:
            client.abort(rids, reason)

    def abort_group(self, group: str, belongs: Callable[[Call], bool]) -> None:
        """Calls `EngineClient.abort_group`."""
        for client in self.clients:
            client.abort_group(group, belongs)

    def abort_all(self) -> None:
        for client in self.clients:
            client.abort_all()

    # --- questions ------------------------------------------------------------------------------

    @property
    def num_questions(self) -> int:
        """How many are not answered yet."""
        return sum(client.num_questions for client in self.clients)

    def end_questions(self) -> None:
        """Those that are not answered yet fail."""
        for client in self.clients:
            client.end_questions()

    async def query(self, what: str) -> list[dict[str, Any]]:
        """The answers of all replicas that serve.

        Raises:
            RequestError: one cannot do that now.
            EngineUnavailable: none serves at the moment.
        """
        asked = [client.query(what) for client in self._serving()]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        given = [answer for answer in answers if isinstance(answer, dict)]
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        for error in errors:
            if not given or not isinstance(error, EngineUnavailable):
                raise error
        return given

    def _serving(self) -> list[EngineClient]:
        serving = [client for client in self.clients if client.state is EngineState.READY]
        if not serving:
            raise EngineUnavailable(f"The engine is {self.state.value}; try again later.")
        return serving

    async def start_profile(self, params: ProfileParams) -> None:
        """Records steps of every replica that serves, or of none. Errors are those of `query`."""
        serving = self._serving()
        for at, client in enumerate(serving):
            name = params.name
            if len(self.clients) > 1:
                name += f"-DP-{self.clients.index(client)}"
            try:
                await client.start_profile(replace(params, name=name))
            except BaseException:
                await asyncio.gather(
                    *(c.stop_profile() for c in serving[:at]), return_exceptions=True
                )
                raise

    async def stop_profile(self) -> list[str]:
        """Ends the profile, and waits until its files are written.

        Returns:
            What went wrong on some replicas: one that was started again in between has no profile.

        Raises:
            RequestError: none is running, or its files cannot be written.
            EngineUnavailable: none serves at the moment.
        """
        stopping = [client.stop_profile() for client in self._serving()]
        results = await asyncio.gather(*stopping, return_exceptions=True)
        errors = [result for result in results if result is not None]
        if len(errors) == len(results):
            raise errors[0]
        return [str(error) for error in errors]

    async def flush_cache(self) -> None:
        """Empties all prefix caches; errors as of `query`."""
        await self.query("flush_cache")
        assert self._router is not None
        for index in range(len(self.clients)):
            self._router.forget(index)

    async def loads(self) -> dict[str, Any]:
        """Loads of all replicas together, and of each; errors are those of `query`."""
        each = await self.query("load")
        total = Counter[str]()
        for load in each:
            total.update(load)
        return {**total, "page_size": each[0]["page_size"], "loads": each}

    def engine_metrics(self) -> EngineMetrics | None:
        """Metrics of all engines together, counters of ended ones included; None: none runs."""
        running = [client.snapshot for client in self.clients if client.snapshot is not None]
        if not running:
            return None
        return combined([*running, self._past] if self._past is not None else running)

    # --- replicas that die ----------------------------------------------------------------------

    def _on_lost(self, client: EngineClient, index: int) -> Any:
        def lost(running: list[Running], error: ApiError) -> None:
            self._keep_counters(client)
            if self._router is not None:
                self._router.forget(index)
            gone = {each.call for each in running if not self._can_move(each)}
            client.fail_all([each for each in running if each.call in gone], error)
            for each in running:
                if each.call not in gone:
                    self._run_again(client, each, error)

        return lost

    def _can_move(self, running: Running) -> bool:
        generation, call = running
        others = any(client.state is EngineState.READY for client in self.clients)
        used_up = generation.was_shown or generation.restarts >= MAX_RESTARTS
        return others and not (used_up or self._closed or call.error is not None)

    def _run_again(self, client: EngineClient, running: Running, error: ApiError) -> None:
        """Runs it on another replica, from the start."""
        generation, call = running
        generation.restart()
        try:
            self._move(generation)
            self.clients[generation.replica].submit([generation], call)
        except EngineUnavailable:
            client.fail_all([running], error)
            return
        self.metrics.retried += 1

    def _move(self, generation: Generation) -> None:
        """Chooses another replica for it."""
        prompt = Prompt(list(generation.record.prompt), generation.params)
        ((generation.replica, generation.uncached_tokens),) = self.place([prompt])

    def _keep_counters(self, client: EngineClient) -> None:
        if client.snapshot is not None:
            ended = client.snapshot.without_load()
            self._past = ended if self._past is None else combined([self._past, ended])

    def _update_factory(self) -> None:
        """Adapts it after a start: the pool may be smaller than before."""
        if self._num_pages != self.info.num_pages:  # else its random seeds go on
            self._num_pages = self.info.num_pages
            self._factory = RequestFactory(self.info, self.config.random_seed)


def _capacity(info: ExecutorInfo) -> int:
    """Tokens of the K/V pool."""
    return (info.num_pages - 1) * info.limits.page_size
