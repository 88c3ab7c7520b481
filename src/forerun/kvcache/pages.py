"""Allocates K/V page ids; their memory is in `pools`. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from forerun.core.errors import ConfigError, InternalError

NULL_PAGE = 0  # written by padding slots, never allocated


class PageAllocator:
    """Hands out page ids 1 .. num_pages - 1; page 0 stays the null page.

    The free pages are a stack, so a new allocator gives 1, 2, 3, ... and pages freed together are
    allocated together, in the same order. O(1) per page; the order depends on the calls only.

    Raises:
        ConfigError: there is no page except the reserved one.
        InternalError: a freed page is not allocated (freed twice, or never allocated).
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ConfigError(
                f"The K/V memory holds {num_pages} pages and at least 2 are needed (one is"
                " reserved); raise mem_fraction_static or max_total_tokens."
            )
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))  # the last is next
        self._out = bytearray(num_pages)  # 1: allocated

    @property
    def capacity(self) -> int:
        """Pages that can be out at once."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_out(self, page: int) -> bool:
        """Whether a request or the prefix cache has this page."""
        return 0 <= page < self.num_pages and self._out[page] == 1

    def allocate(self, n: int) -> list[int] | None:
        """n pages, or None (and nothing changes) if fewer are free."""
        if n < 0:
            raise InternalError(f"Asked for {n} pages.")
        if n > len(self._free):
            return None
        split = len(self._free) - n
        pages = self._free[split:]
        del self._free[split:]
        pages.reverse()
        for page in pages:
            self._out[page] = 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Takes pages back; they may come from several `allocate` calls, in any order."""
        returned, out = list(pages), self._out
        for page in returned:
            if not (NULL_PAGE < page < self.num_pages and out[page]):
                raise InternalError(self._not_out(page))
            out[page] = 0
        returned.reverse()
        self._free += returned

    def _not_out(self, page: int) -> str:
        if NULL_PAGE < page < self.num_pages:
            return f"Page {page} was freed twice."
        return f"Page {page} was freed but is not one of 1..{self.num_pages - 1}."
