"""Which replica gets a request: the one that probably holds its prefix, unless that is too busy.

Every replica has a prefix cache of its own. The API process does not see them, but it knows what it
sent where: a `PrefixIndex` per replica keeps the beginnings of those prompts, as hashes of blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

MIN_BLOCK = 32  # tokens of a block, at least; a multiple of the page size
# What a request in flight delays a new one by, in prompt tokens that take as long.
REQUEST_TOKENS = 256
# A replica is not chosen for its cache while it has more requests than another, by this much.
AHEAD_REQUESTS, AHEAD_RATIO = 8, 1.5


class Load(NamedTuple):
    """What a replica has to do."""

    requests: int = 0  # in flight
    prompt_tokens: int = 0  # not cached, of requests that have no token yet

    def plus(self, requests: int, prompt_tokens: int) -> Load:
        return Load(self.requests + requests, self.prompt_tokens + prompt_tokens)


R = TypeVar("R", bound=Hashable)


class Choice(NamedTuple, Generic[R]):
    """A replica, and the tokens of the prompt that it probably has cached."""

    replica: R
    cached_tokens: int


def block_keys(ids: Sequence[Hashable], size: int) -> list[int]:
    """A key per whole block of a prompt. It depends on all that comes before the block's end.

    `ids`: tokens, or characters.
    """
    keys, key = [], 0
    for end in range(size, len(ids) + 1, size):
        key = hash((key, *ids[end - size : end]))
        keys.append(key)
    return keys


def block_size(page_size: int) -> int:
    """Tokens of a block."""
    return page_size * max(1, MIN_BLOCK // page_size)


class PrefixIndex:
    """Blocks that a replica has probably cached; the least recently used ones go first."""

    def __init__(self, capacity: int) -> None:
        """`capacity`: blocks that fit into the replica's K/V pool; 0: it caches nothing."""
        self._capacity = capacity
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def match(self, keys: Sequence[int]) -> int:
        """How many leading blocks are known."""
        for at, key in enumerate(keys):
            if key not in self._keys:
                return at
        return len(keys)

    def add(self, keys: Sequence[int]) -> None:
        for key in reversed(keys):  # the first block is used last: its successors need it
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._capacity:
            self._keys.popitem(last=False)

    def clear(self) -> None:
        self._keys.clear()


@dataclass(frozen=True)
class _Candidate:
    """A replica that serves."""

    replica: Hashable
    load: Load
    cached_tokens: int
    prompt_tokens: int
    turn: tuple[int, int]  # number of the choice when it was chosen last, then of its addition

    @property
    def cost(self) -> int:
        """Prompt tokens, or what takes as long, until the request has its first token."""
        uncached = self.prompt_tokens - self.cached_tokens
        return uncached + self.load.prompt_tokens + REQUEST_TOKENS * self.load.requests


def _round_robin(candidates: Sequence[_Candidate]) -> _Candidate:
    return min(candidates, key=lambda c: c.turn)


def _shortest_queue(candidates: Sequence[_Candidate]) -> _Candidate:
    return min(candidates, key=lambda c: (c.load.requests, c.turn))


def _cache_aware(candidates: Sequence[_Candidate]) -> _Candidate:
    """The least cost, among those that are not too far ahead of the least busy one."""
    most = most_requests(min(c.load.requests for c in candidates))
    allowed = [c for c in candidates if c.load.requests <= most]
    return min(allowed, key=lambda c: (c.cost, c.turn))


def most_requests(least: int) -> int:
    """A replica with more is not chosen while another has `least`."""
    return max(least + AHEAD_REQUESTS, int(least * AHEAD_RATIO))


METHODS: dict[str, Callable[[Sequence[_Candidate]], _Candidate]] = {
    "cache_aware": _cache_aware,
    "round_robin": _round_robin,
    "shortest_queue": _shortest_queue,
}


class Router(Generic[R]):
    """Chooses replicas for prompts. R: what names a replica."""

    def __init__(self, method: str, block: int) -> None:
        """
        Args:
            method: one of `METHODS`.
            block: tokens of a block.
        """
        self._choose = METHODS[method]
        self._block = block
        self._indices: dict[R, PrefixIndex] = {}
        self._turns: dict[R, tuple[int, int]] = {}
        self._num_choices = 0

    def add(self, replica: R, capacity: int) -> None:
        """`capacity`: of its prefix cache, in tokens."""
        self._indices[replica] = PrefixIndex(capacity // self._block)
        self._turns[replica] = (0, len(self._turns))

    def keep(self, replicas: Collection[R]) -> None:
        """Forgets all others."""
        for replica in self._indices.keys() - set(replicas):
            del self._indices[replica], self._turns[replica]

    def __contains__(self, replica: R) -> bool:
        return replica in self._indices

    def choose(self, ids: Sequence[int], loads: Mapping[R, Load]) -> Choice[R]:
        """A replica for a prompt, and from now on the prompt is taken to be cached there.

        Args:
            loads: of the replicas that serve; at least one.
        """
        if len(self._indices) == 1:
            (replica,) = loads
            return Choice(replica, 0)
        return self.choose_by_keys(block_keys(ids, self._block), len(ids), loads)

    def choose_by_keys(
        self, keys: Sequence[int], num_tokens: int, loads: Mapping[R, Load]
    ) -> Choice[R]:
        """The same for a prompt whose blocks have these keys."""
        candidates = {
            replica: _Candidate(
                replica,
                load,
                self._block * self._indices[replica].match(keys),
                num_tokens,
                self._turns[replica],
            )
            for replica, load in loads.items()
        }
        best = self._choose(list(candidates.values()))
        chosen = next(replica for replica, each in candidates.items() if each is best)
        self._num_choices += 1
        self._turns[chosen] = (self._num_choices, 0)
        self._indices[chosen].add(keys)
        return Choice(chosen, best.cached_tokens)

    def forget(self, replica: R) -> None:
        """The replica's cache is empty."""
        self._indices[replica].clear()
