"""What a prefix cache is to the scheduler, and who owns which page. No torch.

Who owns a page (free + cached + owned by requests = all, at any time):

    page                                   before             after
    ------------------------------------   ----------------   --------------------------------------
    `allocate`d by a request               padding_slot (free)      the request
    `match`ed                              the cache          the cache; `lock` keeps it there
    `insert`: below `node.end`             the cache          the cache
      whole, tokens not cached yet         the request        the cache
      whole, tokens cached meanwhile       the request        the request (`duplicates`; the cache's
                                                              page that replaces it is in `shared`)
      not whole, look-ahead unknown, or    the request        the request (`tail`)
      reserved for rows to come
    `evict`ed, `clear`ed                   the cache          padding_slot (free)

A request's life: `match`, `lock` the node, `allocate` the rest; `insert` when its prompt is in
(`lock` the new node, `unlock` the old) and at its end (`unlock`, free `owned`). An aborted request
may skip `insert`: it frees `pages[node.end:]` and unlocks. Pages may be inserted as soon as the
step that writes them is launched (later steps run after it), never before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.core.errors import InternalError


class PrefixNode:
    """One edge of the tree and the point it leads to; to the scheduler a handle with an `end`.

    `key` holds the edge's tokens and, overlapping what follows, the look-ahead of its last page.
    """

    __slots__ = (
        "children",
        "end",
        "key",
        "locks",
        "pages",
        "parent",
        "queued",
        "refs",
        "serial",
        "used",
    )

    def __init__(
        self, parent: PrefixNode | None, key: bytes, pages: list[int], used: int, serial: int
    ) -> None:
        self.parent = parent  # None: the root, or a node that was evicted
        self.key = key
        self.pages = pages
        self.end: int = len(pages) + (parent.end if parent else 0)  # pages from the root to here
        self.children: dict[bytes, PrefixNode] = {}  # by the key of their first page
        self.locks = 0  # taken on this very node
        self.refs = 0  # taken on it and below: its pages must stay
        self.used = used  # clock of the last match or insert that came through
        self.queued = False  # has an entry in the eviction queue
        self.serial = serial


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix. `lock(node)` before anything else is inserted or evicted."""

    pages: list[int]
    length: int  # tokens: len(pages) * page_size
    node: PrefixNode


@dataclass(frozen=True, slots=True)
class Inserted:
    """What `insert` did; the table above says who owns what.

    A request that goes on replaces `pages[start : start + len(shared)]` by `shared` (in its page
    table too), locks `node`, unlocks its old one, and frees `duplicates` when no step in flight
    can write them. A request that ends frees `owned`.
    """

    node: PrefixNode
    start: int = 0
    shared: list[int] = field(default_factory=list)
    duplicates: list[int] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)

    @property
    def owned(self) -> list[int]:
        """The pages that are still the request's."""
        return self.duplicates + self.tail


class PrefixStore(ABC):
    """What the scheduler knows of a prefix cache."""

    @property
    @abstractmethod
    def num_pages(self) -> int:
        """Cached pages."""

    @property
    @abstractmethod
    def num_evictable(self) -> int:
        """Cached pages that padding_slot has locked."""

    @abstractmethod
    def match(self, tokens: Sequence[int]) -> Match:
        """The longest cached prefix that leaves at least one token to compute."""

    @abstractmethod
    def lock(self, node: PrefixNode) -> None:
        """Keeps the pages from the root to `node` from eviction."""

    @abstractmethod
    def unlock(self, node: PrefixNode) -> None:
        """Takes one `lock` back."""

    @abstractmethod
    def insert(
        self,
        tokens: Sequence[int],
        pages: Sequence[int],
        node: PrefixNode,
        kv_len: int | None = None,
    ) -> Inserted:
        """Hands a request's whole pages to the cache.

        Args:
            tokens: all that are known and may be shared (prompt, returned output).
            pages: the request's; pages[i] holds the K/V of tokens [i * P, (i + 1) * P). Those
                below `node.end` are the cache's, the others the request's.
            node: what the request has locked.
            kv_len: rows of K/V that are written; none: one for every token.
        """

    @abstractmethod
    def evict(self, n_pages: int) -> int:
        """Frees up to n unlocked pages, least recently used first; returns how many."""

    @abstractmethod
    def check(self) -> None:
        """Raises InternalError if an invariant is broken."""

    def clear(self) -> int:
        """Frees everything that is not locked; returns how many pages."""
        return self.evict(self.num_evictable)


class NoPrefixCache(PrefixStore):
    """Caches nothing: every page stays the request's."""

    num_pages = 0
    num_evictable = 0

    def __init__(self) -> None:
        self._root = PrefixNode(None, b"", [], used=0, serial=0)

    def match(self, tokens: Sequence[int]) -> Match:
        return Match([], 0, self._root)

    def lock(self, node: PrefixNode) -> None:
        node.locks += 1

    def unlock(self, node: PrefixNode) -> None:
        if node.locks == 0:
            raise InternalError("A prefix was unlocked more than locked.")
        node.locks -= 1

    def insert(
        self,
        tokens: Sequence[int],
        pages: Sequence[int],
        node: PrefixNode,
        kv_len: int | None = None,
    ) -> Inserted:
        return Inserted(node, tail=list(pages))

    def evict(self, n_pages: int) -> int:
        return 0

    def check(self) -> None:
        return None
