"""The second page space: K/V of models that attend to a window only. No torch.

A model whose layers all have a sliding window reads nothing behind it, so its pages go back as the
window moves on. They have ids of their own (window pages; SGLang: the SWA pool, vLLM: the KV cache
group of sliding-window layers), while lengths, sharing and preemption follow the pages of the first
space, which every request has for all of its tokens.

The prefix cache keeps a window page beside a cached page of the first space. That page's id stands
for one prefix as long as it is cached, so it is the key; the radix tree knows nothing of window
pages. A window page is given up before the page that it belongs to when memory is short, and then
that prefix is shared only as far as its window is complete (as with snapshots of recurrent state).

Who owns a window page (free + cached + owned by requests = all, at any time):

    window page                            before        after
    ------------------------------------   -----------   -----------------------------------
    `allocate`d by a request               free          the request
    `insert`ed, and taken                  the request   the cache
      not taken: the page has one          the request   the request
    `lock`ed by a request                  the cache     the cache, and stays there
    evicted by `allocate`, `drop`ped       the cache     free
    `free`d behind the window, or at end   the request   free
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from forerun.core.errors import InternalError
from forerun.kvcache.pages import PageAllocator


class WindowPages:
    """Allocates window pages, and caches those of shared prefixes, least recently locked first out.

    Args:
        num_pages: including the null page.
        page_size: tokens per page, of both spaces.
        window: K/V positions before a token that it may read.
        attends_in_prefill: prompt tokens that follow a shared prefix attend to it, so the window
            before its end must be cached. False: only decode steps read K/V (that of prompts is
            made from the target's hidden states), so the window before the prompt's end must be.

    Raises:
        ConfigError: there is no page except the null page.
    """

    def __init__(
        self, num_pages: int, page_size: int, window: int, attends_in_prefill: bool = True
    ) -> None:
        self.allocator = PageAllocator(num_pages)
        self._page_size = page_size
        self._window = window
        self._attends_in_prefill = attends_in_prefill
        self._cached: dict[int, int] = {}  # page of the first space -> window page
        self._locks: dict[int, int] = {}  # by page of the first space
        self._evictable: dict[int, None] = {}  # the same, without a lock; the oldest is first

    @property
    def capacity(self) -> int:
        """Window pages that can be out at once."""
        return self.allocator.capacity

    @property
    def num_free(self) -> int:
        return self.allocator.num_free

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Window pages that `allocate` can give."""
        return self.allocator.num_free + len(self._evictable)

    # --- for requests ----------------------------------------------------------------------------

    def allocate(self, n: int) -> list[int] | None:
        """n window pages, cached ones evicted if needed; None if so many cannot be had."""
        short = n - self.allocator.num_free
        if short > len(self._evictable):
            return None
        for _ in range(short):
            self._evict(next(iter(self._evictable)))
        return self.allocator.allocate(n)

    def free(self, window_pages: Iterable[int]) -> None:
        self.allocator.free(window_pages)

    def lock(self, page: int) -> int | None:
        """Keeps the window page of a cached page from eviction; None if it has none."""
        if page not in self._cached:
            return None
        self._evictable.pop(page, None)
        self._locks[page] = self._locks.get(page, 0) + 1
        return self._cached[page]

    def unlock(self, page: int) -> None:
        """Takes one `lock` back; the window page is the most recently used now."""
        if page not in self._locks:
            raise InternalError(f"The window page of page {page} was unlocked more than locked.")
        self._locks[page] -= 1
        if not self._locks[page]:
            del self._locks[page]
            self._evictable[page] = None

    def insert(self, page: int, window_page: int) -> bool:
        """Hands over the window page of a cached page; whether it was taken."""
        if page in self._cached:
            return False
        self._cached[page] = window_page
        self._evictable[page] = None
        return True

    # --- for the prefix cache --------------------------------------------------------------------

    def longest_prefix(self, pages: Sequence[int], num_tokens: int) -> int:
        """How many leading cached pages can be shared by a prompt of `num_tokens` tokens."""
        n = len(pages)
        while n:
            end = n * self._page_size if self._attends_in_prefill else num_tokens
            first = max(0, end - self._window) // self._page_size
            gaps = (i for i in range(n - 1, first - 1, -1) if pages[i] not in self._cached)
            gap = next(gaps, None)
            if gap is None:
                break
            n = gap  # whatever ends behind the gap has it in its window too
        return n

    def drop(self, pages: Iterable[int]) -> None:
        """These pages are no longer cached."""
        for page in pages:
            if page in self._locks:
                raise InternalError(f"Page {page} was evicted while its window page is locked.")
            if page in self._cached:
                self._evict(page)

    def _evict(self, page: int) -> None:
        del self._evictable[page]
        self.allocator.free([self._cached.pop(page)])

    def check(self) -> None:
        """Raises InternalError if an invariant is broken."""
        pages = list(self._cached.values())
        if len(set(pages)) != len(pages) or not all(map(self.allocator.is_out, pages)):
            raise InternalError("Window pages: a cached one is free, or has two owners.")
        if self._cached.keys() != self._locks.keys() | self._evictable.keys():
            raise InternalError("Window pages: a cached one is neither locked nor evictable.")
        if self._locks.keys() & self._evictable.keys():
            raise InternalError("Window pages: a locked one is evictable.")
