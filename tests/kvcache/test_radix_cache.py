"""The radix cache: matches, look-ahead, eviction order, snapshots, and misuse."""

from __future__ import annotations

import random

import pytest

from forerun.core.errors import InternalError
from forerun.kvcache.pages import PageAllocator
from forerun.kvcache.radix_cache import NoPrefixCache, RadixCache, RadixNode


def make(page_size: int = 2, lookahead: int = 0, pages: int = 100) -> RadixCache:
    return RadixCache(PageAllocator(pages + 1), page_size, lookahead)


def run(cache: RadixCache, tokens: list[int], kv_len: int | None = None) -> list[int]:
    """Runs a request from match to release; returns its pages."""
    match = cache.match_prefix(tokens)
    cache.inc_lock_ref(match.node)
    own = cache._allocator.allocate(-(-len(tokens) // cache._page_size) - len(match.pages))
    assert own is not None
    pages = match.pages + own
    done = cache.insert(tokens, pages, match.node, kv_len)
    cache._allocator.free(done.owned)
    cache.dec_lock_ref(match.node)
    cache.check()
    return pages


# --- matching -----------------------------------------------------------------------------------


def test_a_prompt_seen_before_still_computes_its_last_token() -> None:
    cache = make(page_size=2)
    pages = run(cache, [5, 6, 7, 8])
    assert cache.num_pages == 2
    match = cache.match_prefix([5, 6, 7, 8])
    assert (match.pages, match.length) == (pages[:1], 2)
    assert cache.match_prefix([5, 6, 7, 8, 9]).pages == pages


@pytest.mark.parametrize("tokens", [[], [5], [5, 6], [6, 5, 7]])
def test_no_match(tokens: list[int]) -> None:
    cache = make(page_size=2)
    run(cache, [5, 6, 7, 8])
    match = cache.match_prefix(tokens)
    assert (match.pages, match.length, match.node.end) == ([], 0, 0)


def test_only_complete_pages_match() -> None:
    cache = make(page_size=4)
    pages = run(cache, list(range(12)))
    assert cache.match_prefix([0, 1, 2, 3, 4, 5, 6, 99, 8, 9]).pages == pages[:1]


def test_prompts_may_be_tuples_of_any_int32() -> None:
    cache = make(page_size=1)
    pages = run(cache, [2**31 - 1, 1 << 24, 256])
    assert cache.match_prefix((2**31 - 1, 1 << 16, 256)).pages == pages[:1]
    assert cache.match_prefix((2**31 - 1, 1 << 24, 256, 0)).pages == pages


def test_look_ahead_must_agree_and_be_known() -> None:
    cache = make(page_size=2, lookahead=1)
    pages = run(cache, [1, 2, 3, 4, 5])
    assert cache.num_pages == 2
    assert cache.match_prefix([1, 2, 3, 4, 5, 6]).pages == pages[:2]
    assert cache.match_prefix([1, 2, 3, 4, 9, 6]).pages == pages[:1]  # its draft K/V saw a 5
    assert cache.match_prefix([1, 2, 9]).pages == []

    run(cache, [1, 2, 9, 9])  # the same first page, with another token after it
    assert cache.num_pages == 3  # the last page of [1, 2, 9, 9] has no look-ahead yet
    assert cache.match_prefix([1, 2, 9]).pages != cache.match_prefix([1, 2, 3]).pages


# --- inserting ----------------------------------------------------------------------------------


def test_only_written_kv_is_cached() -> None:
    """The last output token has no K/V yet, so its page is not complete."""
    cache = make(page_size=2)
    run(cache, [1, 2, 3, 4], kv_len=3)
    assert cache.num_pages == 1
    run(cache, [7, 7, 7, 7], kv_len=0)
    assert cache.num_pages == 1


def test_a_written_page_waits_for_its_look_ahead() -> None:
    cache = make(page_size=2, lookahead=1)
    run(cache, [1, 2, 3, 4], kv_len=4)
    assert cache.num_pages == 1
    run(cache, [7, 7, 7, 7, 7], kv_len=4)  # the look-ahead itself needs no K/V
    assert cache.num_pages == 3


def test_a_page_waits_until_its_look_ahead_has_run_but_for_one() -> None:
    """A third MTP layer's K/V at position i is written with the K/V of position i + 2."""
    cache = make(page_size=2, lookahead=3)
    run(cache, [1, 2, 3, 4, 5, 6, 7, 8], kv_len=3)
    assert cache.num_pages == 0
    run(cache, [1, 2, 3, 4, 5, 6, 7, 8], kv_len=4)
    assert cache.num_pages == 1
    run(cache, [1, 2, 3, 4, 5, 6, 7, 8], kv_len=8)
    assert cache.num_pages == 2


def test_two_requests_with_one_prompt_at_the_same_time() -> None:
    allocator = PageAllocator(11)
    cache = RadixCache(allocator, page_size=2)
    prompt, nodes, pages = [1, 2, 3, 4, 5], [], [[1, 2, 3], [4, 5, 6]]
    assert allocator.allocate(6) == [1, 2, 3, 4, 5, 6]
    for _ in range(2):
        nodes.append(cache.match_prefix(prompt).node)
        cache.inc_lock_ref(nodes[-1])

    first = cache.insert(prompt, pages[0], nodes[0])
    assert (first.start, first.shared, first.duplicates, first.tail) == (0, [], [], [3])
    second = cache.insert([*prompt, 6, 7], [*pages[1], 7], nodes[1], kv_len=6)
    assert (second.start, second.shared, second.duplicates) == (0, [1, 2], [4, 5])
    assert second.tail == [7] and second.node.end == 3  # page 6 went in
    assert cache.num_pages == 4 - 1 and second.owned == [4, 5, 7]
    allocator.free(first.owned)
    assert cache.match_prefix([*prompt, 6, 7]).pages == [1, 2, 6]


def test_an_abort_may_skip_insert() -> None:
    cache = make(page_size=2)
    run(cache, [1, 2, 3, 4])
    match = cache.match_prefix([1, 2, 3, 4, 5])
    cache.inc_lock_ref(match.node)
    done = cache.insert([1, 2], [*match.pages, 99], match.node)  # or says how little it has
    assert (done.node, done.owned) == (match.node, [99])
    cache.dec_lock_ref(match.node)
    assert cache.num_evictable == cache.num_pages == 2


# --- eviction -----------------------------------------------------------------------------------


def test_eviction_is_least_recently_used_first_from_the_leaves() -> None:
    cache = make(page_size=1)
    run(cache, [1, 2, 3])
    run(cache, [4, 5, 6])
    assert cache.match_prefix([1, 2, 3, 0]).length == 3  # used again: [4, 5, 6] is older now
    assert cache.evict(2) == 2
    assert cache.match_prefix([4, 5, 6, 0]).length == 1
    assert cache.evict(1) == 1  # now [4] is the youngest: 3 goes
    assert cache.match_prefix([1, 2, 3, 0]).length == 2
    assert cache.evict(100) == 3
    assert cache.evict(100) == 0
    cache.check()


def test_use_while_locked_updates_the_access_time() -> None:
    cache = make(page_size=1)
    run(cache, [1, 2])
    run(cache, [3, 4])
    match = cache.match_prefix([1, 2, 0])
    cache.inc_lock_ref(match.node)
    cache.dec_lock_ref(match.node)
    assert cache.evict(2) == 2
    assert cache.match_prefix([1, 2, 0]).length == 2
    assert cache.match_prefix([3, 4, 0]).length == 0


def test_a_shared_head_outlives_its_branches() -> None:
    cache = make(page_size=1)
    head = [1, 2, 3]
    for last in range(4, 9):
        run(cache, [*head, last, last])
    assert cache.num_pages == 3 + 5 * 2
    assert cache.evict(10) == 10
    assert cache.match_prefix([*head, 0]).length == 3


def test_unlocked_pages_of_a_partly_locked_edge_are_evicted() -> None:
    cache = make(page_size=1)
    run(cache, [1, 2, 3, 4, 5])
    match = cache.match_prefix([1, 2, 3, 9])
    cache.inc_lock_ref(match.node)
    cache.inc_lock_ref(match.node)  # two requests
    assert cache.num_evictable == 2
    assert cache.clear() == 2
    cache.dec_lock_ref(match.node)
    assert cache.clear() == 0
    cache.dec_lock_ref(match.node)
    assert cache.clear() == 3
    assert cache.num_pages == 0 and cache._allocator.num_free == 100


def test_the_eviction_queue_does_not_grow_with_use() -> None:
    cache = make(page_size=1)
    for i in range(300):
        run(cache, [i % 3, 1, 2])
    assert len(cache._queue) <= 3


# --- misuse is an internal error ----------------------------------------------------------------


def test_unlock_below_zero() -> None:
    cache = make()
    run(cache, [1, 2, 3, 4, 5])
    deep, shallow = cache.match_prefix([1, 2, 3, 4, 5]).node, cache.match_prefix([1, 2, 3]).node
    cache.inc_lock_ref(deep)
    with pytest.raises(InternalError, match="unlocked more than locked"):
        cache.dec_lock_ref(shallow)  # has references, from below, but was never locked itself
    cache.dec_lock_ref(deep)
    with pytest.raises(InternalError, match="prefix of 2 pages was unlocked more than locked"):
        cache.dec_lock_ref(deep)
    cache.check()


def test_a_match_that_was_evicted_cannot_be_locked() -> None:
    cache = make()
    run(cache, [1, 2, 3, 4, 5])
    match = cache.match_prefix([1, 2, 3, 4, 5])
    cache.evict(1)
    with pytest.raises(InternalError, match="evicted between match and lock"):
        cache.inc_lock_ref(match.node)


def test_inserting_other_pages_than_the_locked_ones_is_an_error() -> None:
    cache = make()
    run(cache, [1, 2, 3, 4])
    match = cache.match_prefix([1, 2, 3, 4, 5])
    with pytest.raises(InternalError, match="first 2 pages"):
        cache.insert([1, 2, 3, 4], [50, 51], match.node)


def test_pages_inserted_twice() -> None:
    cache = make()
    root = cache.match_prefix([]).node
    pages = run(cache, [1, 2, 3, 4])
    with pytest.raises(InternalError, match="has already"):
        cache.insert([1, 2, 3, 4], pages, root)


def test_too_few_pages_for_the_tokens() -> None:
    cache = make()
    with pytest.raises(InternalError, match="1 pages cannot hold 2"):
        cache.insert([1, 2, 3, 4], [1], cache.match_prefix([]).node)


def _node(cache: RadixCache) -> RadixNode:
    return cache.match_prefix([1, 2, 3, 4, 5]).node


def test_check_detects_broken_invariants() -> None:
    def free_a_cached_page(cache: RadixCache) -> None:
        cache._allocator.free(_node(cache).pages[:1])

    def own_a_page_twice(cache: RadixCache) -> None:
        _node(cache).pages[1] = _node(cache).pages[0]

    def forget_a_reference(cache: RadixCache) -> None:
        _node(cache).lock_ref += 1

    def miscount(cache: RadixCache) -> None:
        cache._num_evictable += 1

    def miscount_all(cache: RadixCache) -> None:
        cache._num_pages -= 1

    def lose_the_queue(cache: RadixCache) -> None:
        cache._queue.clear()

    def cut_a_key(cache: RadixCache) -> None:
        _node(cache).key = _node(cache).key[:-1]

    breakages = [
        (free_a_cached_page, "is free"),
        (own_a_page_twice, "cached twice"),
        (forget_a_reference, "not the locks taken"),
        (miscount, "evictable"),
        (miscount_all, "pages cached"),
        (lose_the_queue, "queue"),
        (cut_a_key, "whole pages"),
    ]
    for broken, says in breakages:
        cache = make()
        run(cache, [1, 2, 3, 4])
        cache.check()
        broken(cache)
        with pytest.raises(InternalError, match=says):
            cache.check()


# --- sizes, and no cache at all -----------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_long_prompts(page_size: int) -> None:
    rng = random.Random(page_size)
    cache = make(page_size, lookahead=1, pages=70_000)
    tokens = [rng.randrange(150_000) for _ in range(32_768)]
    pages = run(cache, [*tokens, 0])
    for cut in (32_768, 20_001, 17, 3):
        other = [*tokens[:cut], -1, -1]
        whole = max(0, cut - 1) // page_size  # the last token agreed is look-ahead
        assert cache.match_prefix(other).pages == pages[:whole]
    assert cache.match_prefix([*tokens, 0, 0]).pages == pages[: 32_768 // page_size]
    cache.check()


def test_without_a_cache_requests_own_all_pages() -> None:
    cache = NoPrefixCache()
    match = cache.match_prefix([1, 2, 3])
    assert (match.pages, match.length, match.node.end) == ([], 0, 0)
    cache.inc_lock_ref(match.node)
    done = cache.insert([1, 2, 3], [4, 5], match.node, kv_len=2)
    assert (done.node, done.shared, done.owned) == (match.node, [], [4, 5])
    cache.dec_lock_ref(match.node)
    assert cache.evict(3) == cache.clear() == cache.num_pages == cache.num_evictable == 0
    cache.check()
    with pytest.raises(InternalError, match="unlocked more than locked"):
        cache.dec_lock_ref(match.node)


# --- snapshots of recurrent state ---------------------------------------------------------------


def stateful(num_snapshots: int, lookahead: int = 0) -> RadixCache:
    return RadixCache(PageAllocator(101), 2, lookahead, num_snapshots)


def prefill(cache: RadixCache, tokens: list[int]) -> int | None:
    """A request that saves a snapshot if it can; returns the snapshot's row."""
    row = cache.allocate_snapshot()
    run(cache, tokens)
    if row is not None:
        cache.attach_snapshot(tokens, cache.snapshot_length(tokens), row)
    cache.check()
    return row


def test_a_match_ends_at_a_snapshot() -> None:
    cache = stateful(3)
    row = prefill(cache, [1, 2, 3, 4, 5])  # state known at 4
    match = cache.match_prefix([1, 2, 3, 4, 5, 6, 7])
    assert (match.length, match.snapshot, match.node.end) == (4, row, 2)
    run(cache, [1, 2, 3, 4, 5, 6, 7])  # K/V of 6 tokens, no state there
    assert cache.cached_length(cache.key([1, 2, 3, 4, 5, 6, 7])) == 4
    assert cache.cached_length(cache.key([1, 2, 3, 4])) == 0
    assert cache.match_prefix([1, 2, 3, 4, 5, 6, 7]).length == 4
    assert cache.match_prefix([1, 2, 3, 9]).length == 0  # this cuts the edge in two
    assert cache.match_prefix([1, 2, 3, 4, 5]).snapshot == row
    cache.check()


def test_the_look_ahead_shortens_the_snapshot() -> None:
    assert stateful(1).snapshot_length([1, 2, 3, 4]) == 2  # one token is left to compute
    assert stateful(1, lookahead=2).snapshot_length([1, 2, 3, 4]) == 2
    assert stateful(1, lookahead=3).snapshot_length([1, 2, 3, 4]) == 0
    assert stateful(0).snapshot_length([1, 2, 3, 4]) == make().snapshot_length([1, 2, 3, 4]) == 0


def test_the_least_recently_used_snapshot_is_evicted() -> None:
    cache = stateful(2)
    prefill(cache, [1, 2, 3])
    second = prefill(cache, [4, 5, 6])
    assert cache.match_prefix([1, 2, 3]).length == 2
    assert prefill(cache, [7, 8, 9]) == second
    assert cache.match_prefix([4, 5, 6]).length == 0  # its K/V stays, and is of no use
    assert (cache.num_pages, cache.num_pending_snapshots) == (3, 0)


def test_snapshot_rows_are_freed() -> None:
    cache = stateful(2)
    row = prefill(cache, [1, 2, 3])
    again = cache.allocate_snapshot()
    assert again is not None and again != row and cache.num_pending_snapshots == 1
    cache.attach_snapshot([1, 2, 3], 2, again)  # there is one: this one is freed
    assert cache.num_pending_snapshots == 0 and cache.match_prefix([1, 2, 3]).snapshot == row
    gone = cache.allocate_snapshot()
    assert gone is not None
    cache.attach_snapshot([8, 8, 8], 2, gone)  # these pages were evicted meanwhile
    with pytest.raises(InternalError, match="freed twice"):
        cache.free_snapshot(gone)
    assert cache.clear() == 1  # with its page the snapshot goes too
    assert cache.match_prefix([1, 2, 3]).snapshot is None
    cache.check()
    assert {cache.allocate_snapshot(), cache.allocate_snapshot()} == {0, 1}
    assert cache.allocate_snapshot() is None and cache.num_pending_snapshots == 2
