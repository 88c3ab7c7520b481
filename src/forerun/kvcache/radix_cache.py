"""Sharing the K/V of common prefixes: a radix tree whose unit is a page. No torch.

The page ids index every pool, so one hit brings the target's and the draft's K/V. (Models that
attend to a window only have pages of a second space; see `window_pages`.) Who owns which page is
written down in `prefix_cache`.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from operator import eq

from forerun.core.errors import InternalError
from forerun.kvcache.pages import PageAllocator
from forerun.kvcache.prefix_cache import (
    InsertResult,
    MatchResult,
    NoPrefixCache,
    PrefixCache,
    RadixNode,
)
from forerun.kvcache.window_pages import WindowPages

__all__ = ["InsertResult", "MatchResult", "NoPrefixCache", "PrefixCache", "RadixCache", "RadixNode"]

_ITEM = array("i").itemsize  # bytes a token takes in a key


class RadixCache(PrefixCache):
    """The radix tree.

    With `lookahead` = n the K/V at position i depends on tokens up to i + n, so page j is found
    by tokens [0, (j + 1) * page_size + n). It is complete when the model has run on all of them but
    the last.

    With `num_snapshots` (None: the model has no recurrent state) a prefix matches as far as a
    snapshot of the state goes; see `prefix_cache`. With `window` it matches as far as the window
    before it is cached.

    Tokens are kept as bytes: an edge is compared in one memcmp, whatever its length. Every page
    of an edge was last used at the same time (a match or insert that ends inside one splits it),
    so least recently used is exact to the page.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        page_size: int,
        lookahead: int = 0,
        num_snapshots: int | None = None,
        window: WindowPages | None = None,
    ) -> None:
        self._allocator = allocator
        self._window = window
        self._page_size = page_size
        self._lookahead = lookahead
        self._page_bytes = page_size * _ITEM
        self._ahead_bytes = lookahead * _ITEM
        self._clock = 0
        self._serial = 0
        self._version = 0
        self._num_pages = 0
        self._num_evictable = 0
        self._num_snapshots = num_snapshots
        self._free_snapshots = list(range((num_snapshots or 0) - 1, -1, -1))
        self._snapshots: dict[int, RadixNode] = {}  # node that has a row
        # Unlocked leaves by (time of use, serial), one entry a node at most. An entry may be out
        # of date (used again, locked, no longer a leaf), never too late; evict() sorts it out.
        self._queue: list[tuple[int, int, RadixNode]] = []
        self._root = RadixNode(None, b"", [], last_access=0, serial=0)

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def num_evictable(self) -> int:
        return self._num_evictable

    @property
    def version(self) -> int:
        return self._version

    def key(self, tokens: Sequence[int]) -> bytes:
        whole = max(0, len(tokens) - max(1, self._lookahead)) // self._page_size
        return self._pack(tokens, whole)

    def cached_length(self, key: bytes) -> int:
        first = self._page_bytes + self._ahead_bytes
        node, at, with_snapshot = self._root, 0, 0
        while child := node.children.get(key[at : at + first]):
            agreed = _agreement(child.key, key, at)
            at += (agreed - self._ahead_bytes) // self._page_bytes * self._page_bytes
            if at < child.end * self._page_bytes:
                break
            node = child
            with_snapshot = with_snapshot if node.snapshot is None else node.end
        num_pages = at // self._page_bytes if self._num_snapshots is None else with_snapshot
        return num_pages * self._page_size

    def match_prefix(self, tokens: Sequence[int]) -> MatchResult:
        self._clock += 1
        pages: list[int] = []
        node = self._walk(self._root, self.key(tokens), pages)
        branch_length = len(pages) * self._page_size if node.children else 0
        node = self._usable(node, pages, len(tokens))
        del pages[node.end :]
        length = len(pages) * self._page_size
        return MatchResult(pages, length, node, node.snapshot, branch_length)

    def _usable(self, node: RadixNode, pages: list[int], num_tokens: int) -> RadixNode:
        """The deepest node on the path to `node` from which a prompt can go on."""
        window = self._window
        if self._num_snapshots is None:
            if window is None:
                return node
            return self._ending_at(node, window.longest_prefix(pages, num_tokens))
        for step in _path(node):  # only as far as the recurrent state is known
            if step.snapshot is None:
                continue
            end = step.end
            if window is None or window.longest_prefix(pages[:end], num_tokens) == end:
                return step
        return self._root

    def _ending_at(self, node: RadixNode, n: int) -> RadixNode:
        """The node on the path to `node` that ends after n pages; an edge that goes on is split."""
        while node.parent is not None and node.parent.end >= n:
            node = node.parent
        if node.end == n:
            return node
        assert node.parent is not None
        return self._split(node, n - node.parent.end)

    def inc_lock_ref(self, node: RadixNode) -> None:
        if node.parent is None and node is not self._root:
            raise InternalError("A prefix was evicted between match and lock.")
        node.own_locks += 1
        for step in _path(node):
            if step.lock_ref == 0:
                self._num_evictable -= len(step.pages)
            step.lock_ref += 1

    def dec_lock_ref(self, node: RadixNode) -> None:
        if node.own_locks == 0:
            raise InternalError(f"A prefix of {node.end} pages was unlocked more than locked.")
        node.own_locks -= 1
        for step in _path(node):
            step.lock_ref -= 1
            if step.lock_ref == 0:
                self._num_evictable += len(step.pages)
                self._enqueue(step)

    def insert(
        self,
        tokens: Sequence[int],
        pages: Sequence[int],
        node: RadixNode,
        kv_len: int | None = None,
    ) -> InsertResult:
        written = len(tokens) if kv_len is None else min(kv_len, len(tokens))
        complete = written - max(0, self._lookahead - 1)
        whole = max(0, min(complete, len(tokens) - self._lookahead)) // self._page_size
        start = node.end
        if len(pages) < max(whole, start):
            raise InternalError(f"{len(pages)} pages cannot hold {max(whole, start)} pages of K/V.")
        if node.pages != list(pages[start - len(node.pages) : start]):
            raise InternalError(f"The first {start} pages of a request are not those it locked.")
        text = self._pack(tokens, whole)
        self._clock += 1
        for step in _path(node):
            step.last_access = self._clock

        shared: list[int] = []
        last = self._walk(node, text, shared)
        duplicates = list(pages[start : last.end])
        if any(map(eq, duplicates, shared)):
            raise InternalError("A request inserts pages that the cache has already.")
        if whole > last.end:
            key = text[last.end * self._page_bytes :]
            last = self._add(last, key, list(pages[last.end : whole]))
        return InsertResult(last, start, shared, duplicates, tail=list(pages[last.end :]))

    def evict(self, n_pages: int) -> int:
        freed: list[int] = []
        while self._queue and len(freed) < n_pages:
            last_access, _, leaf = heapq.heappop(self._queue)
            leaf.queued = False
            if last_access < leaf.last_access:
                self._enqueue(leaf)  # with its present time, unless it is no candidate any more
            elif not leaf.lock_ref and not leaf.children:
                surplus = len(leaf.pages) - (n_pages - len(freed))
                if surplus > 0:
                    self._split(leaf, surplus)  # the leaf keeps its end, and that goes
                freed += leaf.pages
                self._remove(leaf)
        if self._window is not None:
            self._window.drop(freed)
        self._allocator.free(freed)
        return len(freed)

    # Snapshots.

    @property
    def num_pending_snapshots(self) -> int:
        return (self._num_snapshots or 0) - len(self._free_snapshots) - len(self._snapshots)

    def snapshot_length(self, tokens: Sequence[int]) -> int:
        if not self._num_snapshots:
            return 0
        whole = max(0, len(tokens) - max(1, self._lookahead)) // self._page_size
        return whole * self._page_size

    def allocate_snapshot(self) -> int | None:
        if not self._free_snapshots:
            if not self._snapshots:
                return None
            oldest = min(self._snapshots.values(), key=lambda node: node.last_access)
            self._drop_snapshot(oldest)
        return self._free_snapshots.pop()

    def attach_snapshot(self, tokens: Sequence[int], length: int, row: int) -> None:
        whole = length // self._page_size
        node = self._walk(self._root, self._pack(tokens, whole), [])
        if node.end < whole or node.snapshot is not None or node is self._root:
            self._free_snapshots.append(row)
            return
        node.snapshot = row
        self._snapshots[row] = node
        self._version += 1

    def free_snapshot(self, row: int) -> None:
        if row in self._snapshots or row in self._free_snapshots:
            raise InternalError(f"Snapshot {row} was freed twice.")
        self._free_snapshots.append(row)

    def _drop_snapshot(self, node: RadixNode) -> None:
        if node.snapshot is not None:
            del self._snapshots[node.snapshot]
            self._free_snapshots.append(node.snapshot)
            node.snapshot = None
            self._version += 1

    # The tree.

    def _pack(self, tokens: Sequence[int], whole: int) -> bytes:
        """The first `whole` pages of tokens and their look-ahead, as a key."""
        length = whole * self._page_size + self._lookahead
        return array("i", tokens[:length]).tobytes() if whole else b""

    def _walk(self, node: RadixNode, text: bytes, pages: list[int]) -> RadixNode:
        """Follows `text` down from `node` as far as it is cached, marks it used, adds its pages.

        The node returned ends where the agreement ends: an edge that goes further is split.
        """
        first = self._page_bytes + self._ahead_bytes
        at = node.end * self._page_bytes
        while child := node.children.get(text[at : at + first]):
            agreed = _agreement(child.key, text, at)
            n = (agreed - self._ahead_bytes) // self._page_bytes
            node = self._split(child, n) if n < len(child.pages) else child
            node.last_access = self._clock
            pages += node.pages
            at += n * self._page_bytes
        return node

    def _new(self, parent: RadixNode, key: bytes, pages: list[int], last_access: int) -> RadixNode:
        self._serial += 1
        node = RadixNode(parent, key, pages, last_access, self._serial)
        parent.children[self._first(key)] = node
        return node

    def _add(self, parent: RadixNode, key: bytes, pages: list[int]) -> RadixNode:
        leaf = self._new(parent, key, pages, self._clock)
        self._version += 1
        self._num_pages += len(pages)
        self._num_evictable += len(pages)
        self._enqueue(leaf)
        return leaf

    def _split(self, node: RadixNode, n: int) -> RadixNode:
        """Cuts an edge after n pages; returns the new upper node.

        `node` itself stays the lower one, so its holders still have the same prefix; the
        upper one has no snapshot.
        """
        assert node.parent is not None and 0 < n < len(node.pages)
        cut = n * self._page_bytes
        upper = self._new(
            node.parent, node.key[: cut + self._ahead_bytes], node.pages[:n], node.last_access
        )
        upper.lock_ref = node.lock_ref
        node.parent, node.key, node.pages = upper, node.key[cut:], node.pages[n:]
        upper.children[self._first(node.key)] = node
        return upper

    def _remove(self, leaf: RadixNode) -> None:
        assert leaf.parent is not None
        parent, leaf.parent = leaf.parent, None
        del parent.children[self._first(leaf.key)]
        self._version += 1
        self._drop_snapshot(leaf)
        self._num_pages -= len(leaf.pages)
        self._num_evictable -= len(leaf.pages)
        self._enqueue(parent)

    def _first(self, key: bytes) -> bytes:
        return key[: self._page_bytes + self._ahead_bytes]

    def _enqueue(self, node: RadixNode) -> None:
        if not (node.queued or node.lock_ref or node.children or node is self._root):
            node.queued = True
            heapq.heappush(self._queue, (node.last_access, node.serial, node))

    # The invariants.

    def check(self) -> None:
        queued = [node for _, _, node in self._queue]
        seen: set[int] = set()
        evictable = nodes = 0
        stack = [self._root]
        while stack:
            node = stack.pop()
            nodes += node.queued
            evictable += 0 if node.lock_ref else len(node.pages)
            for page in node.pages:
                _require(self._allocator.is_out(page), f"cached page {page} is free")
                _require(page not in seen, f"page {page} is cached twice")
                seen.add(page)
            below = sum(child.lock_ref for child in node.children.values())
            _require(
                node.lock_ref == node.own_locks + below,
                f"lock_ref {node.lock_ref}, not the locks taken",
            )
            if not node.lock_ref and not node.children and node is not self._root:
                _require(node.queued, "an unlocked leaf is not up for eviction")
            for first, child in node.children.items():
                self._check_edge(node, first, child)
                stack.append(child)
        _require(len(set(queued)) == len(queued) == nodes, "the eviction queue is out of step")
        _require(
            all(used <= node.last_access for used, _, node in self._queue),
            "a queue entry is newer than its node",
        )
        _require(self._num_pages == len(seen), f"{len(seen)} pages cached, not {self._num_pages}")
        rows = [*self._free_snapshots, *self._snapshots]
        _require(
            len(set(rows)) == len(rows) <= (self._num_snapshots or 0), "a snapshot has two owners"
        )
        for row, node in self._snapshots.items():
            reachable = node.snapshot == row and node.parent is not None
            _require(reachable, f"snapshot {row} is of no node")
        _require(
            self._num_evictable == evictable,
            f"{evictable} pages evictable, not {self._num_evictable}",
        )

    def _check_edge(self, parent: RadixNode, first: bytes, child: RadixNode) -> None:
        size = len(child.pages) * self._page_bytes + self._ahead_bytes
        _require(child.parent is parent, "a child has another parent")
        _require(len(child.pages) > 0 and len(child.key) == size, "an edge has no whole pages")
        _require(child.key.startswith(first) and first == self._first(child.key), "a wrong key")
        _require(child.end == parent.end + len(child.pages), f"wrong end {child.end}")
        _require(
            child.last_access <= parent.last_access or parent is self._root, "used after its parent"
        )
        if parent is not self._root:
            ahead = parent.key[len(parent.pages) * self._page_bytes :]
            agree = min(len(ahead), len(child.key))
            _require(child.key[:agree] == ahead[:agree], "the look-ahead is not what follows")


def _path(node: RadixNode) -> Iterator[RadixNode]:
    """Returns the nodes up to the root, both included."""
    step: RadixNode | None = node
    while step is not None:
        yield step
        step = step.parent


def _agreement(edge: bytes, text: bytes, at: int) -> int:
    """Leading bytes of `edge` that are in `text` at `at`: bisection, O(len) in all."""
    if text.startswith(edge, at):
        return len(edge)
    low, high = 0, min(len(edge), len(text) - at)
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(edge[low:middle], at + low):
            low = middle
        else:
            high = middle - 1
    return low


def _require(holds: bool, broken: str) -> None:
    if not holds:
        raise InternalError(f"Prefix cache: {broken}.")
