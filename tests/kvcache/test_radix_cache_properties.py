"""Random sequences of requests: the radix cache equals a brute-force model, page by page."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from forerun.kvcache.pages import PageAllocator
from forerun.kvcache.radix_cache import RadixCache, RadixNode
from tests.property_examples import examples

CAPACITY = 40  # small, so that requests run out of pages
WIDE = (0, 1 << 24, 1 << 24 | 1)  # token ids that agree in all bytes but one
few = st.integers(0, 2)


def wide(tokens: Tokens) -> Tokens:
    return tuple(WIDE[token] for token in tokens)


Tokens = tuple[int, ...]  # of 0, 1 and 2
Key = bytes  # one a token


@dataclass
class Entry:
    """A cached page; its key is every token its K/V depends on."""

    page: int
    last_access: int
    locks: int = 0


class BruteForce:
    """The simplest prefix cache: one dictionary entry per page."""

    def __init__(self, page_size: int, lookahead: int) -> None:
        self.page_size = page_size
        self.lookahead = lookahead
        self.clock = 0
        self.entries: dict[Key, Entry] = {}

    def keys(self, tokens: Tokens) -> list[Key]:
        """Keys of all pages whose tokens and look-ahead are known."""
        ends = range(self.page_size, len(tokens) - self.lookahead + 1, self.page_size)
        return [bytes(tokens[: end + self.lookahead]) for end in ends]

    def match_prefix(self, tokens: Tokens) -> list[int]:
        self.clock += 1
        found = []
        for i, key in enumerate(self.keys(tokens)):
            if (i + 1) * self.page_size > len(tokens) - 1 or key not in self.entries:
                break
            self.entries[key].last_access = self.clock
            found.append(self.entries[key].page)
        return found

    def lock(self, keys: list[Key], by: int) -> None:
        for key in keys:
            self.entries[key].locks += by
            assert self.entries[key].locks >= 0

    def insert(
        self, tokens: Tokens, pages: list[int], locked: list[Key], kv_len: int
    ) -> tuple[list[Key], list[int], list[int], list[int]]:
        """Returns the keys now cached, and `shared`, `duplicates`, `tail` of `InsertResult`."""
        self.clock += 1
        keys = [k for i, k in enumerate(self.keys(tokens)) if (i + 1) * self.page_size <= kv_len]
        keys = keys if len(keys) > len(locked) else locked
        shared, duplicates = [], []
        for i, key in enumerate(keys):
            if key in self.entries:
                if i >= len(locked):
                    shared.append(self.entries[key].page)
                    duplicates.append(pages[i])
                self.entries[key].last_access = self.clock
            else:
                self.entries[key] = Entry(pages[i], self.clock)
        return keys, shared, duplicates, pages[len(keys) :]

    def evict(self, n: int) -> list[int]:
        """Page by page: the least recently used of those without a lock and nothing follows."""
        freed: list[int] = []
        while len(freed) < n:
            parents = {self.parent(key) for key in self.entries}
            leaves = [k for k, e in self.entries.items() if not e.locks and k not in parents]
            if not leaves:
                break
            times = [self.entries[key].last_access for key in leaves]
            assert len(set(times)) == len(times)  # so the order is unique
            freed.append(self.entries.pop(leaves[times.index(min(times))]).page)
        return freed

    def parent(self, key: Key) -> Key:
        return key[: -self.page_size]

    @property
    def pages(self) -> list[int]:
        return [entry.page for entry in self.entries.values()]

    @property
    def num_evictable(self) -> int:
        return sum(not entry.locks for entry in self.entries.values())


@dataclass(eq=False)
class Running:
    tokens: Tokens
    kv_len: int
    pages: list[int]
    node: RadixNode
    locked: list[Key]  # the same, in brute force's terms


class Requests(RuleBasedStateMachine):
    page_size = 1
    lookahead = 0

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(CAPACITY + 1)
        self.cache = RadixCache(self.allocator, self.page_size, self.lookahead)
        self.model = BruteForce(self.page_size, self.lookahead)
        self.running: list[Running] = []
        self.seen: list[Tokens] = [()]  # prompts share prefixes with these
        self.last_lookup = (-1, b"", 0)  # version of the cache, key, tokens found

    @initialize(head=st.lists(few, min_size=3, max_size=3))
    def first_prompt(self, head: list[int]) -> None:
        self.seen.append(self.text(head, 6))

    def text(self, seed: list[int], pages: int) -> Tokens:
        """Tokens for about so many pages; few texts in all, so that they meet by chance."""
        length = pages * self.page_size + sum(seed) - 2
        return tuple((seed[i % len(seed)] + i // 3) % 3 for i in range(max(1, length)))

    def reserve(self, n: int) -> list[int] | None:
        short = n - self.allocator.num_free
        if short > 0:
            self.evict(short)
        return self.allocator.allocate(n)

    # A request's life.

    @rule(data=st.data(), seed=st.lists(few, min_size=1, max_size=3), pages=st.integers(0, 4))
    def admit(self, data: st.DataObject, seed: list[int], pages: int) -> None:
        base = data.draw(st.sampled_from(self.seen))
        cut = data.draw(st.just(len(base)) | st.integers(0, len(base)))
        tokens = base[:cut] + self.text(seed, pages)
        expected = self.cache.cached_length(self.cache.key(wide(tokens)))
        match, found = self.cache.match_prefix(wide(tokens)), self.model.match_prefix(tokens)
        assert match.length == expected
        assert match.pages == found
        assert match.length == len(found) * self.page_size < len(tokens)
        assert match.node.end == len(found)
        self.seen.append(tokens)
        locked = self.model.keys(tokens)[: len(found)]
        self.cache.inc_lock_ref(match.node)
        self.model.lock(locked, +1)
        own = self.reserve(-(-(len(tokens) + 1) // self.page_size) - len(found))
        if own is None:
            self.cache.dec_lock_ref(match.node)
            self.model.lock(locked, -1)
        else:
            pages_held = match.pages + own
            self.running.append(Running(tokens, match.length, pages_held, match.node, locked))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.lists(few, min_size=1, max_size=12))
    def go_on(self, data: st.DataObject, more: list[int]) -> None:
        """The K/V of all tokens but the last is written, as after a decode step."""
        request = data.draw(st.sampled_from(self.running))
        tokens = request.tokens + tuple(more)
        own = self.reserve(max(0, -(-(len(tokens) + 1) // self.page_size) - len(request.pages)))
        if own is not None:
            request.pages += own
            request.tokens = tokens
            request.kv_len = len(tokens) - 1
            self.seen.append(tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """Its pages become shareable while it goes on."""
        request = data.draw(st.sampled_from(self.running))
        node, locked = request.node, request.locked
        duplicates, _ = self.insert(request)
        self.cache.inc_lock_ref(request.node)
        self.model.lock(request.locked, +1)
        self.cache.dec_lock_ref(node)
        self.model.lock(locked, -1)
        self.allocator.free(duplicates)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), cached=st.integers(0, 3))
    def end(self, data: st.DataObject, cached: int) -> None:
        self.leave(data.draw(st.sampled_from(self.running)), cached > 0)

    def leave(self, request: Running, cached: bool) -> None:
        self.running.remove(request)
        node, locked, owned = request.node, request.locked, request.pages[request.node.end :]
        if cached:
            duplicates, tail = self.insert(request)
            owned = duplicates + tail
        self.allocator.free(owned)
        self.cache.dec_lock_ref(node)
        self.model.lock(locked, -1)

    def insert(self, request: Running) -> tuple[list[int], list[int]]:
        done = self.cache.insert(wide(request.tokens), request.pages, request.node, request.kv_len)
        keys, shared, duplicates, tail = self.model.insert(
            request.tokens, request.pages, request.locked, request.kv_len
        )
        assert (done.shared, done.duplicates, done.tail) == (shared, duplicates, tail)
        assert done.owned == duplicates + tail
        assert done.start == request.node.end and done.node.end == len(keys)
        request.pages[done.start : done.start + len(shared)] = shared
        request.node, request.locked = done.node, keys
        return duplicates, tail

    # Pressure.

    @rule(n=st.integers(1, 5))
    def evict(self, n: int) -> None:
        before = set(self.model.pages)
        freed = self.model.evict(n)
        assert self.cache.evict(n) == len(freed)
        assert {page for page in before if not self.allocator.is_out(page)} == set(freed)

    def teardown(self) -> None:
        """Only what is locked survives `clear`; when all have left, every page is free."""
        assert self.cache.clear() == len(self.model.evict(CAPACITY))
        self.agree()
        for request in list(self.running):
            self.leave(request, cached=True)
        assert self.cache.clear() == len(self.model.evict(CAPACITY))
        assert self.cache.num_pages == 0 and self.allocator.num_free == CAPACITY
        self.cache.check()

    # At any time.

    @invariant()
    def agree(self) -> None:
        self.cache.check()
        assert self.cache.num_pages == len(self.model.entries)
        assert self.cache.num_evictable == self.model.num_evictable

    @invariant()
    def lookups_change_with_the_version_only(self) -> None:
        cache = self.cache
        key = cache.key(wide(self.seen[-1]))
        found, (version, last_key, before) = cache.cached_length(key), self.last_lookup
        assert found == before or version != cache.version or key != last_key
        self.last_lookup = cache.version, key, found

    @invariant()
    def every_page_has_one_owner(self) -> None:
        owned = [page for r in self.running for page in r.pages[r.node.end :]]
        held = owned + self.model.pages
        assert len(set(held)) == len(held)
        assert all(self.allocator.is_out(page) for page in held)
        assert self.allocator.num_free + len(held) == CAPACITY

    @invariant()
    def locked_pages_stay(self) -> None:
        for request in self.running:
            cached = [self.model.entries[key].page for key in request.locked]
            assert request.pages[: request.node.end] == cached


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize(
    ("page_size", "lookahead"), [(1, 0), (1, 1), (1, 3), (4, 0), (4, 1), (16, 0), (16, 1)]
)
def test_equals_brute_force(page_size: int, lookahead: int) -> None:
    machine = type("Requests", (Requests,), {"page_size": page_size, "lookahead": lookahead})
    run_state_machine_as_test(machine, settings=examples(40, stateful_step_count=40))
