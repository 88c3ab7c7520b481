"""What runs next: admission, chunked prefill, page reservation, preemption. No torch.

The host knows lengths only as upper bounds (`_ub`) while steps are in flight. Before a step it
reserves pages for the worst case. Slots and pages are released only after the last step that can
write them has completed.

Ownership of pages:

| page                               | owner        | released                                    |
|------------------------------------|--------------|---------------------------------------------|
| in the prefix cache                | prefix cache | by eviction, never while a request locks it |
| of a request, matched at admission | prefix cache | unlocked when the request is released       |
| of a request, past the match       | the request  | inserted into the cache or freed with it    |
| all others                         | allocator    |                                             |

Window pages, where pools are windowed, are taken and given back by `windows.py`.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from forerun.core.errors import ContextLengthError, InternalError, RequestError
from forerun.core.logprobs import TokenLogprobs
from forerun.core.plan import (
    Admission,
    DecodeRequest,
    DeferredCount,
    Failure,
    Limits,
    PageWrite,
    PrefillChunk,
    SnapshotCopy,
    StepPlan,
    StepResult,
    TrackedState,
)
from forerun.core.request import FinishReason, Request, State
from forerun.kvcache.pages import PageAllocator
from forerun.kvcache.prefix_cache import MatchResult, PrefixCache
from forerun.kvcache.window_pages import WindowPages
from forerun.scheduler.adaptive_width import PLAIN, VerifyOutcome, WidthChoice, WidthPolicy
from forerun.scheduler.decode_turns import DecodeTurns
from forerun.scheduler.prefill_budget import PrefillBudget
from forerun.scheduler.schedule_policy import SchedulePolicy
from forerun.scheduler.state_tracker import StateTracker
from forerun.scheduler.stop_checker import append_tokens
from forerun.scheduler.waiting_queue import WaitingQueue, order_of
from forerun.scheduler.windows import Windows


@dataclass(frozen=True, slots=True)
class PageTableUpdate:
    """Page-table entries of a request that changed after they were written."""

    request: Request
    first: int
    pages: tuple[int, ...]


@dataclass(slots=True)
class ScheduledStep:
    """A plan and the requests of its entries, kept until the result arrives."""

    plan: StepPlan
    decode: list[Request] = field(default_factory=list)  # of `plan.decode`
    prefill: list[Request] = field(default_factory=list)  # of `plan.prefill`
    deferred: list[tuple[Request, int]] = field(default_factory=list)  # of `plan.deferred`
    updates: list[PageTableUpdate] = field(default_factory=list)  # among `plan.page_writes`
    tracked: dict[Request, TrackedState] = field(default_factory=dict)  # of `plan.tracked`
    choice: WidthChoice = PLAIN  # of the width policy

    @property
    def requests(self) -> list[Request]:
        return self.decode + self.prefill


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A step whose result the scheduler has processed."""

    step: ScheduledStep
    result: StepResult
    # Indices of the decode requests that took its tokens: they had neither ended nor left before.
    live: list[int]
    changed: list[Request]  # requests that got tokens or ended


def check_fits(request: Request, limits: Limits, num_pages: int) -> None:
    """Refuses a request that does not fit even when it runs alone.

    Args:
        num_pages: pages of the K/V pool, without the null page.

    Raises:
        RequestError: it exceeds the context length or the K/V pool.
    """
    _check_length(request, limits, num_pages)
    prompt, new = len(request.prompt), request.params.max_new_tokens
    need = limits.pages(prompt + new + limits.overshoot)
    if need > num_pages:
        raise RequestError(
            f"The request needs {need} K/V pages and the pool has {num_pages}; lower"
            " max_new_tokens or raise max_total_tokens."
        )


def _check_length(request: Request, limits: Limits, num_pages: int) -> None:
    prompt, new = len(request.prompt), request.params.max_new_tokens
    length = limits.context_length
    if prompt + new <= length:
        return
    if request.pooling is not None:
        how = f", and the input has {prompt}; shorten it, or set truncate_prompt_tokens."
        raise ContextLengthError.of(length, how)
    room = limits.room(prompt, num_pages)
    if room <= 0:
        how = f", output included, and the prompt has {prompt}; shorten the prompt."
        raise ContextLengthError.of(length, how)
    how = f", and the prompt has {prompt}; max_new_tokens can be at most {room}, got {new}."
    raise ContextLengthError.of(length, how)


class Scheduler:
    """Turns requests into step plans, and step results into output tokens."""

    def __init__(
        self,
        limits: Limits,
        allocator: PageAllocator,
        prefix: PrefixCache,
        widths: WidthPolicy,
        window_pages: WindowPages | None = None,
        policy: SchedulePolicy | None = None,
    ) -> None:
        self.limits = limits
        self.policy = policy = policy or SchedulePolicy()
        self.windows = Windows(limits, window_pages)
        self.allocator = allocator
        self.prefix = prefix
        self.states = StateTracker(prefix, policy.track_interval)
        self.widths = widths
        self.waiting = WaitingQueue(prefix, policy.longest_prefix)
        self.running: list[Request] = []  # by `Request.order`; the last is preempted first
        self._arrivals = itertools.count()
        self.limit_mixed_steps(policy.max_mixed_step)
        self.held: list[Request] = []  # preempted until `resume`: their grammars take long
        self._leaving: set[Request] = set()  # ended or preempted, with steps in flight
        self._free_slots = list(range(limits.slots - 1, -1, -1))
        self._updates: list[PageTableUpdate] = []  # not in a plan yet
        self._uncleared: list[int] = []  # released pages of failed requests
        self._scheduled: deque[ScheduledStep] = deque()  # oldest first; results come in this order

    def limit_mixed_steps(self, seconds: float) -> None:
        """Sets `SchedulePolicy.max_mixed_step`, and forgets how long steps take."""
        self.policy = replace(self.policy, max_mixed_step=seconds)
        most = self.limits.chunked_prefill_size
        most = min(most, self.policy.max_prefill_tokens or most)
        self.turns = DecodeTurns(self.policy, most)
        self.prefill_budget = PrefillBudget(most, seconds, self.turns.times)

    # --- requests -------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request that has passed `check_fits`."""
        rank = self.policy.rank(request.scheduling.priority)
        request.order = (rank, next(self._arrivals))
        self.waiting.add(request)

    def abort(self, request: Request, message: str, err_type: str | None = None) -> None:
        """Ends a request in any state; slot and pages are released once no step can write them."""
        if request.state is State.FINISHED:
            return
        request.finish = FinishReason("abort", message=message, err_type=err_type)
        self._end(request)

    def finish(self, request: Request, reason: FinishReason, num_tokens: int) -> None:
        """Ends a request with its first `num_tokens` output tokens and `reason`.

        The request may have ended already in the step just completed, if a stop string is found
        before that end.
        """
        request.trim(num_tokens)
        request.finish = reason
        if request.state is not State.FINISHED:
            self._end(request)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.held or self._leaving)

    def resume(self, request: Request) -> None:
        """Queues a held request again, at its place."""
        self.held.remove(request)
        self.waiting.add(request)

    # --- one step -------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can run now."""
        step = ScheduledStep(StepPlan())
        if (burst := self.turns.burst_tokens) and self._prompt_tokens() >= burst:
            self.turns.begin_burst()
        decoding, rank = self._decoding(), self._prompt_rank()
        if tokens := self.turns.tokens_before_decode(decoding, rank):
            self._plan_prefill(step, tokens)
            if not step.prefill:
                self.turns.no_prompts()
        if not step.prefill:
            self._plan_decode(step, decoding, rank)
            self._choose_width(step)
            self._plan_tracking(step)
            if not tokens:
                most = self.prefill_budget.tokens(mixed=bool(step.decode))
                beside = self.turns.tokens_beside_decode(most) if step.decode else most
                self._plan_prefill(step, beside)
        self.turns.planned(step.plan, step.decode)
        if not (step.decode or step.prefill):
            return None
        step.plan.cleared_pages, self._uncleared = self._uncleared, []
        step.plan.cleared_window_pages, self.windows.uncleared = self.windows.uncleared, []
        step.updates, self._updates = self._updates, []
        step.plan.page_writes[:0] = [
            PageWrite(update.request.slot, update.first, update.pages) for update in step.updates
        ]
        self._scheduled.append(step)
        return step.plan

    @property
    def least_seconds(self) -> float:
        """What the oldest step in flight takes on the device, probably; 0: not known."""
        plan = self._scheduled[0].plan
        return self.turns.times.least(plan.num_prefill_tokens, bool(plan.decode))

    def complete(self, result: StepResult) -> CompletedStep:
        """Processes the result of the oldest step in flight."""
        step = self._scheduled.popleft()
        took = step.plan.num_prefill_tokens, bool(step.decode), result.seconds
        self.prefill_budget.record(*took)
        self.turns.times.record(*took)
        failed = {each.slot: each for each in result.failed}
        live = self._complete_decode(step, result, failed)
        changed = [step.decode[at] for at in live]
        changed += self._complete_prefill(step, result, failed)
        return CompletedStep(step, result, live, changed)

    def fail(self, message: str) -> None:
        """The last scheduled step could not be launched: aborts its requests."""
        step = self._scheduled.pop()
        for request, count in step.deferred:
            request.pending_observe += count
        for request in step.requests:
            request.pending.pop()
            if request.state is not State.FINISHED:
                self.abort(request, message)
            self._settle(request)
        # Requests that continue still need the updates that this step was to write.
        kept = [update for update in step.updates if update.request.slot >= 0]
        self._updates = kept + self._updates
        self._uncleared[:0] = step.plan.cleared_pages
        self.windows.uncleared[:0] = step.plan.cleared_window_pages

    def _complete_decode(
        self, step: ScheduledStep, result: StepResult, failed: dict[int, Failure]
    ) -> list[int]:
        """Returns `CompletedStep.live`."""
        live, held = [], result.held
        logprobs = result.decode_logprobs or [[]] * len(step.decode)
        results = zip(step.decode, result.decode, logprobs, strict=True)
        for at, (request, tokens, of_tokens) in enumerate(results):
            request.pending.pop(0)
            if held and not tokens and request.slot in held:
                self._hold(request)  # not a verify pass: what was sampled does not count
            elif request.state is not State.FINISHED:
                live.append(at)
                request.kv_len += len(tokens)
                request.verify_ct += 1
                if step.tracked and request in step.tracked and request.slot not in failed:
                    before = request.kv_len - len(tokens)
                    self.states.complete(request, step.tracked[request], before)
                self._append(request, tokens, of_tokens, failed, verified=True)
                if held and request.slot in held:
                    self._hold(request)
            if self._leaving:
                self._settle(request)
        if live:
            self._record_outcomes(step, result, live)
        if result.survivals:
            self.widths.record_survivals(step.decode, result.survivals)
        return live

    def _record_outcomes(self, step: ScheduledStep, result: StepResult, live: list[int]) -> None:
        """Tells the width policy what became of the drafts."""
        if step.plan.num_verify_tokens == 1:
            self.widths.record_plain_step([step.decode[at] for at in live])
            return
        outcomes, verified = [], result.drafts_of(step.plan)
        for at in live:
            request, count = step.decode[at], verified[at]
            drafts = request.params.draft_limit(count)
            request.proposed += drafts
            nodes = result.decode_nodes[at] if result.decode_nodes else None
            if nodes is not None and drafts > 0:  # the limit is on the depth of a tree
                drafts = count
            accepted = max(len(result.decode[at]) - 1, 0)
            outcomes.append(VerifyOutcome(request, drafts, accepted, nodes))
        self.widths.record_outcomes(outcomes)

    def _complete_prefill(
        self, step: ScheduledStep, result: StepResult, failed: dict[int, Failure]
    ) -> list[Request]:
        changed = []
        logprobs = result.prefill_logprobs or [[]] * len(step.prefill)
        pooled = result.prefill_pooled or [b""] * len(step.prefill)
        chunks = zip(step.plan.prefill, step.prefill, result.prefill, logprobs, pooled, strict=True)
        for chunk, request, token, of_tokens, of_hidden in chunks:
            request.pending.pop(0)
            if request.state is not State.FINISHED:
                request.kv_len += chunk.num_tokens
                if request.slot in failed:
                    request.kv_len = request.cached_len  # its K/V must not enter the prefix cache
                    self._append(request, [], [], failed, verified=False)
                    changed.append(request)
                else:
                    request.pooled += [of_hidden] if of_hidden else []
                    of_sampled = of_tokens[-1:] if token is not None else []
                    request.prompt_logprobs += of_tokens[: len(of_tokens) - len(of_sampled)]
                    held = request.slot in result.held
                    if token is not None or held:
                        self._share_prompt(request)
                    if token is not None:
                        self._append(request, [token], of_sampled, failed, verified=False)
                        changed.append(request)
                    if held:
                        self._hold(request)
            self._settle(request)
        return changed

    # --- decode ---------------------------------------------------------------------------------

    def _decoding(self) -> list[Request]:
        """Requests that need tokens beyond those of the steps in flight, at least one of each."""
        return [
            request
            for request in self.running
            if request.state is State.DECODE
            and len(request.output) + len(request.pending) < request.params.max_new_tokens
        ]

    def _plan_decode(
        self, step: ScheduledStep, decoding: Sequence[Request], rank: int | None
    ) -> None:
        """Decodes these requests, but those that wait for a prompt of priority `rank`."""
        if rank is not None:
            decoding = [request for request in decoding if not self.turns.waits(request, rank)]
        reserve, page_size = self.limits.kv_reserve, self.limits.page_size
        windows_move = self.windows.move
        for request in decoding:
            # It may have been preempted for an earlier one in this loop.
            if request.state is not State.DECODE:
                continue
            bound = request.kv_len_ub
            fits = bound + reserve <= len(request.pages) * page_size
            if (fits and not windows_move) or self._grow(request, bound + reserve, step.plan):
                step.plan.decode.append(DecodeRequest(request.slot, bound))
                step.decode.append(request)

    def _choose_width(self, step: ScheduledStep) -> None:
        if step.decode:
            step.choice = self.widths.choose(step.decode)
            choice = step.choice
            shape = self.limits.verify_shape(len(step.decode), choice.width, choice.most)
            step.plan.num_verify_tokens, step.plan.num_rows = shape
            self._plan_drafting(step)
        for request in step.decode:
            request.pending.append(step.plan.num_verify_tokens)
        if self.limits.max_pending_observe:
            self._plan_deferred(step)

    def _plan_drafting(self, step: ScheduledStep) -> None:
        """Puts the requests that draft first, if that is for some only."""
        drafting = step.choice.drafting
        if drafting is None or not step.plan.num_rows:
            step.choice = step.choice._replace(drafting=None)
            return
        others = set(range(len(step.decode))).difference(drafting)
        order = [*drafting, *sorted(others)]
        step.decode = [step.decode[i] for i in order]
        step.plan.decode = [step.plan.decode[i] for i in order]
        step.plan.num_drafting = len(drafting)

    def _plan_tracking(self, step: ScheduledStep) -> None:
        for request in step.decode if self.states.interval else ():
            if (asked := self.states.plan(request, step.plan)) is not None:
                step.tracked[request] = asked

    def _plan_deferred(self, step: ScheduledStep) -> None:
        """Plain steps are observed before the next drafts, or when their buffer is full."""
        plain, capacity = step.plan.num_verify_tokens == 1, self.limits.max_pending_observe
        if not plain or any(r.pending_observe == capacity for r in step.decode):
            step.deferred = [(r, r.pending_observe) for r in step.decode if r.pending_observe]
            step.plan.deferred = [DeferredCount(r.slot, count) for r, count in step.deferred]
            for request, _ in step.deferred:
                request.pending_observe = 0
        if plain:
            for request in step.decode:
                request.pending_observe += 1

    def _grow(self, request: Request, tokens: int, plan: StepPlan) -> bool:
        """Ensures pages for `tokens` KV slots, preempting the last requests if necessary."""
        while not self._extend(request, tokens, plan):
            victim = self.running[-1]
            if victim is request and len(self.running) == 1:
                assert self._leaving, "a request that fits alone found no pages"
                return False  # pages of ended requests are released with their last step
            self._preempt(victim)
            if victim is request or victim in self._leaving:
                return False
        return True

    def _extend(self, request: Request, tokens: int, plan: StepPlan) -> bool:
        """Allocates what `tokens` KV slots need in both page spaces, or nothing."""
        want = self.limits.pages(tokens) - len(request.pages)
        pages = self._allocate(want) if want > 0 else []
        if pages is None:
            return False
        if not self.windows.extend(request, tokens, plan):
            self.allocator.free(pages)
            return False
        if pages:
            plan.page_writes.append(PageWrite(request.slot, len(request.pages), tuple(pages)))
            request.pages += pages
        return True

    def _allocate(self, count: int) -> list[int] | None:
        short = count - self.allocator.num_free
        if short > 0:
            if short > self.prefix.num_evictable:
                return None
            self.prefix.evict(short)
        return self.allocator.allocate(count)

    def _preempt(self, request: Request) -> None:
        """Back to its place in the queue; it is prefilled again from its tokens, text unchanged."""
        self.waiting.add(request)
        self._stop(request)

    def _hold(self, request: Request) -> None:
        """Does `_preempt`, but `resume` queues it. Steps in flight may name it once more."""
        if request.state is State.DECODE:
            self.held.append(request)
            self._stop(request)

    def _stop(self, request: Request) -> None:
        request.preemptions += 1
        request.state = State.WAITING
        self.turns.remove(request)
        self.running.remove(request)
        self._leave(request)

    # --- prefill --------------------------------------------------------------------------------

    def _plan_prefill(self, step: ScheduledStep, budget: int) -> None:
        started = deque(r for r in self.running if r.state is State.PREFILL)
        self.waiting.begin_step()
        first = self._next_prompt(step.plan, started)
        if first is None:
            return
        # A prompt of many steps leaves half of each to shorter ones behind it.
        shared = budget // 2 if first.prefill_left > budget else 0
        while shared and (request := self._next_prompt(step.plan, started, first)) is not None:
            count = self._plan_chunk(step, request, shared)
            shared, budget = shared - count, budget - count
        request = first
        enough = budget - self.turns.enough_tokens(self._prompt_tokens())
        while budget and request is not None:
            budget -= self._plan_chunk(step, request, budget)
            more = budget > max(enough, 0)
            request = self._next_prompt(step.plan, started) if more else None

    def _prompt_tokens(self) -> int:
        """How many there are to compute, of requests that may get a slot: of those that wait, what
        is not cached. O(slots).
        """
        begun = (r.prefill_left for r in self.running if r.state is State.PREFILL)
        waiting = itertools.islice(self.waiting, len(self._free_slots))
        return sum(begun) + sum(self.waiting.uncached_tokens(request) for request in waiting)

    def _prompt_rank(self) -> int | None:
        """Rank of the most urgent prompt to compute; one that waits may not find pages."""
        waiting = itertools.islice(self.waiting, min(len(self._free_slots), 1))
        begun = (request for request in self.running if request.state is State.PREFILL)
        first = [*waiting, *itertools.islice(begun, 1)]  # both are sorted
        return min((request.order[0] for request in first), default=None)

    def _next_prompt(
        self, plan: StepPlan, started: deque[Request], behind: Request | None = None
    ) -> Request | None:
        """The prompt that is computed next: by priority, of the same one those that have begun.

        Args:
            started: running requests whose prompts are not computed yet, in their order.
            behind: only a prompt of the same priority, of which less is left than of this one.
        """
        waiting = self.waiting.peek()
        if waiting is not None and started and started[0].order[0] <= waiting.order[0]:
            waiting = None
        if waiting and self._is_shorter(waiting, behind) and self._admit(plan, waiting):
            self.waiting.pop()
            insort(self.running, waiting, key=order_of)
            return waiting
        if started and self._is_shorter(started[0], behind):
            return started.popleft()
        return None

    def _is_shorter(self, request: Request, other: Request | None) -> bool:
        if other is None:
            return True
        waits = request.state is State.WAITING
        left = self.waiting.uncached_tokens(request) if waits else request.prefill_left
        return request.order[0] == other.order[0] and left < other.prefill_left

    def _plan_chunk(self, step: ScheduledStep, request: Request, budget: int) -> int:
        start, total = request.prefill_done, len(request.prefill_tokens)
        # A chunk ends where a snapshot is taken: a recurrent state is kept at its end only.
        until = next((at for at in request.snapshots_at if start < at), total)
        count = min(budget, until - start)
        last = start + count == total
        chunk = PrefillChunk(request.slot, start, count, last, request.cached_len)
        step.plan.prefill.append(chunk)
        step.prefill.append(request)
        end = total + self.limits.kv_reserve if last else start + count
        self.windows.prefill(request, start, end, step.plan)
        request.prefill_done += count
        if request.prefill_done in request.snapshots_at:
            self._plan_snapshot(step.plan, request)
        request.pending.append(count)
        if last:
            request.state = State.DECODE
            self.turns.add(request)
        return count

    def _plan_snapshot(self, plan: StepPlan, request: Request) -> None:
        row = self.prefix.allocate_snapshot()
        if row is not None:
            request.snapshots.append((request.prefill_done, row))
            plan.save_snapshots.append(SnapshotCopy(request.slot, row))

    def _admit(self, plan: StepPlan, request: Request) -> bool:
        """Gives a request a slot, and pages for its tokens and one step, if available."""
        if not self._free_slots or request in self._leaving:
            return False
        tokens = request.tokens
        match = self.prefix.match_prefix(request.shareable_tokens)
        self.prefix.inc_lock_ref(match.node)
        pages = self._allocate_prompt(request, match, len(tokens) + self.limits.kv_reserve)
        if pages is None:
            self.prefix.dec_lock_ref(match.node)
            return False
        request.slot = self._free_slots.pop()
        request.state = State.PREFILL
        request.node = match.node
        request.pages = [*match.pages, *pages]
        request.prefill_tokens = tokens
        request.prefill_done = request.kv_len = request.cached_len = match.length
        request.pending_observe = 0
        request.pooled.clear()
        if not request.preemptions:
            request.cached_tokens = match.length
        # Where a prompt with the same beginning has branched off, a third one may as well.
        longest = self.prefix.snapshot_length(tokens)
        wanted = sorted({match.branch_length, longest})
        request.snapshots_at = tuple(n for n in wanted if match.length < n <= longest)
        if match.snapshot is not None:
            plan.load_snapshots.append(SnapshotCopy(request.slot, match.snapshot))
        plan.admitted.append(self._admission(request))
        plan.page_writes.append(PageWrite(request.slot, 0, tuple(request.pages)))
        return True

    def _allocate_prompt(
        self, request: Request, match: MatchResult, num_tokens: int
    ) -> list[int] | None:
        """Pages for what is not cached, and its window pages; None if too few are available."""
        need = self.limits.pages(num_tokens) - len(match.pages)
        # Keep pages for the next step of the running requests, or they would be preempted at once.
        spare = len(self.running) * self.limits.pages(self.limits.kv_reserve)
        if self.allocator.num_free + self.prefix.num_evictable < need + spare:
            return None
        if not self.windows.admit(request, match.pages, num_tokens, spare):
            return None
        pages = self._allocate(need)
        assert pages is not None
        return pages

    def _admission(self, request: Request) -> Admission:
        return Admission(
            slot=request.slot,
            rid=request.rid,
            tokens=request.prefill_tokens,
            cached_len=request.cached_len,
            max_drafts=request.params.draft_limit(self.limits.max_verify_tokens - 1),
            sampling=request.sampling,
            num_output_tokens=len(request.prefill_tokens) - len(request.prompt),
            logprobs=request.slot_logprobs,
            grammar=request.slot_grammar,
            tenant=request.scheduling.tenant,
            pooling=request.pooling,
        )

    # --- results and release --------------------------------------------------------------------

    def _append(
        self,
        request: Request,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        failed: dict[int, Failure],
        verified: bool,
    ) -> None:
        kept = append_tokens(request, tokens, logprobs)
        if verified:  # drafts after a stop do not count
            request.accept_lengths.append(kept)
            has_bonus = 0 < kept == len(tokens)
            request.correct_drafts.append(kept - has_bonus)
        if failed and request.finish is None and request.slot in failed:
            request.failed = True
            failure = failed[request.slot]
            message = f"Output token {len(request.output) + 1}: {failure.reason}"
            request.finish = FinishReason("abort", message=message, err_type=failure.err_type)
        if request.finish is not None:
            self._end(request)

    def _end(self, request: Request) -> None:
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        elif request in self.held:
            self.held.remove(request)
        request.state = State.FINISHED
        self.turns.remove(request)
        self._leave(request)

    def _leave(self, request: Request) -> None:
        if request.slot < 0:
            return
        self._leaving.add(request)
        self._settle(request)

    def _settle(self, request: Request) -> None:
        if request in self._leaving and not request.pending:
            self._leaving.remove(request)
            self._release(request)

    def _share_prompt(self, request: Request) -> None:
        """Inserts the prompt's pages, now filled in every pool, into the prefix cache."""
        done = request.prefill_tokens
        inserted = self.prefix.insert(done, request.pages, request.node, len(done))
        if inserted.shared:  # another request inserted the same tokens first: use its pages
            end = inserted.start + len(inserted.shared)
            request.pages[inserted.start : end] = inserted.shared
            pages = tuple(inserted.shared)
            self._updates.append(PageTableUpdate(request, inserted.start, pages))
            # The duplicates are whole pages below kv_len: steps in flight may read but never
            # write them, and whatever writes them next is launched later.
            self.allocator.free(inserted.duplicates)
        self.prefix.inc_lock_ref(inserted.node)
        self.prefix.dec_lock_ref(request.node)
        request.node = inserted.node
        self.windows.end_prefill(request)
        self.windows.share(request, request.pages[: inserted.node.end])
        for length, row in request.snapshots:
            self.prefix.attach_snapshot(done, length, row)
        request.snapshots.clear()

    def _release(self, request: Request) -> None:
        """Releases slot and pages. K/V of returned tokens is cached, nothing past a stop."""
        tokens = request.tokens
        # `pending_observe` also counts a step past the end, `kv_len` does not: this may cache one
        # token less.
        kv_len = min(request.kv_len - request.pending_observe, len(tokens))
        inserted = self.prefix.insert(tokens, request.pages, request.node, kv_len)
        cached = request.pages[: inserted.start] + inserted.shared
        cached += request.pages[len(cached) : inserted.node.end]
        self.windows.share(request, cached)
        self.windows.release(request)
        self.allocator.free(inserted.owned)
        if request.failed:
            self._uncleared += inserted.owned
        self.prefix.dec_lock_ref(request.node)
        self._updates = [update for update in self._updates if update.request is not request]
        self.states.release(request, kv_len)
        self._free_slots.append(request.slot)
        request.slot, request.pages, request.node = -1, [], None

    # --- invariants -----------------------------------------------------------------------------

    def check_idle(self) -> None:
        """Checks that all pages are free or cached, and all slots free, when nothing runs.

        Raises:
            InternalError: a page or slot leaked, or requests are running.
        """
        if self.has_work:
            raise InternalError("check_idle while requests run.")
        self.prefix.check()
        if self.prefix.num_pending_snapshots:
            raise InternalError(f"Snapshots: {self.prefix.num_pending_snapshots} leaked.")
        free, cached = self.allocator.num_free, self.prefix.num_pages
        if free + cached != self.allocator.capacity:
            raise InternalError(
                f"Pages: {free} free + {cached} cached != {self.allocator.capacity}."
            )
        self.windows.check()
        if self.windows.num_owned:
            raise InternalError(f"Window pages: {self.windows.num_owned} leaked.")
        if sorted(self._free_slots) != list(range(self.limits.slots)):
            raise InternalError(f"Slots: {len(self._free_slots)} free of {self.limits.slots}.")
