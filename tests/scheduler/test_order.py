"""Who runs first: priorities, arrival, longest prefix; and that no request waits forever."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.errors import InternalError
from forerun.core.plan import StepPlan
from forerun.core.request import Request, State
from forerun.core.scheduling_params import SchedulingParams
from forerun.kvcache.pages import PageAllocator
from forerun.kvcache.radix_cache import RadixCache
from forerun.scheduler import waiting_queue
from forerun.scheduler.schedule_policy import SchedulePolicy
from forerun.scheduler.scheduler import Scheduler
from forerun.scheduler.waiting_queue import WaitingQueue
from tests.property_examples import examples
from tests.scheduler.test_scheduler import Device, make, plain, request, run


class Admissions:
    """Checks every admission against the requests that waited at that moment.

    Requests have the numbers of their arrival as ids.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.admitted: list[Request] = []
        self.passed_over: Counter[Request] = Counter()  # by later ones of the same priority

    def __call__(self, waiting: list[Request], plan: StepPlan) -> None:
        # Requests that this very step has preempted wait too, and may be admitted again.
        everyone = {r.rid: r for r in [*waiting, *self.scheduler.waiting, *self.scheduler.running]}
        admitted = [everyone[admission.rid] for admission in plan.admitted]
        now = dict.fromkeys([*waiting, *self.scheduler.waiting, *admitted])
        for item in admitted:
            del now[item]
            self.admitted.append(item)
            self.passed_over.pop(item, None)
            for other in now:
                assert other.order[0] >= item.order[0], "a lower priority went first"
                if other.order[0] == item.order[0] and int(other.rid) < int(item.rid):
                    self.passed_over[other] += 1


def load(rng: random.Random, count: int, priorities: int) -> list[Request]:
    """Prompts that begin like one another, or with nothing in common."""
    stems = [tuple(rng.randrange(6) for _ in range(40)) for _ in range(3)]
    requests = []
    for i in range(count):
        shared = rng.choice(stems)[: rng.choice([0, 8, 24, 40])]
        prompt = (*shared, *(rng.randrange(6) for _ in range(rng.randint(1, 8))))
        limit = rng.randint(1, 64 - len(prompt))
        requests.append(request(i, prompt, limit, priority=rng.randrange(priorities)))
    return requests


@examples(60)
@given(
    seed=st.integers(0, 10**6),
    overlap_depth=st.sampled_from([0, 1]),
    chunk=st.sampled_from([3, 16, 100]),
    tight=st.booleans(),
    cache=st.booleans(),
    lpm=st.booleans(),
    low_first=st.booleans(),
    priorities=st.sampled_from([1, 2, 4]),
    aborts=st.sampled_from([0.0, 0.05]),
)
def test_admissions_keep_their_order(
    seed: int,
    overlap_depth: int,
    chunk: int,
    tight: bool,
    cache: bool,
    lpm: bool,
    low_first: bool,
    priorities: int,
    aborts: float,
) -> None:
    """Also under preemption: none of a lower priority goes first, whatever the policy.

    With fcfs no request is passed over within a priority. Every one ends with the text of plain
    decoding, and slots and pages come back.
    """
    rng = random.Random(seed)
    scheduler, device = make(
        pages=22 if tight else 80, overlap_depth=overlap_depth, chunk=chunk, cache=cache, seed=seed,
        policy=SchedulePolicy(longest_prefix=lpm, low_priority_values_first=low_first),
    )  # fmt: skip
    requests, check = load(rng, 30, priorities), Admissions(scheduler)
    run(scheduler, device, requests, rng, aborts, check=check)
    scheduler.check_idle()
    if not (lpm and cache):
        assert not +check.passed_over
    for item in requests:
        assert item.state is State.FINISHED and item.finish is not None
        want = plain(item.prompt, item.params.max_new_tokens)
        assert item.output == (want[: len(item.output)] if item.finish.type == "abort" else want)


@examples(40)
@given(seed=st.integers(0, 10**6), slots=st.integers(1, 4), limit=st.sampled_from([1, 3, 8]))
def test_lpm_overtakes_a_bounded_number_of_times(seed: int, slots: int, limit: int) -> None:
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting_queue, "MAX_PASSED_OVER", limit)
        patch.setattr(waiting_queue, "WINDOW", 5)
        policy = SchedulePolicy(longest_prefix=True)
        scheduler, device = make(pages=22, slots=slots, seed=seed, policy=policy)
        most: Counter[Request] = Counter()
        check = Admissions(scheduler)

        def checked(waiting: list[Request], plan: StepPlan) -> None:
            check(waiting, plan)
            for item, count in check.passed_over.items():
                most[item] = max(most[item], count)

        run(scheduler, device, load(rng, 40, 2), rng, check=checked)
    # A request that was preempted waits again, and is counted anew.
    assert all(count <= limit * (1 + item.preemptions) for item, count in most.items())


def test_lpm_cannot_starve_a_request_without_a_prefix() -> None:
    """One slot, and always a request in the queue whose whole prompt is cached."""
    policy = SchedulePolicy(longest_prefix=True)
    scheduler, device = make(slots=1, policy=policy)
    shared = tuple(i % 6 for i in range(40))
    run(scheduler, device, [request(0, shared, 2)], random.Random(0))
    unlucky = request(1, (5, 4, 3), 2)
    scheduler.add(unlucky)
    others = 0
    while unlucky.state is State.WAITING:
        while len(scheduler.waiting) < 3:
            others += 1
            scheduler.add(request(1 + others, (*shared, others % 6), 2))
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.complete(device.launch(plan))
    overtook = others - len(scheduler.waiting)
    assert overtook == waiting_queue.MAX_PASSED_OVER


def test_lpm_admits_the_longest_prefix_of_the_oldest_first() -> None:
    policy = SchedulePolicy(longest_prefix=True)
    scheduler, device = make(pages=200, slots=1, chunk=64, policy=policy)
    texts = [tuple((i * k + k) % 6 for i in range(40)) for k in (1, 2, 3)]
    for rid, length in enumerate((12, 40, 24)):
        run(scheduler, device, [request(rid, texts[rid][:length], 1)], random.Random(0))
    check = Admissions(scheduler)
    waiting = [request(10 + rid, (*texts[rid], 1), 1) for rid in range(3)]
    plain_one, urgent = request(20, (3, 3), 1), request(21, (4, 4), 1, priority=1)
    for item in (plain_one, *waiting, urgent):
        scheduler.add(item)
    run(scheduler, device, [], random.Random(0), check=check)
    assert check.admitted == [urgent, waiting[1], waiting[2], waiting[0], plain_one]


def test_lpm_looks_at_the_oldest_of_a_long_queue() -> None:
    """Their cost is bounded, and a request far behind does not pass them."""
    allocator = PageAllocator(100)
    cache = RadixCache(allocator, 4)
    shared = tuple(range(12))
    pages = allocator.allocate(3)
    assert pages is not None
    cache.insert(shared, pages, cache.match_prefix(shared).node)
    queue = WaitingQueue(cache, longest_prefix=True)
    size = 3 * waiting_queue.WINDOW
    requests = [request(i, (50 + i,) * 3, 1) for i in range(size)]
    known = request(size, (*shared, 1), 1)
    requests.insert(2 * waiting_queue.WINDOW, known)
    for number, item in enumerate(requests):
        item.order = (0, number)
        queue.add(item)
    assert len(queue) == len(requests) and known in queue
    order = []
    for _ in requests:
        queue.begin_step()
        order.append(queue.pop())
    assert queue.peek() is None and known not in queue
    at = order.index(known)
    assert at == waiting_queue.WINDOW + 1  # as soon as it is among the oldest
    assert order[:at] + order[at + 1 :] == [item for item in requests if item is not known]
    with pytest.raises(InternalError, match="does not wait"):
        queue.remove(known)


def test_without_a_prefix_cache_lpm_is_fcfs() -> None:
    policy = SchedulePolicy(longest_prefix=True)
    scheduler, device = make(cache=False, policy=policy)
    check, requests = Admissions(scheduler), load(random.Random(1), 10, 1)
    run(scheduler, device, requests, random.Random(1), check=check)
    assert check.admitted == requests


def launch(scheduler: Scheduler, device: Device) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.complete(device.launch(plan))
    return plan


def test_an_urgent_prompt_is_computed_before_one_that_has_begun() -> None:
    scheduler, device = make(pages=100, chunk=8)
    long = request(0, (1,) * 40, 4, eos=False)
    scheduler.add(long)
    launch(scheduler, device)
    urgent, later = request(1, (2,) * 12, 4, eos=False, priority=1), request(2, (3,) * 4, 4)
    for item in (later, urgent):
        scheduler.add(item)
    first, second = launch(scheduler, device), launch(scheduler, device)
    assert [chunk.slot for chunk in first.prefill] == [urgent.slot]
    assert [chunk.slot for chunk in second.prefill] == [urgent.slot, long.slot]
    assert later.state is State.WAITING  # of the same priority: what has begun goes on
    assert scheduler.running == [urgent, long]


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    """It gets half of the tokens, the long one goes on with the other half."""
    scheduler, device = make(pages=100, chunk=8)
    long = request(0, (1,) * 50, 4, eos=False)
    scheduler.add(long)
    launch(scheduler, device)
    short, as_long = request(1, (2,) * 7, 4, eos=False), request(2, (3,) * 50, 4, eos=False)
    shorter = request(3, (4,), 4, eos=False)
    for item in (short, as_long, shorter):
        scheduler.add(item)
    sizes, slots = [], {}
    while long.state is State.PREFILL:
        chunks = launch(scheduler, device).prefill
        slots |= {each.slot: each.rid for each in scheduler.running}
        sizes.append({slots[c.slot]: c.num_tokens for c in chunks})
    assert sizes[:2] == [{"1": 4, "0": 4}, {"1": 3, "0": 5}]
    # Another long one waits for its turn, and nobody passes it while it does.
    assert sizes[2:] == [{"0": 8}] * 4 + [{"0": 1, "2": 7}]
    assert shorter.state is State.WAITING


def test_a_short_prompt_takes_nothing_from_a_more_urgent_one() -> None:
    scheduler, device = make(pages=100, chunk=8)
    long = request(0, (1,) * 20, 4, eos=False, priority=1)
    scheduler.add(request(1, (2,), 4, eos=False))
    scheduler.add(long)
    sizes = [[c.num_tokens for c in launch(scheduler, device).prefill] for _ in range(3)]
    assert sizes == [[8], [8], [4, 1]]


def test_half_of_the_tokens_are_a_long_prompts_own() -> None:
    """Whatever number of short ones comes."""
    scheduler, device = make(pages=400, slots=4, chunk=10, context=400)
    long = request(0, (1,) * 200, 1)
    scheduler.add(long)
    launch(scheduler, device)
    for step in range(1, 200):
        for i in range(4):
            scheduler.add(request(10 * step + i, (2, step % 6, i), 1))
        launch(scheduler, device)
        if long.state is not State.PREFILL:
            break
    assert step <= 2 * 200 / 10


def test_memory_is_taken_from_the_lowest_priority() -> None:
    scheduler, device = make(page_size=1, pages=80, slots=4)
    requests = [request(i, (i % 6, 1, 2), 60, eos=False, priority=-i) for i in (2, 0, 1)]
    for item in requests:
        scheduler.add(item)
    run(scheduler, device, [], random.Random(1))
    lowest, highest, middle = requests
    assert highest.preemptions == 0 < lowest.preemptions
    assert middle.preemptions <= lowest.preemptions
    assert all(r.output == plain(r.prompt, 60, None) for r in requests)


def test_prompt_tokens_of_a_step_are_limited() -> None:
    scheduler, device = make(chunk=16, policy=SchedulePolicy(max_prefill_tokens=5))
    scheduler.add(request(0, (1,) * 3, 1))
    scheduler.add(request(1, (2,) * 12, 1))
    sizes = [[c.num_tokens for c in launch(scheduler, device).prefill] for _ in range(3)]
    assert sizes == [[3, 2], [5], [5]]
    assert not scheduler.has_work


def test_priorities_have_bounds() -> None:
    for wrong in (2**31, -(2**31), 1.5, True, "1"):
        with pytest.raises(ValueError, match="priority must"):
            SchedulingParams(priority=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="queue_timeout must be > 0"):
        SchedulingParams(queue_timeout=0)
