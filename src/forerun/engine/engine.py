"""The engine: one loop over `schedule → launch → complete`, at overlap depth 0 or 1."""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections import deque
from pathlib import Path
from typing import Any

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import AlgorithmError, RequestError
from forerun.core.plan import StepPlan
from forerun.core.request import FinishReason, Request
from forerun.core.sampling_params import SamplingParams
from forerun.engine.stats import SpecStats
from forerun.engine.tracing import Tracing, start_tracing
from forerun.executor.build import Parts, build
from forerun.executor.runner import StepFuture
from forerun.sampling.table import check_stop_ids
from forerun.scheduler.adaptive_width import FixedWidth
from forerun.scheduler.scheduler import Scheduler

log = logging.getLogger("forerun")


class Engine:
    """Serves requests on one device, from token ids to token ids.

    Not thread-safe, but for `make_request`: one thread steps it.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        *,
        overlap_depth: int | None = None,
    ) -> None:
        """`overlap_depth` overrides what the device suggests (tests run depth 1 on a CPU)."""
        self.config = config
        spans = start_tracing(config)
        parts: Parts = build(config, model_path, overlap_depth)
        self.parts = parts
        self.model_config = parts.runner.step.model.config
        self.limits = parts.limits
        self._runner = parts.runner
        self._in_flight: deque[StepFuture] = deque()
        self.scheduler = Scheduler(parts.limits, parts.allocator, parts.prefix, parts.widths)
        algorithm = config.speculative_algorithm or "NONE"
        self._stats = SpecStats(algorithm.upper(), parts.limits.width - 1)
        self._tracing = Tracing(spans, parts.runner.step.clock) if spans else None
        self._last_result = 0.0  # time.monotonic() of the newest
        self._requests: dict[str, Request] = {}
        self._ids = itertools.count()
        self._seeds = random.Random(config.random_seed)

    # --- requests -------------------------------------------------------------------------------

    def make_request(
        self,
        prompt: list[int],
        params: SamplingParams,
        rid: str | None = None,
        seed_offset: int = 0,
    ) -> Request:
        """Checks a request without queueing it, so that a list is refused as a whole.

        Stop strings are not looked at: who reads text finds them, and calls `finish`.

        Raises:
            RequestError: it cannot be served.
        """
        vocab = self.model_config.vocab_size
        if not prompt:
            raise RequestError("The prompt is empty; give at least one token.")
        strange = [t for t in prompt if isinstance(t, bool) or not isinstance(t, int)]
        if strange:
            raise RequestError(f"input_ids must be integers, got {strange[0]!r}.")
        for what, ids in (("Token", prompt), ("Stop token", params.stop_token_ids)):
            outside = [t for t in ids if not 0 <= t < vocab]
            if outside:
                raise RequestError(f"{what} id {outside[0]} is outside the vocabulary of {vocab}.")
        rid = rid if rid is not None else f"request-{next(self._ids)}"
        eos = () if params.ignore_eos else self.model_config.eos_token_ids
        stop_ids = frozenset((*eos, *params.stop_token_ids))
        check_stop_ids(params, stop_ids)
        seed = params.sampling_seed
        seed = self._seeds.getrandbits(63) if seed is None else seed
        seed = (seed + seed_offset + 2**63) % 2**64 - 2**63  # samples of a prompt differ by one
        request = Request(rid, tuple(prompt), params, seed, stop_ids)
        self.scheduler.check(request)
        return request

    def submit(self, request: Request) -> None:
        """Queues a request made by `make_request`.

        Raises:
            RequestError: another with its id is running.
        """
        if request.rid in self._requests:
            raise RequestError(f"A request with id {request.rid!r} is running already.")
        self._requests[request.rid] = request
        if self._tracing is not None:
            self._tracing.open(request)
        self.scheduler.add(request)

    def abort(self, rid: str, message: str = "aborted by the user") -> None:
        """Ends a request; unknown ids (it may have just ended) are ignored."""
        request = self._requests.get(rid)
        if request is not None:
            self.scheduler.abort(request, message)

    def abort_all(self, message: str) -> None:
        """Ends all requests."""
        for request in list(self._requests.values()):
            self.scheduler.abort(request, message)

    def finish(self, request: Request, reason: FinishReason, num_tokens: int) -> None:
        """Ends a request with its first `num_tokens` output tokens: a stop string was found.

        What steps in flight still commit is dropped. A request that ended by itself in the step
        just booked may be finished, too, until it is closed.
        """
        self.scheduler.finish(request, reason, num_tokens)

    def close_request(self, request: Request) -> None:
        """Forgets an ended request; its figures are final."""
        self._requests.pop(request.rid, None)
        request.finished_at = time.monotonic()
        if self._tracing is not None:
            self._tracing.close(request)

    # --- the loop -------------------------------------------------------------------------------

    def bind_to_thread(self) -> None:
        """For the thread that is going to step: CUDA's current device belongs to a thread."""
        self._runner.bind_to_thread()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[Request]:
        """Launches the next step and books the one `depth` back.

        Returns the requests that got tokens or ended.
        """
        plan = self.scheduler.schedule()
        if plan is not None:
            self._in_flight.append(self._launch(plan))
        if not self._in_flight or (plan is not None and len(self._in_flight) <= self.limits.depth):
            return []
        future = self._in_flight.popleft()
        result, now = future.result(), time.monotonic()
        self._stats.count(future.plan, result)
        changed = self.scheduler.complete(future.plan, result)
        self._book_time(future, now)
        if self._tracing is not None:
            self._tracing.book(future, now)
        for request in changed:
            if request.first_token_at is None:
                request.first_token_at = now
        return changed

    def _launch(self, plan: StepPlan) -> StepFuture:
        """A step that raises ends its own requests and padding_slot else's."""
        try:
            future = self._runner.launch(plan)
        except Exception as error:
            self.scheduler.fail(plan, f"{type(error).__name__}: {error}")
            raise
        if future.error is not None:
            self._drafts_failed(plan, future.error)
        return future

    def _drafts_failed(self, plan: StepPlan, error: AlgorithmError) -> None:
        """The step itself is sound: drafts decide nothing but its speed."""
        self._stats.failures += 1
        if self.config.speculative_fallback:
            log.warning("Plain decoding from now on: %s", error)
            self._runner.step.guard.retire()
            self.scheduler.widths = FixedWidth((1,))
            return
        requests = [row.request for row in plan.decode] + [c.request for c in plan.prefill]
        for request in requests:
            if request.params.draft_limit(self.limits.width) > 0:
                self.scheduler.abort(request, str(error))

    def _book_time(self, future: StepFuture, now: float) -> None:
        """How long a decode step took: from its launch, or from the result before it."""
        plan = future.plan
        if plan.decode and not plan.prefill:
            seconds = now - max(future.launched, self._last_result)
            self.scheduler.widths.timed(len(plan.decode), plan.width, seconds)
        self._last_result = now

    # --- care -----------------------------------------------------------------------------------

    def flush_cache(self) -> None:
        """Forgets all cached prefixes.

        Raises:
            RequestError: requests are running.
        """
        self._drain()
        if self.has_work:
            raise RequestError("The cache cannot be flushed while requests run; try when idle.")
        self.parts.prefix.clear()

    def close(self) -> None:
        """Sends the spans that wait. The engine can still be used."""
        if self._tracing is not None:
            self._tracing.flush()

    def check(self) -> None:
        """Invariants that hold when idle: every page is free or cached, every slot is free."""
        self._drain()
        self.scheduler.check_idle()

    def _drain(self) -> None:
        """Books the steps in flight that only requests which ended still wait for."""
        while self._in_flight and not (self.scheduler.running or self.scheduler.waiting):
            self.step()

    def explain(self) -> dict[str, Any]:
        """What was chosen at start, and why."""
        return self.parts.explain

    def stats(self) -> dict[str, Any]:
        """Counters of speculation (see `SpecStats`), and what widths are chosen by."""
        return {**self._stats.as_dict(), "width": self.scheduler.widths.as_dict()}
