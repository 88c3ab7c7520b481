"""Window pages of running requests: which a request holds, and when they go back. No torch.

A request holds window pages for the page indices [begin, end), where `begin` moves with its window.
Some are its own; those of a shared prefix belong to the prefix cache and are locked. Steps run in
launch order, so a page goes back as soon as no later step reads it, whatever is in flight.

At admission a request takes what its window and one prompt chunk need, and each chunk uses the
pages behind its window again. So an admitted prompt never waits for window pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.core.errors import InternalError
from forerun.core.plan import Limits, PageWrite, StepPlan
from forerun.core.request import Request
from forerun.kvcache.pages import NULL_PAGE
from forerun.kvcache.window_pages import WindowPages


@dataclass(slots=True)
class HeldWindow:
    """The window pages of one request."""

    begin: int  # page index of the oldest position that later steps read
    end: int
    written: int  # entries of the page table from here on are not in a plan yet
    pages: dict[int, int] = field(default_factory=dict)  # page index -> window page
    locked: dict[int, int] = field(default_factory=dict)  # the cache's: index -> cached page
    spare: list[int] = field(default_factory=list)  # for later chunks of its prompt


class Windows:
    """Takes and returns the window pages of all requests.

    `pages` None: no pool is windowed, and nothing is done.
    """

    def __init__(self, limits: Limits, pages: WindowPages | None) -> None:
        self._limits = limits
        self.pages = pages
        self._held: dict[Request, HeldWindow] = {}
        self.uncleared: list[int] = []  # released by failed requests

    # --- prompts --------------------------------------------------------------------------------

    def admit(self, request: Request, shared: list[int], num_tokens: int, reserved: int) -> bool:
        """Takes window pages for a prompt; False (and nothing changes) if too few are available.

        Args:
            shared: the prompt's cached pages of the first space, locked by the request.
            num_tokens: of the prompt, and KV slots after it.
            reserved: window pages that must stay available.
        """
        if self.pages is None:
            return True
        end = len(shared)
        begin = self._first_page(end * self._limits.page_size)
        held = HeldWindow(begin, end, written=begin)
        for i in range(begin, end):
            window_page = self.pages.lock(shared[i])
            if window_page is not None:
                held.pages[i], held.locked[i] = window_page, shared[i]
        rest = self._limits.pages(num_tokens) - end
        need = min(rest, self._limits.prompt_window_pages)
        spare = None
        if need + reserved <= self.pages.num_available:
            spare = self.pages.allocate(need)
        if spare is None:
            for page in held.locked.values():
                self.pages.unlock(page)
            return False
        held.spare = spare
        self._held[request] = held
        return True

    def prefill(self, request: Request, start: int, end: int, plan: StepPlan) -> None:
        """Prepares a chunk of tokens [start, end) (the last: and KV slots after it)."""
        if self.pages is None:
            return
        held = self._held[request]
        held.spare += self._drop(held, self._first_page(start))
        new = range(held.end, max(held.end, self._limits.pages(end)))
        taken, held.spare = held.spare[: len(new)], held.spare[len(new) :]
        held.pages.update(zip(new, taken, strict=True))
        held.end = new.stop
        self._write(request, held, plan)

    # --- decode ---------------------------------------------------------------------------------

    def extend(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Ensures window pages for `num_tokens` KV slots; False if too few are available."""
        if self.pages is None:
            return True
        held = self._held[request]
        begin = self._first_page(request.kv_len)
        if begin > held.begin:  # what is before it was written by successful steps: no NaN
            self.pages.free(self._drop(held, begin))
        new = range(held.end, max(held.end, self._limits.pages(num_tokens)))
        if not new:
            return True
        pages = self.pages.allocate(len(new))
        if pages is None:
            return False
        held.pages.update(zip(new, pages, strict=True))
        held.end = new.stop
        self._write(request, held, plan)
        return True

    @property
    def move(self) -> bool:
        """Whether there are any: `extend` moves a request's window on with every token."""
        return self.pages is not None

    # --- sharing and release --------------------------------------------------------------------

    def end_prefill(self, request: Request) -> None:
        """The whole prompt was computed without a failure."""
        if self.pages is not None:
            held = self._held[request]
            self.pages.free(held.spare)
            held.spare = []

    def share(self, request: Request, cached: list[int]) -> None:
        """Hands window pages to the cache, where the pages they belong to are `cached` now."""
        if self.pages is None:
            return
        held = self._held[request]
        for i, window_page in held.pages.items():
            shareable = i < len(cached) and i not in held.locked
            if shareable and self.pages.insert(cached[i], window_page):
                self.pages.lock(cached[i])
                held.locked[i] = cached[i]

    def release(self, request: Request) -> None:
        """The request ended, or was preempted."""
        if self.pages is None:
            return
        held = self._held.pop(request)
        pages = self._drop(held, held.end) + held.spare
        self.pages.free(pages)
        if request.failed:
            self.uncleared += pages

    # --- helpers --------------------------------------------------------------------------------

    def _first_page(self, position: int) -> int:
        """Index of the oldest page that tokens from `position` on read."""
        return max(0, position - self._limits.window_reach) // self._limits.page_size

    def _drop(self, held: HeldWindow, begin: int) -> list[int]:
        """Gives up what is before page index `begin`; returns the request's own pages."""
        assert self.pages is not None
        own = []
        for i in range(held.begin, begin):
            window_page = held.pages.pop(i, None)
            if i in held.locked:
                self.pages.unlock(held.locked.pop(i))
            elif window_page is not None:
                own.append(window_page)
        held.begin = max(held.begin, begin)
        return own

    def _write(self, request: Request, held: HeldWindow, plan: StepPlan) -> None:
        """Adds the new entries of its page table; those behind the window may stay as they are."""
        new = range(max(held.begin, held.written), held.end)
        if new:
            pages = tuple(held.pages.get(i, NULL_PAGE) for i in new)
            plan.window_writes.append(PageWrite(request.slot, new.start, pages))
        held.written = held.end

    # --- invariants -----------------------------------------------------------------------------

    @property
    def num_owned(self) -> int:
        """Window pages that belong to requests."""
        return sum(
            len(held.pages) - len(held.locked) + len(held.spare) for held in self._held.values()
        )

    def check(self) -> None:
        """
        Raises:
            InternalError: a window page leaked, or has two owners.
        """
        if self.pages is None:
            return
        self.pages.check()
        free, cached, owned = self.pages.num_free, self.pages.num_cached, self.num_owned
        if free + cached + owned != self.pages.capacity:
            raise InternalError(
                f"Window pages: {free} free + {cached} cached + {owned} of requests !="
                f" {self.pages.capacity}."
            )
