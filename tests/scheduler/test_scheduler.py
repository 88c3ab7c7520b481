"""The scheduler with a simulated device that detects every KV slot with wrong contents.

The device stores, per (page, offset), a fingerprint of the tokens whose K/V was written there. A
step reads its whole context through the page table and fails if a KV slot holds another prefix, so
a page that is reused too early, shared wrongly or written by two requests is found at once. The
draft's K/V is modelled likewise: it is read by steps with drafts, and plain steps may defer it.
Either may be in windowed pools; then only the window before a token is read.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.errors import RequestError
from forerun.core.plan import Limits, StepPlan, StepResult
from forerun.core.request import Request, State
from forerun.core.sampling_params import SamplingParams
from forerun.core.scheduling_params import SchedulingParams
from forerun.core.widths import verify_widths
from forerun.kvcache.pages import PageAllocator
from forerun.kvcache.radix_cache import NoPrefixCache, RadixCache
from forerun.kvcache.window_pages import WindowPages
from forerun.scheduler.adaptive_width import FixedWidth, WidthPolicy
from forerun.scheduler.schedule_policy import SchedulePolicy
from forerun.scheduler.scheduler import ScheduledStep, Scheduler, check_fits
from tests.property_examples import examples

EOS = 6


def next_token(tokens: tuple[int, ...]) -> int:
    return hash((17, *tokens)) % 7


def plain(prompt: tuple[int, ...], limit: int, eos: int | None = EOS) -> list[int]:
    """The output of plain decoding, without an engine."""
    tokens, output = prompt, []
    while len(output) < limit and (not output or output[-1] != eos):
        output.append(next_token(tokens))
        tokens = (*tokens, output[-1])
    return output


class RandomWidth(WidthPolicy):
    """Chooses every width at random."""

    def __init__(self, full: int, rng: random.Random) -> None:
        super().__init__(verify_widths(full, True))
        self.rng = rng

    def _choose(self, requests: Sequence[Request], max_index: int) -> int:
        return self.widths[self.rng.randint(0, max_index)]


class LaunchError(Exception):
    """A launch ended part-way; what it had done before stays done."""


class Device:
    """Executes plans in launch order, as a CUDA stream does."""

    def __init__(
        self, limits: Limits, rng: random.Random, windowed: frozenset[str] = frozenset()
    ) -> None:
        """`windowed`: which of "target" and "draft" keep their K/V in window pages."""
        self.limits, self.rng, self.windowed = limits, rng, windowed
        self.clock: random.Random | None = None  # of the times of steps; None: they are not known
        self.until_failure: int | None = None  # parts of the next launch; None: it succeeds
        self.kv: dict[tuple[int, int], int] = {}
        self.draft_kv: dict[tuple[int, int], int] = {}
        self.table: dict[int, dict[int, int]] = {}
        self.window_table: dict[int, dict[int, int]] = {}
        self.known: dict[int, tuple[int, ...]] = {}  # tokens of each admission
        self.tokens: dict[int, tuple[int, ...]] = {}  # per slot: prompt and all sampled tokens

    def kv_slot(self, slot: int, position: int, model: str) -> tuple[int, int]:
        size = self.limits.page_size
        table = self.window_table if model in self.windowed else self.table
        return table[slot][position // size], position % size

    def write(self, slot: int, tokens: tuple[int, ...], position: int, observed: bool) -> None:
        mark = hash(tokens[: position + 1])
        self.kv[self.kv_slot(slot, position, "target")] = mark
        if observed:
            self.draft_kv[self.kv_slot(slot, position, "draft")] = mark

    def read(self, slot: int, tokens: tuple[int, ...], end: int, drafts: bool) -> None:
        for model, kv in (("target", self.kv), ("draft", self.draft_kv)):
            begin = max(0, end - self.limits.window) if model in self.windowed else 0
            for position in range(begin, end if drafts or model == "target" else 0):
                mark = hash(tokens[: position + 1])
                assert kv.get(self.kv_slot(slot, position, model)) == mark

    def observe_deferred(self, slot: int, count: int) -> None:
        assert 0 < count <= self.limits.max_pending_observe
        tokens = self.tokens[slot]
        for position in range(len(tokens) - 1 - count, len(tokens) - 1):
            self.write(slot, tokens, position, observed=True)

    def _part(self) -> None:
        """Raises where the launch is to end."""
        if self.until_failure is not None:
            self.until_failure -= 1
            if self.until_failure < 0:
                raise LaunchError

    def launch(self, plan: StepPlan) -> StepResult:
        for admission in plan.admitted:
            self._part()
            self.table[admission.slot] = {}
            self.window_table[admission.slot] = {}
            self.known[admission.slot] = admission.tokens
        written = set()
        for write in plan.page_writes:
            self._part()
            for i, page in enumerate(write.pages, write.first):
                assert (write.slot, i) not in written, "two writes to one page-table entry"
                written.add((write.slot, i))
                assert page != 0
                self.table[write.slot][i] = page
        for write in plan.window_writes:
            self._part()
            self.window_table[write.slot].update(enumerate(write.pages, write.first))
        for deferred in plan.deferred:
            self.observe_deferred(deferred.slot, deferred.count)
        width = plan.num_verify_tokens
        return StepResult(
            [self._decode(r.slot, r.kv_len_ub, width) for r in plan.decode],
            [self._prefill(c.slot, c.start, c.end, c.last) for c in plan.prefill],
            self._seconds(plan),
        )

    def _seconds(self, plan: StepPlan) -> float:
        if self.clock is None:
            return 0.0
        seconds = 0.1 * bool(plan.decode) + 0.01 * plan.num_prefill_tokens
        return seconds * self.clock.choice([1.0, 1.0, 1.1, 5.0])

    def _decode(self, slot: int, bound: int, width: int) -> list[int]:
        self._part()
        tokens = self.tokens[slot]
        kv_len = len(tokens) - 1
        assert kv_len <= bound
        self.read(slot, tokens, kv_len, drafts=width > 1)
        for position in range(kv_len, kv_len + self.limits.kv_reserve):  # rejected drafts
            self.kv[self.kv_slot(slot, position, "target")] = -1
            self.draft_kv[self.kv_slot(slot, position, "draft")] = -1
        sampled: tuple[int, ...] = ()
        for _ in range(self.rng.randint(1, width)):
            sampled = (*sampled, next_token(tokens + sampled))
        self.tokens[slot] = tokens + sampled
        for position in range(kv_len, kv_len + len(sampled)):
            observed = width > 1 or not self.limits.max_pending_observe
            self.write(slot, self.tokens[slot], position, observed)
        return list(sampled)

    def _prefill(self, slot: int, start: int, end: int, last: bool) -> int | None:
        self._part()
        known = self.known[slot]
        self.read(slot, known, start, drafts="draft" not in self.windowed)
        for position in range(start, end):
            self.write(slot, known, position, observed=True)
        if not last:
            return None
        token = next_token(known)
        self.tokens[slot] = (*known, token)
        return token


@dataclass(frozen=True)
class Window:
    """Windowed pools: whose they are, and pages beyond what one request needs."""

    size: int
    models: frozenset[str]
    surplus: int = 100

    def pages(self, limits: Limits, pages: int) -> WindowPages:
        alone = min(pages, limits.max_window_pages)
        count = 1 + min(pages, alone + self.surplus)
        return WindowPages(count, limits.page_size, self.size, "target" in self.models)


WINDOWS = st.builds(
    Window,
    st.sampled_from([1, 5, 16, 40]),
    st.sampled_from(["target", "draft", "target draft"]).map(str.split).map(frozenset),
    st.integers(0, 40),
)


def make(
    page_size: int = 4,
    pages: int = 40,
    overlap_depth: int = 0,
    width: int = 4,
    chunk: int = 16,
    slots: int = 4,
    cache: bool = True,
    seed: int = 0,
    max_pending_observe: int = 0,
    window: Window | None = None,
    policy: SchedulePolicy | None = None,
    context: int = 64,
) -> tuple[Scheduler, Device]:
    limits = Limits(
        slots, page_size, width, width, chunk, context, overlap_depth, max_pending_observe,
        0 if window is None else window.size,
    )  # fmt: skip
    allocator = PageAllocator(pages + 1)
    windowed = None if window is None else window.pages(limits, pages)
    prefix = RadixCache(allocator, page_size, window=windowed) if cache else NoPrefixCache()
    widths = RandomWidth(width, random.Random(seed + 1))
    device = Device(limits, random.Random(seed), window.models if window else frozenset())
    return Scheduler(limits, allocator, prefix, widths, windowed, policy), device


def request(
    rid: int, prompt: tuple[int, ...], limit: int, eos: bool = True, priority: int = 0
) -> Request:
    params = SamplingParams(temperature=0.0, max_new_tokens=limit)
    stop_ids = frozenset({EOS} if eos else ())
    return Request(str(rid), prompt, params, 0, stop_ids, SchedulingParams(priority))


def run(
    scheduler: Scheduler,
    device: Device,
    arrivals: list[Request],
    rng: random.Random,
    abort_rate: float = 0.0,
    fails: Callable[[ScheduledStep], int | None] = lambda step: None,
    check: Callable[[list[Request], StepPlan], None] = lambda waiting, plan: None,
) -> None:
    """Feeds requests in while stepping, with up to `overlap_depth` steps in flight.

    Args:
        fails: how much of a step is launched before it fails; None: it does not.
        check: called with the requests that waited before a step, and its plan.
    """
    flight: deque[tuple[StepPlan, StepResult]] = deque()
    queue = deque(arrivals)
    for _ in range(100_000):
        while queue and rng.random() < 0.5:
            item = queue.popleft()
            check_fits(item, scheduler.limits, scheduler.allocator.capacity)
            scheduler.add(item)
        if rng.random() < abort_rate:
            alive = [*scheduler.running, *scheduler.waiting]
            if alive:
                scheduler.abort(rng.choice(alive), "test")
        waiting = list(scheduler.waiting)
        plan = scheduler.schedule()
        if plan is not None:
            check(waiting, plan)
            device.until_failure = fails(scheduler._scheduled[-1])
            try:
                flight.append((plan, device.launch(plan)))
            except LaunchError:
                scheduler.fail("launch failed")
            else:
                for item in scheduler._scheduled[-1].requests:
                    row = device.table[item.slot]
                    assert [row[i] for i in range(len(item.pages))] == item.pages
        if flight and (plan is None or len(flight) > scheduler.limits.overlap_depth):
            scheduler.complete(flight.popleft()[1])
        for launched, _ in flight:  # no slot that a step in flight can write is free
            busy = {r.slot for r in launched.decode} | {c.slot for c in launched.prefill}
            assert busy.isdisjoint(scheduler._free_slots)
        owned = sum(len(r.pages) - r.node.end for r in _holding(scheduler))
        total = scheduler.allocator.num_free + scheduler.prefix.num_pages + owned
        assert total == scheduler.allocator.capacity
        scheduler.windows.check()
        if not queue and not scheduler.has_work and not flight:
            return
    raise AssertionError("the scheduler does not finish")


def _holding(scheduler: Scheduler) -> set[Request]:
    everyone = {*scheduler.running, *scheduler.waiting, *scheduler._leaving}
    return {r for r in everyone if r.slot >= 0}


@examples(150)
@given(
    seed=st.integers(0, 10**6),
    page_size=st.sampled_from([1, 4, 16]),
    overlap_depth=st.sampled_from([0, 1]),
    width=st.sampled_from([1, 4, 9]),
    chunk=st.sampled_from([3, 16, 100]),
    tight=st.booleans(),
    cache=st.booleans(),
    aborts=st.sampled_from([0.0, 0.1]),
    failures=st.sampled_from([0.0, 0.1]),
    max_pending_observe=st.sampled_from([0, 1, 3]),
    window=st.none() | WINDOWS,
    lpm=st.booleans(),
    priorities=st.sampled_from([1, 3]),
    gaps=st.sampled_from([(0.0, 0.0), (0.5, 0.0), (0.5, 1.0), (0.5, 1e9), (0.0, 1e9)]),
)
def test_output_equals_plain_decoding(
    seed: int,
    page_size: int,
    overlap_depth: int,
    width: int,
    chunk: int,
    tight: bool,
    cache: bool,
    aborts: float,
    failures: float,
    max_pending_observe: int,
    window: Window | None,
    lpm: bool,
    priorities: int,
    gaps: tuple[float, float],
) -> None:
    rng = random.Random(seed)
    largest = -(-(64 + 2 * width) // page_size)  # pages of the largest request
    pages = largest + rng.randint(0, largest) if tight else largest * 4
    scheduler, device = make(
        page_size, pages, overlap_depth, width, chunk, 4, cache, seed, max_pending_observe, window,
        SchedulePolicy(longest_prefix=lpm, max_mixed_step=gaps[0], max_first_gap=gaps[1]),
    )  # fmt: skip
    device.clock = random.Random(seed + 2) if max(gaps) else None
    stem = tuple(rng.randrange(6) for _ in range(40))
    requests = []
    for i in range(rng.randint(1, 12)):
        shared = stem[: rng.randint(0, 40)]
        prompt = (*shared, *(rng.randrange(6) for _ in range(rng.randint(1, 8))))
        limit = rng.randint(1, 64 - len(prompt))
        requests.append(request(i, prompt, limit, priority=rng.randrange(priorities)))

    def fails(step: ScheduledStep) -> int | None:
        return rng.randint(0, 6) if rng.random() < failures else None

    run(scheduler, device, requests, rng, aborts, fails)
    # A second turn of every conversation.
    prompts = [(item.prompt + tuple(item.output))[:63] for item in requests]
    requests += [request(100 + i, p, 64 - len(p)) for i, p in enumerate(prompts)]
    run(scheduler, device, requests[len(prompts) :], rng, aborts, fails)
    scheduler.check_idle()
    for item in requests:
        assert item.state is State.FINISHED and item.finish is not None
        want = plain(item.prompt, item.params.max_new_tokens)
        if item.finish.type == "abort":
            assert item.output == want[: len(item.output)]
        else:
            assert item.output == want
            assert item.finish.type == ("stop" if want[-1] == EOS else "length")


@pytest.mark.parametrize("seed", [50, 308, 434])
def test_requests_that_survive_a_failed_launch_get_their_page_table_updates(seed: int) -> None:
    """An update of a request that waits for pages travels with the steps of others.

    When such a step fails and the update is lost, the request goes on with pages that were freed.
    With these seeds other steps need the update.
    """
    rng = random.Random(seed)
    alone = 64 + 2 * 9  # pages of the largest request
    pages = alone + rng.randint(0, alone // 2)
    scheduler, device = make(1, pages, overlap_depth=1, width=9, chunk=100, seed=seed)
    stem = tuple(rng.randrange(6) for _ in range(30))
    requests = []
    for i in range(12):
        prompt = (*stem[: rng.choice([10, 20, 30])], rng.randrange(2))
        requests.append(request(i, prompt, rng.randint(1, 64 - len(prompt)), eos=False))

    def fails(step: ScheduledStep) -> int | None:
        return 0 if any(u.request not in step.requests for u in step.updates) else None

    run(scheduler, device, requests, rng, fails=fails)
    scheduler.check_idle()
    for item in requests:
        want = plain(item.prompt, item.params.max_new_tokens, None)
        assert item.output == want[: len(item.output)]


def test_preemption_does_not_change_the_output() -> None:
    scheduler, device = make(page_size=1, pages=80, width=4, slots=4)
    requests = [request(i, (i % 6, 1, 2), 60, eos=False) for i in range(4)]
    run(scheduler, device, requests, random.Random(1))
    assert any(r.preemptions for r in requests)
    assert all(r.output == plain(r.prompt, 60, None) for r in requests)


def test_a_cached_prefix_is_not_computed_again() -> None:
    scheduler, device = make()
    prompt = tuple(i % 6 for i in range(30))
    for rid in range(2):
        run(scheduler, device, [item := request(rid, prompt, 8)], random.Random(0))
        assert item.cached_tokens == (0 if rid == 0 else 28)


def test_request_counters_are_consistent() -> None:
    scheduler, device = make(width=5)
    scheduler.widths = FixedWidth((1, 5))
    requests = [request(i, (i, i + 1), 40) for i in range(5)]
    run(scheduler, device, requests, random.Random(3))
    for item in requests:
        assert len(item.accept_lengths) == item.verify_ct == len(item.correct_drafts)
        assert sum(item.accept_lengths) == len(item.output) - 1
        assert item.proposed == 4 * item.verify_ct
        pairs = zip(item.correct_drafts, item.accept_lengths, strict=True)
        assert all(kept - 1 <= correct <= kept for correct, kept in pairs)


@pytest.mark.parametrize(
    ("prompt", "limit", "words"),
    [(60, 10, "at most 4"), (64, 1, "shorten the prompt")],
)
def test_context_overflow_says_how_to_fix_it(prompt: int, limit: int, words: str) -> None:
    scheduler, _ = make()
    with pytest.raises(RequestError, match=words):
        check_fits(request(0, (1,) * prompt, limit), scheduler.limits, scheduler.allocator.capacity)


def test_a_request_larger_than_the_pool_is_refused() -> None:
    scheduler, _ = make(pages=5)
    with pytest.raises(RequestError, match="max_total_tokens"):
        check_fits(request(0, (1,) * 10, 40), scheduler.limits, scheduler.allocator.capacity)


@pytest.mark.exhaustive
def test_two_thousand_requests_with_aborts_leak_no_pages() -> None:
    rng = random.Random(7)
    scheduler, device = make(
        page_size=4, pages=60, overlap_depth=1, width=4, slots=8, max_pending_observe=4
    )
    requests = []
    for i in range(2000):
        prompt = tuple(rng.randrange(6) for _ in range(rng.randint(1, 30)))
        requests.append(request(i, prompt, rng.randint(1, 20)))
    run(scheduler, device, requests, rng, abort_rate=0.05)
    scheduler.check_idle()
    assert sum(r.finish is not None and r.finish.type == "abort" for r in requests) > 20
