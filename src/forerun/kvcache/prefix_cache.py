"""What a prefix cache is to the scheduler, and who owns which page. No torch.

Who owns a page (free + cached + owned by requests = all, at any time):

    page                                   before        after
    ------------------------------------   -----------   -------------------------------------------
    `allocate`d by a request               free          the request
    returned by `match_prefix`             the cache     the cache; `inc_lock_ref` keeps it there
    `insert`: below `node.end`             the cache     the cache
      whole, tokens not cached yet         the request   the cache
      whole, tokens cached meanwhile       the request   the request (`duplicates`; the cache's
                                                         page that replaces it is in `shared`)
      not whole, look-ahead unknown, or    the request   the request (`tail`)
      reserved for tokens to come
    `evict`ed, `clear`ed                   the cache     free

A request's life: `match_prefix`, `inc_lock_ref` of the node, `allocate` the rest; `insert` when its
prompt is in (`inc_lock_ref` of the new node, `dec_lock_ref` of the old) and at its end
(`dec_lock_ref`, free `owned`). An aborted request may skip `insert`: it frees
`pages[node.end:]` and gives its lock back. Pages may be inserted as soon as the step that writes
them is launched (later steps run after it), never before.

Models with recurrent state also need the state at the end of the prefix, and that is valid at one
length only. Such a cache keeps snapshots of it, rows of a pool on the device: a node may have one
for its own end, and `match_prefix` goes no further than the deepest node that has one. A request
takes a row (`allocate_snapshot`), the step that computes its prompt up to `snapshot_length`, or up
to `MatchResult.branch_length`, fills it, and it goes to the cache with the prompt
(`attach_snapshot`) or back (`free_snapshot`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.core.errors import InternalError


class RadixNode:
    """A node of the radix tree with the edge above it; to the scheduler a handle with an `end`.

    `key` holds the edge's tokens and, overlapping what follows, the look-ahead of its last page.
    """

    __slots__ = (
        "children",
        "end",
        "key",
        "last_access",
        "lock_ref",
        "own_locks",
        "pages",
        "parent",
        "queued",
        "serial",
        "snapshot",
    )

    def __init__(
        self, parent: RadixNode | None, key: bytes, pages: list[int], last_access: int, serial: int
    ) -> None:
        self.parent = parent  # None: the root, or a node that was evicted
        self.key = key
        self.pages = pages
        self.end: int = len(pages) + (parent.end if parent else 0)  # pages from the root to here
        self.children: dict[bytes, RadixNode] = {}  # by the key of their first page
        self.own_locks = 0  # locks taken on this very node
        self.lock_ref = 0  # locks on it and below: its pages must stay
        self.last_access = last_access  # clock of the last match or insert that came through
        self.queued = False  # has an entry in the eviction queue
        self.serial = serial
        self.snapshot: int | None = None  # row with the recurrent state at `end`


@dataclass(frozen=True, slots=True)
class MatchResult:
    """The longest cached prefix. Lock `node` before anything else is inserted or evicted."""

    pages: list[int]
    length: int  # tokens: len(pages) * page_size
    node: RadixNode
    snapshot: int | None = None  # row with the recurrent state at `length`, if one is needed
    # Tokens, whole pages, after which these go on differently than what is cached; 0: nowhere.
    branch_length: int = 0


@dataclass(frozen=True, slots=True)
class InsertResult:
    """What `insert` did; the table above says who owns what.

    A request that goes on replaces `pages[start : start + len(shared)]` by `shared` (in its page
    table too), locks `node`, unlocks its old one, and frees `duplicates` when no step in flight
    can write them. A request that ends frees `owned`.
    """

    node: RadixNode
    start: int = 0
    shared: list[int] = field(default_factory=list)
    duplicates: list[int] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)

    @property
    def owned(self) -> list[int]:
        """The pages that are still the request's."""
        return self.duplicates + self.tail


class PrefixCache(ABC):
    """What the scheduler knows of a prefix cache."""

    @property
    @abstractmethod
    def num_pages(self) -> int:
        """Cached pages."""

    @property
    @abstractmethod
    def num_evictable(self) -> int:
        """Cached pages without a lock."""

    @abstractmethod
    def match_prefix(self, tokens: Sequence[int]) -> MatchResult:
        """The longest cached prefix that leaves at least one token to compute."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Changes whenever another prefix may be cached than before."""

    @abstractmethod
    def key(self, tokens: Sequence[int]) -> bytes:
        """What `cached_length` takes for these tokens."""

    @abstractmethod
    def cached_length(self, key: bytes) -> int:
        """Tokens that `match_prefix` would find; nothing is marked as used.

        For models with windowed pools this is an upper bound.
        """

    @abstractmethod
    def inc_lock_ref(self, node: RadixNode) -> None:
        """Keeps the pages from the root to `node` from eviction."""

    @abstractmethod
    def dec_lock_ref(self, node: RadixNode) -> None:
        """Takes one `inc_lock_ref` back."""

    @abstractmethod
    def insert(
        self,
        tokens: Sequence[int],
        pages: Sequence[int],
        node: RadixNode,
        kv_len: int | None = None,
    ) -> InsertResult:
        """Hands a request's whole pages to the cache.

        Args:
            tokens: all that are known and may be shared (prompt, returned output).
            pages: the request's; pages[i] holds the K/V of tokens [i * P, (i + 1) * P). Those
                below `node.end` are the cache's, the others the request's.
            node: what the request has locked.
            kv_len: tokens whose K/V is written; None: all.
        """

    @abstractmethod
    def evict(self, n_pages: int) -> int:
        """Frees up to n unlocked pages, least recently used first; returns how many."""

    # --- snapshots of recurrent state; for models without it nothing is kept ---------------------

    @property
    def num_pending_snapshots(self) -> int:
        """Rows that are with requests."""
        return 0

    def snapshot_length(self, tokens: Sequence[int]) -> int:
        """The longest length at which a snapshot could serve these same tokens again; 0: none."""
        return 0

    def allocate_snapshot(self) -> int | None:
        """A row for a request to fill, the least recently used if none is free."""
        return None

    def attach_snapshot(self, tokens: Sequence[int], length: int, row: int) -> None:
        """Gives the cache a row that holds the state after `length` of these tokens.

        Where the pages up to there are not cached (any more), or have a snapshot, the row is freed.
        """
        raise InternalError("This prefix cache keeps no snapshots.")

    def free_snapshot(self, row: int) -> None:
        """Takes back a row that a request did not need."""
        raise InternalError("This prefix cache keeps no snapshots.")

    @abstractmethod
    def check(self) -> None:
        """Raises InternalError if an invariant is broken."""

    def clear(self) -> int:
        """Frees everything that is not locked; returns how many pages."""
        return self.evict(self.num_evictable)


class NoPrefixCache(PrefixCache):
    """Caches nothing: every page stays the request's."""

    num_pages = 0
    num_evictable = 0
    version = 0

    def __init__(self) -> None:
        self._root = RadixNode(None, b"", [], last_access=0, serial=0)

    def match_prefix(self, tokens: Sequence[int]) -> MatchResult:
        return MatchResult([], 0, self._root)

    def key(self, tokens: Sequence[int]) -> bytes:
        return b""

    def cached_length(self, key: bytes) -> int:
        return 0

    def inc_lock_ref(self, node: RadixNode) -> None:
        node.own_locks += 1

    def dec_lock_ref(self, node: RadixNode) -> None:
        if node.own_locks == 0:
            raise InternalError("A prefix was unlocked more than locked.")
        node.own_locks -= 1

    def insert(
        self,
        tokens: Sequence[int],
        pages: Sequence[int],
        node: RadixNode,
        kv_len: int | None = None,
    ) -> InsertResult:
        return InsertResult(node, tail=list(pages))

    def evict(self, n_pages: int) -> int:
        return 0

    def check(self) -> None:
        return None
