"""The prefix cache by example: sizes, look-ahead, order of eviction, misuse."""

from __future__ import annotations

import random

import pytest

from forerun.core.errors import InternalError
from forerun.kvcache.pages import PageAllocator
from forerun.kvcache.prefix import NoPrefixCache, PrefixCache, PrefixNode


def make(page_size: int = 2, lookahead: int = 0, pages: int = 100) -> PrefixCache:
    return PrefixCache(PageAllocator(pages + 1), page_size, lookahead)


def run(cache: PrefixCache, tokens: list[int], kv_len: int | None = None) -> list[int]:
    """A request's whole life; returns the pages it held."""
    match = cache.match(tokens)
    cache.lock(match.node)
    own = cache._allocator.allocate(-(-len(tokens) // cache._page_size) - len(match.pages))
    assert own is not None
    pages = match.pages + own
    done = cache.insert(tokens, pages, match.node, kv_len)
    cache._allocator.free(done.owned)
    cache.unlock(match.node)
    cache.check()
    return pages


# --- matching -----------------------------------------------------------------------------------


def test_a_prompt_seen_before_still_computes_its_last_token() -> None:
    cache = make(page_size=2)
    pages = run(cache, [5, 6, 7, 8])
    assert cache.num_pages == 2
    match = cache.match([5, 6, 7, 8])
    assert (match.pages, match.length) == (pages[:1], 2)
    assert cache.match([5, 6, 7, 8, 9]).pages == pages


@pytest.mark.parametrize("tokens", [[], [5], [5, 6], [6, 5, 7]])
def test_no_match(tokens: list[int]) -> None:
    cache = make(page_size=2)
    run(cache, [5, 6, 7, 8])
    match = cache.match(tokens)
    assert (match.pages, match.length, match.node.end) == ([], 0, 0)


def test_a_page_matches_whole_or_not_at_all() -> None:
    cache = make(page_size=4)
    pages = run(cache, list(range(12)))
    assert cache.match([0, 1, 2, 3, 4, 5, 6, 99, 8, 9]).pages == pages[:1]


def test_prompts_may_be_tuples_of_any_int32() -> None:
    cache = make(page_size=1)
    pages = run(cache, [2**31 - 1, 1 << 24, 256])
    assert cache.match((2**31 - 1, 1 << 16, 256)).pages == pages[:1]
    assert cache.match((2**31 - 1, 1 << 24, 256, 0)).pages == pages


def test_look_ahead_must_agree_and_be_known() -> None:
    cache = make(page_size=2, lookahead=1)
    pages = run(cache, [1, 2, 3, 4, 5])
    assert cache.num_pages == 2
    assert cache.match([1, 2, 3, 4, 5, 6]).pages == pages[:2]
    assert cache.match([1, 2, 3, 4, 9, 6]).pages == pages[:1]  # its draft K/V saw a 5
    assert cache.match([1, 2, 9]).pages == []

    run(cache, [1, 2, 9, 9])  # the same first page, with another token after it
    assert cache.num_pages == 3  # the last page of [1, 2, 9, 9] has no look-ahead yet
    assert cache.match([1, 2, 9]).pages != cache.match([1, 2, 3]).pages


# --- inserting ----------------------------------------------------------------------------------


def test_only_written_rows_are_shared() -> None:
    """The last token of an output has no K/V yet: its page is not whole."""
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


def test_two_requests_with_one_prompt_at_the_same_time() -> None:
    allocator = PageAllocator(11)
    cache = PrefixCache(allocator, page_size=2)
    prompt, nodes, pages = [1, 2, 3, 4, 5], [], [[1, 2, 3], [4, 5, 6]]
    assert allocator.allocate(6) == [1, 2, 3, 4, 5, 6]
    for _ in range(2):
        nodes.append(cache.match(prompt).node)
        cache.lock(nodes[-1])

    first = cache.insert(prompt, pages[0], nodes[0])
    assert (first.start, first.shared, first.duplicates, first.tail) == (0, [], [], [3])
    second = cache.insert([*prompt, 6, 7], [*pages[1], 7], nodes[1], kv_len=6)
    assert (second.start, second.shared, second.duplicates) == (0, [1, 2], [4, 5])
    assert second.tail == [7] and second.node.end == 3  # page 6 went in
    assert cache.num_pages == 4 - 1 and second.owned == [4, 5, 7]
    allocator.free(first.owned)
    assert cache.match([*prompt, 6, 7]).pages == [1, 2, 6]


def test_an_abort_may_skip_insert() -> None:
    cache = make(page_size=2)
    run(cache, [1, 2, 3, 4])
    match = cache.match([1, 2, 3, 4, 5])
    cache.lock(match.node)
    done = cache.insert([1, 2], [*match.pages, 99], match.node)  # or says how little it has
    assert (done.node, done.owned) == (match.node, [99])
    cache.unlock(match.node)
    assert cache.num_evictable == cache.num_pages == 2


# --- eviction -----------------------------------------------------------------------------------


def test_least_recently_used_goes_first_from_its_end() -> None:
    cache = make(page_size=1)
    run(cache, [1, 2, 3])
    run(cache, [4, 5, 6])
    assert cache.match([1, 2, 3, 0]).length == 3  # used again: [4, 5, 6] is older now
    assert cache.evict(2) == 2
    assert cache.match([4, 5, 6, 0]).length == 1
    assert cache.evict(1) == 1  # now [4] is the youngest: 3 goes
    assert cache.match([1, 2, 3, 0]).length == 2
    assert cache.evict(100) == 3
    assert cache.evict(100) == 0
    cache.check()


def test_a_use_counts_even_while_locked() -> None:
    cache = make(page_size=1)
    run(cache, [1, 2])
    run(cache, [3, 4])
    match = cache.match([1, 2, 0])
    cache.lock(match.node)
    cache.unlock(match.node)
    assert cache.evict(2) == 2
    assert cache.match([1, 2, 0]).length == 2
    assert cache.match([3, 4, 0]).length == 0


def test_a_shared_head_outlives_its_branches() -> None:
    cache = make(page_size=1)
    head = [1, 2, 3]
    for last in range(4, 9):
        run(cache, [*head, last, last])
    assert cache.num_pages == 3 + 5 * 2
    assert cache.evict(10) == 10
    assert cache.match([*head, 0]).length == 3


def test_locked_pages_stay_and_the_rest_of_their_edge_goes() -> None:
    cache = make(page_size=1)
    run(cache, [1, 2, 3, 4, 5])
    match = cache.match([1, 2, 3, 9])
    cache.lock(match.node)
    cache.lock(match.node)  # two requests
    assert cache.num_evictable == 2
    assert cache.clear() == 2
    cache.unlock(match.node)
    assert cache.clear() == 0
    cache.unlock(match.node)
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
    deep, shallow = cache.match([1, 2, 3, 4, 5]).node, cache.match([1, 2, 3]).node
    cache.lock(deep)
    with pytest.raises(InternalError, match="unlocked more than locked"):
        cache.unlock(shallow)  # has references, from below, but was never locked itself
    cache.unlock(deep)
    with pytest.raises(InternalError, match="prefix of 2 pages was unlocked more than locked"):
        cache.unlock(deep)
    cache.check()


def test_a_match_that_was_evicted_cannot_be_locked() -> None:
    cache = make()
    run(cache, [1, 2, 3, 4, 5])
    match = cache.match([1, 2, 3, 4, 5])
    cache.evict(1)
    with pytest.raises(InternalError, match="evicted between match and lock"):
        cache.lock(match.node)


def test_pages_that_are_not_those_locked() -> None:
    cache = make()
    run(cache, [1, 2, 3, 4])
    match = cache.match([1, 2, 3, 4, 5])
    with pytest.raises(InternalError, match="first 2 pages"):
        cache.insert([1, 2, 3, 4], [50, 51], match.node)


def test_pages_inserted_twice() -> None:
    cache = make()
    root = cache.match([]).node
    pages = run(cache, [1, 2, 3, 4])
    with pytest.raises(InternalError, match="has already"):
        cache.insert([1, 2, 3, 4], pages, root)


def test_too_few_pages_for_the_tokens() -> None:
    cache = make()
    with pytest.raises(InternalError, match="1 pages cannot hold 2"):
        cache.insert([1, 2, 3, 4], [1], cache.match([]).node)


def _node(cache: PrefixCache) -> PrefixNode:
    return cache.match([1, 2, 3, 4, 5]).node


def test_check_sees_what_is_broken() -> None:
    def free_a_cached_page(cache: PrefixCache) -> None:
        cache._allocator.free(_node(cache).pages[:1])

    def own_a_page_twice(cache: PrefixCache) -> None:
        _node(cache).pages[1] = _node(cache).pages[0]

    def forget_a_reference(cache: PrefixCache) -> None:
        _node(cache).refs += 1

    def miscount(cache: PrefixCache) -> None:
        cache._num_evictable += 1

    def miscount_all(cache: PrefixCache) -> None:
        cache._num_pages -= 1

    def lose_the_queue(cache: PrefixCache) -> None:
        cache._queue.clear()

    def cut_a_key(cache: PrefixCache) -> None:
        _node(cache).key = _node(cache).key[:-1]

    breakages = [
        (free_a_cached_page, "is free"),
        (own_a_page_twice, "cached twice"),
        (forget_a_reference, "references"),
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
        assert cache.match(other).pages == pages[:whole]
    assert cache.match([*tokens, 0, 0]).pages == pages[: 32_768 // page_size]
    cache.check()


def test_without_a_cache_every_page_stays_the_requests() -> None:
    cache = NoPrefixCache()
    match = cache.match([1, 2, 3])
    assert (match.pages, match.length, match.node.end) == ([], 0, 0)
    cache.lock(match.node)
    done = cache.insert([1, 2, 3], [4, 5], match.node, kv_len=2)
    assert (done.node, done.shared, done.owned) == (match.node, [], [4, 5])
    cache.unlock(match.node)
    assert cache.evict(3) == cache.clear() == cache.num_pages == cache.num_evictable == 0
    cache.check()
    with pytest.raises(InternalError, match="unlocked more than locked"):
        cache.unlock(match.node)
