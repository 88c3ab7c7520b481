"""Window pages: how far a prefix can be shared, what is evicted, who owns what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from forerun.core.errors import InternalError
from forerun.kvcache.pages import PageAllocator
from forerun.kvcache.radix_cache import RadixCache
from forerun.kvcache.window_pages import WindowPages
from tests.property_examples import examples

CAPACITY = 12


@examples(300)
@given(
    cached=st.lists(st.booleans(), max_size=12),
    page_size=st.sampled_from([1, 4]),
    window=st.integers(1, 20),
    more=st.integers(1, 30),
    attends=st.booleans(),
)
def test_a_prefix_is_shared_as_far_as_its_window_is_cached(
    cached: list[bool], page_size: int, window: int, more: int, attends: bool
) -> None:
    """`cached`: which of the prompt's cached pages have a window page."""
    windows = WindowPages(40, page_size, window, attends)
    for page, has in enumerate(cached, 1):
        if has:
            (window_page,) = windows.allocate(1) or []
            assert windows.insert(page, window_page)
    tokens = len(cached) * page_size + more

    def usable(n: int) -> bool:
        """Position by position: what the first token after the prefix reads."""
        first = (n * page_size if attends else tokens) - window
        return all(cached[p // page_size] for p in range(max(0, first), n * page_size))

    longest = windows.longest_prefix(range(1, len(cached) + 1), tokens)
    assert longest == max(n for n in range(len(cached) + 1) if usable(n))


class Sharing(RuleBasedStateMachine):
    """Requests that cache and lock window pages, under pressure."""

    def __init__(self) -> None:
        super().__init__()
        self.windows = WindowPages(CAPACITY + 1, 4, 8)
        self.own: list[int] = []
        self.cached: dict[int, int] = {}  # page -> window page; the least recently used first
        self.locks: list[int] = []

    @rule(n=st.integers(0, 5))
    def allocate(self, n: int) -> None:
        evictable = [page for page in self.cached if page not in self.locks]
        free = CAPACITY - len(self.cached) - len(self.own)
        assert self.windows.num_available == free + len(evictable)
        pages = self.windows.allocate(n)
        if n > free + len(evictable):
            assert pages is None
            return
        assert pages is not None and len(pages) == n
        for page in evictable[: max(0, n - free)]:
            del self.cached[page]
        self.own += pages

    @precondition(lambda self: self.own)
    @rule(page=st.integers(1, 20))
    def insert(self, page: int) -> None:
        taken = self.windows.insert(page, self.own[-1])
        assert taken == (page not in self.cached)
        if taken:
            self.cached[page] = self.own.pop()

    @precondition(lambda self: self.own)
    @rule()
    def free(self) -> None:
        self.windows.free([self.own.pop()])

    @rule(page=st.integers(1, 20))
    def lock(self, page: int) -> None:
        assert self.windows.lock(page) == self.cached.get(page)
        if page in self.cached:
            self.locks.append(page)

    @precondition(lambda self: self.locks)
    @rule(i=st.integers(0, 100))
    def unlock(self, i: int) -> None:
        page = self.locks.pop(i % len(self.locks))
        self.windows.unlock(page)
        if page not in self.locks:
            self.cached[page] = self.cached.pop(page)  # the most recently used

    @rule(page=st.integers(1, 20))
    def drop(self, page: int) -> None:
        if page in self.locks:
            with pytest.raises(InternalError, match="while its window page is locked"):
                self.windows.drop([page])
        else:
            self.windows.drop([page])
            self.cached.pop(page, None)

    @invariant()
    def agree(self) -> None:
        self.windows.check()
        assert self.windows.num_cached == len(self.cached)
        assert self.windows.num_free + len(self.cached) + len(self.own) == CAPACITY
        held = [*self.own, *self.cached.values()]
        assert len(set(held)) == len(held)


def test_ownership_and_eviction() -> None:
    run_state_machine_as_test(Sharing, settings=examples(100, stateful_step_count=40))


def test_the_prefix_cache_matches_as_far_as_the_window_goes() -> None:
    allocator, windows = PageAllocator(40), WindowPages(40, 4, 8)
    cache = RadixCache(allocator, 4, window=windows)
    text = list(range(41))
    pages = allocator.allocate(10)
    assert pages is not None
    root = cache.match_prefix([]).node
    cache.insert(text, pages, root)
    assert cache.match_prefix(text).length == 0  # no window pages at all
    for i in (2, 3, 4, 8, 9):  # of the pages 0 to 9
        window_page = windows.allocate(1)
        assert window_page is not None and windows.insert(pages[i], window_page[0])
    whole = cache.match_prefix(text)
    assert whole.length == 40 and whole.pages == pages
    inside = cache.match_prefix(text[:37])  # page 8 alone is not its whole window
    assert inside.length == 20 and inside.pages == pages[:5] and inside.node.end == 5
    cache.check()
    assert cache.evict(3) == 3  # from the end: the window pages 8 and 9 go too
    assert windows.num_cached == 3
    assert cache.match_prefix(text).length == 20
    cache.clear()
    assert (windows.num_cached, windows.num_free, allocator.num_free) == (0, 39, 39)


def test_unlocking_more_than_locking_is_an_error() -> None:
    windows = WindowPages(3, 4, 8)
    with pytest.raises(InternalError, match="unlocked more than locked"):
        windows.unlock(1)
