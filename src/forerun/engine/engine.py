"""The engine: a loop over `schedule → launch → complete`. No device code.

Steps run on an executor (`core/executor.py`), which may be in another process.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import RequestError
from forerun.core.executor import Executor, ExecutorInfo, PendingStep
from forerun.core.logprobs import LogprobParams
from forerun.core.plan import StepPlan
from forerun.core.pooling import Pooling
from forerun.core.request import FinishReason, Request
from forerun.core.sampling_params import SamplingParams
from forerun.core.scheduling_params import DEFAULT_SCHEDULING, SchedulingParams
from forerun.engine.deadlines import Deadlines, timeout_message
from forerun.engine.metrics import EngineMetrics, StepMetrics
from forerun.engine.profiling import Profiling
from forerun.engine.requests import RequestFactory
from forerun.engine.stats import SpecStats
from forerun.engine.tracing import Tracing, start_tracing
from forerun.kvcache.pages import PageAllocator
from forerun.kvcache.prefix_cache import NoPrefixCache, PrefixCache
from forerun.kvcache.radix_cache import RadixCache
from forerun.kvcache.window_pages import WindowPages
from forerun.scheduler.adaptive_width import AdaptiveWidth, FixedWidth, WidthPolicy
from forerun.scheduler.ragged_width import RaggedWidth
from forerun.scheduler.schedule_policy import SchedulePolicy
from forerun.scheduler.scheduler import CompletedStep, ScheduledStep, Scheduler

log = logging.getLogger("forerun")
LAUNCH_SECONDS = 0.004  # from planning a step to the device's having it, at most
HELD_SECONDS = 0.001  # between two looks at requests whose grammars take long, if no other run


class _InFlight(NamedTuple):
    """A launched step."""

    pending: PendingStep
    launched: float  # by the clock, before the launch
    idle: bool  # the engine had no work before it


class Engine:
    """Serves requests on one executor; input and output are token ids.

    Not thread-safe, except for `make_request`.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.executor = executor
        self._clock = clock
        self.info = info = executor.info
        self.limits = info.limits
        self._in_flight: deque[_InFlight] = deque()
        self._began = 0.0  # by the clock: the oldest step in flight, on the device
        self._idle = True  # nothing was left to do after the last step
        allocator = PageAllocator(info.num_pages)
        windows = _window_pages(info)
        self.scheduler = Scheduler(
            info.limits,
            allocator,
            _prefix_cache(config, info, allocator, windows),
            _width_policy(info),
            windows,
            _schedule_policy(config, info),
        )
        algorithm = config.speculative_algorithm or "NONE"
        self._stats = SpecStats(algorithm.upper(), info.limits.max_verify_tokens - 1)
        self._metrics = StepMetrics()
        spans = start_tracing(config)
        self._tracing = Tracing(spans) if spans else None
        self._requests: dict[str, Request] = {}
        self._deadlines = Deadlines()
        self.profiling = Profiling(executor)
        self._factory = RequestFactory(info, config.random_seed)

    # --- requests -------------------------------------------------------------------------------

    def make_request(
        self,
        prompt: list[int],
        params: SamplingParams,
        rid: str | None = None,
        seed_offset: int = 0,
        logprobs: LogprobParams | None = None,
        scheduling: SchedulingParams = DEFAULT_SCHEDULING,
        pooling: Pooling | None = None,
    ) -> Request:
        """Calls `RequestFactory.make`.

        Stop strings are ignored: the text layer finds them and calls `finish`.

        Raises:
            RequestError: it cannot be served.
        """
        request = self._factory.make(
            prompt, params, rid, seed_offset, logprobs, scheduling, pooling
        )
        if params.grammar is not None:
            self.executor.compile_grammar(params.grammar)
        return request

    def submit(self, request: Request, trace_context: Mapping[str, str] | None = None) -> None:
        """Queues a request made by `make_request`.

        Args:
            trace_context: W3C headers (`traceparent`, `tracestate`) of the span that its spans
                belong to; default: they are a trace of their own.

        Raises:
            RequestError: a request with this id is running.
        """
        if request.rid in self._requests:
            raise RequestError(f"A request with id {request.rid!r} is running already.")
        self._requests[request.rid] = request
        if self._tracing is not None:
            self._tracing.open(request, trace_context or {})
        self._deadlines.add(request)
        self.scheduler.add(request)

    def abort(self, rid: str, message: str = "aborted by the user") -> None:
        """Ends a request. Unknown ids are ignored: the request may have just ended."""
        request = self._requests.get(rid)
        if request is not None:
            self.scheduler.abort(request, message)

    def abort_all(self, message: str) -> None:
        """Ends all requests."""
        for request in list(self._requests.values()):
            self.scheduler.abort(request, message)

    def finish(self, request: Request, reason: FinishReason, num_tokens: int) -> None:
        """Ends a request with its first `num_tokens` output tokens: a stop string was found.

        Tokens of steps in flight are dropped. A request that has ended already may be finished too,
        until `close_request`.
        """
        self.scheduler.finish(request, reason, num_tokens)

    def close_request(self, request: Request) -> None:
        """Removes an ended request; its statistics are final."""
        self._requests.pop(request.rid, None)
        request.finished_at = self._clock()
        if self._tracing is not None:
            self._tracing.close(request)

    def drop(self, request: Request, message: str) -> None:
        """Aborts and removes a request whose caller is gone."""
        self.scheduler.abort(request, message)
        self.close_request(request)

    # --- the loop -------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def spare_seconds(self) -> float:
        """How long `step` can wait without the device having to: what comes until then joins it.

        A step that is launched goes on no earlier than the one before it has ended. Requests that
        arrive after its launch have to wait for all of it.
        """
        if not self._in_flight or len(self._in_flight) < self.limits.overlap_depth:
            return 0.0
        busy_until = self._began + self.scheduler.least_seconds
        return max(busy_until - LAUNCH_SECONDS - self._clock(), 0.0)

    def step(self) -> list[Request]:
        """Launches the next step and processes the result of the one `overlap_depth` before it.

        Returns the requests that got tokens or ended.
        """
        late = self._end_late_requests()
        self._resume()
        plan = self.scheduler.schedule()
        if plan is not None:
            self._launch(plan)
        elif self.scheduler.held and not self._in_flight:
            time.sleep(HELD_SECONDS)
        waits = plan is not None and len(self._in_flight) <= self.limits.overlap_depth
        if not self._in_flight or waits:
            return late
        step = self._in_flight.popleft()
        try:
            result = step.pending.result()
        except Exception as error:
            self._executor_failed(error)
            raise
        now = self._clock()
        # The device goes on with the next step. When the last one ended is not known if it was done
        # already: long ago maybe, while the host launched the next. That began then.
        began_late = result.late and self._in_flight
        self._began = self._in_flight[0].launched if began_late else now
        done = self.scheduler.complete(result)
        self._record(done, step, now)
        self._idle = not self.has_work
        for request in done.changed:
            if request.first_token_at is None:
                request.first_token_at = now
        return late + done.changed

    def _resume(self) -> None:
        """Queues the held requests whose masks are computed."""
        for request in list(self.scheduler.held):
            if self.executor.can_resume(request.rid):
                self.scheduler.resume(request)

    def _end_late_requests(self) -> list[Request]:
        """Aborts the requests whose deadline has passed."""
        late = []
        for request, err_type in self._deadlines.passed(self._clock()):
            self.scheduler.abort(request, timeout_message(request, err_type), err_type)
            late.append(request)
        return late

    def _launch(self, plan: StepPlan) -> None:
        """Launches a step; an exception aborts the requests of this step only."""
        self.profiling.before_step()
        launched = self._clock()
        try:
            self._in_flight.append(_InFlight(self.executor.launch(plan), launched, self._idle))
        except Exception as error:
            self.scheduler.fail(f"{type(error).__name__}: {error}")
            raise
        if len(self._in_flight) == 1:
            self._began = launched
        self._idle = False
        self.profiling.after_step(plan)
        for admission in plan.admitted:
            self._metrics.admitted(self._requests[admission.rid], launched)

    def _executor_failed(self, error: Exception) -> None:
        """Aborts the requests of the steps in flight: their results will not arrive."""
        for _ in range(1 + len(self._in_flight)):
            self.scheduler.fail(f"{type(error).__name__}: {error}")
        self._in_flight.clear()

    def _record(self, done: CompletedStep, step: _InFlight, now: float) -> None:
        plan, result = done.step.plan, done.result
        self._stats.count(done)
        self._metrics.completed(done, step.idle)
        if plan.decode and not plan.prefill:
            self.scheduler.widths.record_step_time(
                len(plan.decode), done.step.choice, result.seconds
            )
        if self._tracing is not None:
            self._tracing.record(done, step.launched, now)
        if result.warning is not None:
            log.warning("%s", result.warning)
            self._stats.warnings.append(result.warning)
        if result.error is not None:
            self._drafts_failed(done.step, result.error)

    def _drafts_failed(self, step: ScheduledStep, error: str) -> None:
        """The step's tokens are valid: drafts only affect speed."""
        self._stats.num_failures += 1
        if self.config.speculative_fallback:
            log.warning("Plain decoding from now on: %s", error)
            self.executor.disable_drafts()
            self.scheduler.widths = FixedWidth((1,))
            return
        for request in step.requests:
            if request.params.draft_limit(self.limits.max_verify_tokens) > 0:
                self.scheduler.abort(request, error)

    # --- maintenance ----------------------------------------------------------------------------

    def flush_cache(self) -> None:
        """Empties the prefix cache.

        Raises:
            RequestError: requests are running.
        """
        self.drain()
        if self.has_work:
            raise RequestError("The cache cannot be flushed while requests run; try when idle.")
        self.scheduler.prefix.clear()
        self._stats.mark_flush()

    def close(self) -> None:
        """Flushes spans, writes a profile that runs, and closes the executor."""
        if self._tracing is not None:
            self._tracing.flush()
        try:
            self.profiling.close()
        finally:
            self.executor.close()

    def check(self) -> None:
        """Checks invariants of an idle engine: all pages free or cached, all slots free."""
        self.drain()
        self.scheduler.check_idle()

    def drain(self) -> None:
        """Completes the steps in flight if all their requests have ended."""
        scheduler = self.scheduler
        while self._in_flight and not (scheduler.running or scheduler.waiting or scheduler.held):
            self.step()

    def load(self) -> dict[str, int]:
        """How busy the engine is: requests, and pages of the K/V pool."""
        scheduler = self.scheduler
        return {
            "num_running_reqs": len(scheduler.running),
            "num_waiting_reqs": len(scheduler.waiting) + len(scheduler.held),
            "max_running_requests": self.limits.slots,
            "num_free_pages": scheduler.allocator.num_free,
            "num_cached_pages": scheduler.prefix.num_pages,
            "num_evictable_pages": scheduler.prefix.num_evictable,
            "num_pages": scheduler.allocator.capacity,
            "page_size": self.limits.page_size,
        }

    def metrics(self) -> EngineMetrics:
        """Load and counters for monitoring. Its lists and histograms are the engine's own."""
        stats, steps, widths = self._stats, self._metrics, self.scheduler.widths
        return EngineMetrics(
            load=self.load(),
            step_costs=widths.step_costs(),
            steps_by_width={width: widths.chosen[width] for width in widths.widths},
            request_steps=stats.num_request_steps,
            decode_tokens=stats.num_tokens,
            accepted=stats.accepted,
            draft_tokens=stats.num_draft_tokens,
            confidences=stats.confidences,
            algorithm_failures=stats.num_failures,
            prefix=steps.prefix,
            tracked_states=self.scheduler.states.num_tracked,
            preemptions=steps.preemptions,
            queue_seconds=steps.queue_seconds,
            waiting_by_priority=dict(
                Counter(request.scheduling.priority for request in self.scheduler.waiting)
            ),
            mixed_prefill_tokens=self.scheduler.prefill_budget.tokens(mixed=True),
            decode_seconds=steps.decode_seconds,
            mixed_seconds=steps.mixed_seconds,
            prefill_seconds=steps.prefill_seconds,
            gap_seconds=steps.gap_seconds,
        )

    def explain(self) -> dict[str, Any]:
        """Choices made at start, and why."""
        return self.info.explain

    def stats(self) -> dict[str, Any]:
        """Counters of speculation (see `SpecStats`) and the state of the width policy."""
        return {**self._stats.as_dict(), "width": self.scheduler.widths.as_dict()}


def _window_pages(info: ExecutorInfo) -> WindowPages | None:
    if info.num_window_pages is None:
        return None
    limits = info.limits
    return WindowPages(
        info.num_window_pages, limits.page_size, limits.window, info.window_in_prefill
    )


def _prefix_cache(
    config: EngineConfig,
    info: ExecutorInfo,
    allocator: PageAllocator,
    windows: WindowPages | None,
) -> PrefixCache:
    if config.disable_radix_cache:
        return NoPrefixCache()
    return RadixCache(
        allocator, info.limits.page_size, info.prefix_lookahead, info.num_snapshots, windows
    )


def _schedule_policy(config: EngineConfig, info: ExecutorInfo) -> SchedulePolicy:
    return SchedulePolicy(
        longest_prefix=config.schedule_policy == "lpm",
        low_priority_values_first=config.schedule_low_priority_values_first,
        max_prefill_tokens=config.max_prefill_tokens,
        max_mixed_step=config.max_mixed_step_ms / 1000,
        max_first_gap=config.max_first_gap_ms / 1000,
        track_interval=config.mamba_track_interval if info.num_snapshots else 0,
    )


def _width_policy(info: ExecutorInfo) -> WidthPolicy:
    if info.step_costs is None:
        return FixedWidth(info.verify_widths)
    if info.limits.ragged and info.tree_depth is None:
        return RaggedWidth(
            info.verify_widths,
            info.step_costs,
            info.draft_costs,
            info.drafting_parts,
            info.limits.has_uniform_passes,
        )
    widths = [int(width) for width in info.verify_widths]
    return AdaptiveWidth(widths, info.step_costs, info.tree_depth)
