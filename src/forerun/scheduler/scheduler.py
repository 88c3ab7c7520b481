"""What runs next: admission, chunked prefill, page reservation, preemption. No torch.

The host knows lengths only as upper bounds (`_ub`) while steps are in flight. Before a step it
reserves pages for the worst case; slots and pages go back only when the last step that can write
them has come back.

Who owns a page:

| page                              | owner        | goes back when                              |
|-----------------------------------|--------------|---------------------------------------------|
| in the prefix cache               | prefix cache | evicted (never while a request locks it)    |
| of a request, matched at admission| prefix cache | unlocked at release                         |
| of a request, past the match      | the request  | release: inserted into the cache, or freed  |
| everything else                   | allocator    |                                             |
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from forerun.core.errors import InternalError, RequestError
from forerun.core.plan import Admission, DecodeRow, PrefillChunk, StepPlan, StepResult
from forerun.core.request import FinishReason, Request, State
from forerun.kvcache.pages import PageAllocator
from forerun.kvcache.prefix import PrefixStore
from forerun.scheduler.adaptive_width import VerifyOutcome, WidthPolicy
from forerun.scheduler.stop_checker import append_tokens


@dataclass(frozen=True)
class Limits:
    """The numbers the scheduler works with."""

    slots: int
    page_size: int
    width: int  # most rows a decode step verifies for a request
    kv_reserve: int  # rows past the committed length a step may write
    prefill_tokens: int  # prompt tokens a step, over all requests
    context_length: int
    depth: int  # steps that may be in flight when the next is scheduled
    max_pending_observe: int = 0  # plain steps that drafts may hear of later; 0: at once

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    @property
    def overshoot(self) -> int:
        """Rows past its last token that a request can touch before the host hears of its end."""
        return self.kv_reserve + self.depth * self.width


class Scheduler:
    """Requests in, plans out; results in, finished requests out."""

    def __init__(
        self,
        limits: Limits,
        allocator: PageAllocator,
        prefix: PrefixStore,
        widths: WidthPolicy,
    ) -> None:
        self.limits = limits
        self.allocator = allocator
        self.prefix = prefix
        self.widths = widths
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first; the last is preempted first
        self._leaving: set[Request] = set()  # ended or preempted, with steps in flight
        self._free_slots = list(range(limits.slots - 1, -1, -1))
        self._rewrites: list[tuple[Request, int, list[int]]] = []  # page-table rows to renew

    # --- requests -------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Refuses what cannot fit even alone.

        Raises:
            RequestError: over the context length, or over all K/V pages.
        """
        limits = self.limits
        prompt, new = len(request.prompt), request.params.max_new_tokens
        if prompt + new > limits.context_length:
            room = limits.context_length - prompt
            fix = f"max_new_tokens can be at most {room}" if room > 0 else "shorten the prompt"
            raise RequestError(
                f"The prompt has {prompt} tokens and max_new_tokens is {new}, together over the"
                f" context length {limits.context_length}; {fix}."
            )
        need, have = limits.pages(prompt + new + limits.overshoot), self.allocator.capacity
        if need > have:
            raise RequestError(
                f"The request needs {need} K/V pages and the pool has {have}; lower max_new_tokens"
                " or raise max_total_tokens."
            )

    def add(self, request: Request) -> None:
        """Queues a request that `check` let through."""
        self.waiting.append(request)

    def abort(self, request: Request, message: str) -> None:
        """Ends a request wherever it is; what it holds goes back as soon as nothing writes it."""
        if request.state is State.FINISHED:
            return
        request.finish = FinishReason("abort", message=message)
        self._end(request)

    def finish(self, request: Request, reason: FinishReason, num_tokens: int) -> None:
        """Ends a request with its first `num_tokens` output tokens and `reason`.

        Also of one that ended by itself in the step just booked: whoever reads its text found that
        it ends earlier.
        """
        request.trim(num_tokens)
        request.finish = reason
        if request.state is not State.FINISHED:
            self._end(request)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._leaving)

    # --- one step -------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is nothing that can run now."""
        plan = StepPlan()
        self._plan_decode(plan)
        self._choose_width(plan)
        self._plan_prefill(plan)
        if not (plan.decode or plan.prefill):
            return None
        plan.page_writes[:0] = [(r.slot, first, pages) for r, first, pages in self._rewrites]
        self._rewrites.clear()
        return plan

    def complete(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Books the result of a step; returns the requests that got tokens or ended."""
        changed, outcomes = [], []
        for row, tokens in zip(plan.decode, result.decode, strict=True):
            request = row.request
            request.pending.pop(0)
            if request.state is not State.FINISHED:
                request.kv_len += len(tokens)
                request.verify_ct += 1
                drafts = request.params.draft_limit(plan.width - 1)
                request.proposed += drafts
                outcomes.append(VerifyOutcome(request, drafts, len(tokens) - 1))
                changed.append(self._append(request, tokens, verified=True))
            self._settle(request)
        if outcomes:
            self.widths.learn(outcomes)
        for chunk, token in zip(plan.prefill, result.prefill, strict=True):
            request = chunk.request
            request.pending.pop(0)
            if request.state is not State.FINISHED:
                request.kv_len += len(chunk.tokens)
                if token is not None:
                    self._share_prompt(request)
                    changed.append(self._append(request, [token], verified=False))
            self._settle(request)
        return changed

    def fail(self, plan: StepPlan, message: str) -> None:
        """A step that could not be launched: its requests end, with what they have."""
        for request, rows in plan.late:
            request.pending_observe += rows
        for request in [r.request for r in plan.decode] + [c.request for c in plan.prefill]:
            request.pending.pop()
            if request.state is not State.FINISHED:
                request.finish = FinishReason("abort", message=message)
                self._end(request)
            self._settle(request)

    # --- decode ---------------------------------------------------------------------------------

    def _plan_decode(self, plan: StepPlan) -> None:
        for request in list(self.running):
            # A later, younger request may have been preempted for an earlier one.
            if request.state is not State.DECODE or self._surely_done(request):
                continue
            bound = request.kv_len_ub
            if self._grow(request, bound + self.limits.kv_reserve, plan):
                plan.decode.append(DecodeRow(request, request.slot, bound))

    def _choose_width(self, plan: StepPlan) -> None:
        requests = [row.request for row in plan.decode]
        if requests:
            plan.width = self.widths.choose(requests)
        for request in requests:
            request.pending.append(plan.width)
        if self.limits.max_pending_observe:
            self._plan_late(plan, requests)

    def _plan_late(self, plan: StepPlan, requests: list[Request]) -> None:
        """Drafts hear of plain steps when they are wanted again, or when no more can be kept."""
        if plan.width > 1 or any(
            r.pending_observe == self.limits.max_pending_observe for r in requests
        ):
            plan.late = [(r, r.pending_observe) for r in requests if r.pending_observe]
            for request, _ in plan.late:
                request.pending_observe = 0
        if plan.width == 1:
            for request in requests:
                request.pending_observe += 1

    def _surely_done(self, request: Request) -> bool:
        """Steps in flight yield a token each at least: no use launching past the end."""
        return len(request.output) + len(request.pending) >= request.params.max_new_tokens

    def _grow(self, request: Request, rows: int, plan: StepPlan) -> bool:
        """Pages for `rows` rows; preempts the youngest while there are none."""
        want = self.limits.pages(rows) - len(request.pages)
        if want <= 0:
            return True
        while (pages := self._allocate(want)) is None:
            victim = self.running[-1]
            if victim is request and len(self.running) == 1:
                assert self._leaving, "a request that fits alone found no pages"
                return False  # pages of requests that ended come back with their last step
            self._preempt(victim)
            if victim is request or victim in self._leaving:
                return False
        plan.page_writes.append((request.slot, len(request.pages), pages))
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
        """Back to the head of the queue; it runs again from its tokens, text unchanged."""
        request.preemptions += 1
        request.state = State.WAITING
        self.running.remove(request)
        self.waiting.appendleft(request)
        self._leave(request)

    # --- prefill --------------------------------------------------------------------------------

    def _plan_prefill(self, plan: StepPlan) -> None:
        budget = self.limits.prefill_tokens
        for request in self.running:
            if request.state is State.PREFILL and budget:
                budget -= self._plan_chunk(plan, request, budget)
        while budget and self.waiting and self._admit(plan, self.waiting[0]):
            request = self.waiting.popleft()
            self.running.append(request)
            budget -= self._plan_chunk(plan, request, budget)

    def _plan_chunk(self, plan: StepPlan, request: Request, budget: int) -> int:
        start = request.prefill_done
        tokens = request.prefill_tokens[start : start + budget]
        last = start + len(tokens) == len(request.prefill_tokens)
        plan.prefill.append(PrefillChunk(request, request.slot, start, tokens, last))
        request.prefill_done += len(tokens)
        request.pending.append(len(tokens))
        if last:
            request.state = State.DECODE
        return len(tokens)

    def _admit(self, plan: StepPlan, request: Request) -> bool:
        """Gives a request a slot and pages for its tokens and a step, if they are there."""
        if not self._free_slots or request in self._leaving:
            return False
        tokens = request.tokens
        match = self.prefix.match(tokens)
        self.prefix.lock(match.node)
        need = self.limits.pages(len(tokens) + self.limits.kv_reserve) - len(match.pages)
        # Leave the running requests their next step, or they would be preempted at once.
        spare = len(self.running) * self.limits.pages(self.limits.kv_reserve)
        if self.allocator.num_free + self.prefix.num_evictable < need + spare:
            pages = None
        else:
            pages = self._allocate(need)
        if pages is None:
            self.prefix.unlock(match.node)
            return False
        request.slot = self._free_slots.pop()
        request.state = State.PREFILL
        request.node = match.node
        request.pages = [*match.pages, *pages]
        request.prefill_tokens = tokens
        request.prefill_done = request.kv_len = request.cached_len = match.length
        request.pending_observe = 0
        if not request.preemptions:
            request.cached_tokens = match.length
        plan.admitted.append(Admission(request, request.slot))
        plan.page_writes.append((request.slot, 0, request.pages[:]))
        return True

    # --- results and release --------------------------------------------------------------------

    def _append(self, request: Request, tokens: list[int], verified: bool) -> Request:
        kept = append_tokens(request, tokens)
        if verified:  # a stop inside the run cuts it: drafts past the stop do not count
            request.accept_lengths.append(kept)
            request.correct_drafts.append(min(kept, len(tokens) - 1))
        if request.finish is not None:
            self._end(request)
        return request

    def _end(self, request: Request) -> None:
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.state = State.FINISHED
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
        """Prompt pages become shareable: the step that wrote them filled every pool."""
        done = request.prefill_tokens
        inserted = self.prefix.insert(done, request.pages, request.node, len(done))
        if inserted.shared:  # somebody was quicker with the same tokens: use theirs, drop ours
            end = inserted.start + len(inserted.shared)
            request.pages[inserted.start : end] = inserted.shared
            self._rewrites.append((request, inserted.start, inserted.shared))
            # Whole pages below kv_len: steps in flight may read, never write them, and what
            # writes them next is launched later.
            self.allocator.free(inserted.duplicates)
        self.prefix.lock(inserted.node)
        self.prefix.unlock(request.node)
        request.node = inserted.node

    def _release(self, request: Request) -> None:
        """Slot and pages go back. Only what was returned is shared: nothing past a stop."""
        tokens = request.tokens
        # Of a step past the end, `pending_observe` counts a row that `kv_len` does not: less is
        # shared.
        kv_len = min(request.kv_len - request.pending_observe, len(tokens))
        inserted = self.prefix.insert(tokens, request.pages, request.node, kv_len)
        self.allocator.free(inserted.owned)
        self.prefix.unlock(request.node)
        self._rewrites = [r for r in self._rewrites if r[0] is not request]
        self._free_slots.append(request.slot)
        request.slot, request.pages, request.node = -1, [], None

    # --- care -----------------------------------------------------------------------------------

    def check_idle(self) -> None:
        """When nothing runs: pages free + cached = all, every slot is free.

        Raises:
            InternalError: something was lost.
        """
        if self.has_work:
            raise InternalError("check_idle while requests run.")
        self.prefix.check()
        free, cached = self.allocator.num_free, self.prefix.num_pages
        if free + cached != self.allocator.capacity:
            raise InternalError(
                f"Pages: {free} free + {cached} cached != {self.allocator.capacity}."
            )
        if sorted(self._free_slots) != list(range(self.limits.slots)):
            raise InternalError(f"Slots: {len(self._free_slots)} free of {self.limits.slots}.")
