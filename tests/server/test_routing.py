"""Routing: which replica gets which prompt."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.errors import ConfigError
from forerun.platform import cpu_threads
from forerun.server.engines.routing import (
    METHODS,
    REQUEST_TOKENS,
    Load,
    PrefixIndex,
    Router,
    block_keys,
    block_size,
    most_requests,
)
from forerun.server.settings import ServerSettings

BLOCK = 4
TOKENS = st.lists(st.integers(0, 2), max_size=24)
LOADS = st.dictionaries(
    st.integers(0, 3), st.builds(Load, st.integers(0, 40), st.integers(0, 5000)), min_size=1
)


def router(method: str = "cache_aware", replicas: int = 4, capacity: int = 1 << 20) -> Router[int]:
    return made(method, replicas, capacity, BLOCK)


def made(method: str, replicas: int, capacity: int, block: int) -> Router[int]:
    routing = Router[int](method, block)
    for replica in range(replicas):
        routing.add(replica, capacity)
    return routing


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Whole blocks of the common prefix."""
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    return same // BLOCK


@given(st.lists(TOKENS, max_size=8), TOKENS)
def test_the_index_finds_the_longest_prefix(known: list[list[int]], prompt: list[int]) -> None:
    index = PrefixIndex(1000)
    for each in known:
        index.add(block_keys(each, BLOCK))
    want = max((common(each, prompt) for each in known), default=0)
    assert index.match(block_keys(prompt, BLOCK)) == want


def test_blocks_are_whole_pages() -> None:
    assert [block_size(page) for page in (1, 16, 32, 64, 256)] == [32, 32, 32, 64, 256]


@given(st.lists(TOKENS, max_size=12), st.integers(0, 5))
def test_the_index_forgets_what_was_used_least_recently(
    prompts: list[list[int]], capacity: int
) -> None:
    """As an ordered dictionary of prefixes does; a prefix outlives what continues it."""
    index, reference = PrefixIndex(capacity), OrderedDict[tuple[int, ...], None]()
    for prompt in prompts:
        index.add(block_keys(prompt, BLOCK))
        for blocks in range(len(prompt) // BLOCK, 0, -1):
            key = tuple(prompt[: blocks * BLOCK])
            reference.pop(key, None)
            reference[key] = None
        while len(reference) > capacity:
            reference.popitem(last=False)
        assert len(index) == len(reference)
        for each in prompts:
            blocks = 0
            while tuple(each[: (blocks + 1) * BLOCK]) in reference and (
                (blocks + 1) * BLOCK <= len(each)
            ):
                blocks += 1
            assert index.match(block_keys(each, BLOCK)) == blocks


@given(st.sampled_from(sorted(METHODS)), st.lists(st.tuples(TOKENS, LOADS), max_size=10))
def test_a_replica_that_serves_is_chosen(
    method: str, requests: list[tuple[list[int], dict[int, Load]]]
) -> None:
    routing = router(method)
    for prompt, loads in requests:
        assert routing.choose(prompt, loads).replica in loads


@given(st.lists(st.tuples(TOKENS, LOADS), max_size=10))
def test_no_replica_gets_far_ahead_and_the_cheapest_of_the_others_is_chosen(
    requests: list[tuple[list[int], dict[int, Load]]],
) -> None:
    routing = router()
    sent: dict[int, list[list[int]]] = {replica: [] for replica in range(4)}
    for prompt, loads in requests:
        cached = {
            replica: BLOCK * max((common(each, prompt) for each in sent[replica]), default=0)
            for replica in loads
        }
        chosen, found = routing.choose(prompt, loads)
        assert found == cached[chosen]
        most = most_requests(min(load.requests for load in loads.values()))
        assert loads[chosen].requests <= most

        def cost(replica: int, loads: dict[int, Load], cached: dict[int, int]) -> int:
            load = loads[replica]
            return load.prompt_tokens + REQUEST_TOKENS * load.requests - cached[replica]

        allowed = [replica for replica in loads if loads[replica].requests <= most]
        assert cost(chosen, loads, cached) == min(cost(r, loads, cached) for r in allowed)
        sent[chosen].append(prompt)


def test_idle_replicas_take_turns() -> None:
    for method in METHODS:
        routing = router(method, replicas=3)
        loads = dict.fromkeys(range(3), Load())
        prompts = ([n] * BLOCK for n in range(6))
        chosen = [routing.choose(prompt, loads).replica for prompt in prompts]
        assert chosen == [0, 1, 2, 0, 1, 2], method


def test_round_robin_goes_on_past_a_replica_that_is_down() -> None:
    routing = router("round_robin", replicas=3)
    without = {0: Load(), 2: Load()}
    assert [routing.choose([1], without).replica for _ in range(4)] == [0, 2, 0, 2]
    assert routing.choose([1], {**without, 1: Load()}).replica == 1  # it is back


def test_the_shortest_queue_has_the_fewest_requests() -> None:
    loads = {0: Load(3), 1: Load(2, 9000), 2: Load(4)}
    assert router("shortest_queue").choose([1], loads).replica == 1


def test_a_cleared_cache_is_forgotten() -> None:
    routing, prompt = router(replicas=2), [1] * 4 * BLOCK
    loads = {0: Load(), 1: Load()}
    assert routing.choose(prompt, loads) == (0, 0)
    assert routing.choose(prompt, loads) == (0, 4 * BLOCK)
    routing.forget(0)
    assert routing.choose(prompt, loads) == (1, 0)


@pytest.mark.parametrize("seed", range(3))
def test_conversations_stay_where_their_prefix_is(seed: int) -> None:
    """Each turn continues the one before. Loads stay close to each other all the same."""
    rng, replicas = random.Random(seed), 4
    routing = made("cache_aware", replicas, 1 << 20, block=64)
    talks = [[rng.randrange(1000) for _ in range(4096)] for _ in range(24)]
    lengths, running = [512] * len(talks), Counter[int]()
    cached = prompts = 0
    queue: list[int] = []
    for _ in range(300):
        if len(queue) == 16:
            running[queue.pop(rng.randrange(16))] -= 1
        at = rng.randrange(len(talks))
        lengths[at] = min(lengths[at] + rng.randrange(200, 400), 4096)
        prompt = talks[at][: lengths[at]]
        loads = {replica: Load(running[replica]) for replica in range(replicas)}
        chosen, found = routing.choose(prompt, loads)
        running[chosen] += 1
        queue.append(chosen)
        cached, prompts = cached + found, prompts + len(prompt)
        least = min(running[replica] for replica in range(replicas))
        assert running[chosen] <= most_requests(least) + 1
    # Round robin finds a quarter of it at most.
    assert cached / prompts > 0.6


def test_settings() -> None:
    with pytest.raises(ConfigError, match="dp_size must be >= 1"):
        ServerSettings(dp_size=0)
    with pytest.raises(ConfigError, match="Did you mean 'shortest_queue'"):
        ServerSettings(load_balance_method="shortest_queues")


def test_shares_of_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Siblings of a core stay together; without enough cores nothing is divided."""
    monkeypatch.setattr(cpu_threads, "_usable", lambda: list(range(8)))
    monkeypatch.setattr(cpu_threads, "_read", lambda path: str(int(path.parts[-3][3:]) % 4))
    assert cpu_threads.cpu_shares(2) == [(0, 4, 1, 5), (2, 6, 3, 7)]
    assert cpu_threads.cpu_shares(3) == [(0, 4), (1, 5), (2, 6, 3, 7)]
    assert cpu_threads.cpu_shares(5) == [()] * 5
    monkeypatch.setattr(cpu_threads, "_usable", list)
    assert cpu_threads.cpu_shares(2) == [(), ()]
