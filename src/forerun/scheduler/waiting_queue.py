"""The requests that wait for a slot, and which of them gets the next one. No torch.

Priorities are strict: a request waits as long as one of a higher priority does. Within a priority
the order is that of arrival (fcfs), or with lpm (longest prefix match, as in SGLang) the request
whose prompt has the longest cached prefix goes first: its pages are used before they are evicted.

SGLang's lpm may let a request wait forever, and is off while more than 128 requests wait. Here it
always chooses among the oldest `WINDOW` requests, and none is passed over
for more than `MAX_PASSED_OVER` later ones of its priority.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from forerun.core.errors import InternalError
from forerun.core.request import Request
from forerun.kvcache.prefix_cache import NoPrefixCache, PrefixCache

WINDOW = 128  # requests whose prefixes are looked up
MAX_PASSED_OVER = 128


def order_of(request: Request) -> tuple[int, int]:
    return request.order


@dataclass(slots=True)
class _Candidate:
    """A request whose prefix was looked up."""

    key: bytes  # of its prompt in the prefix cache
    cached_length: int = 0  # tokens
    version: int = -1  # of the cache, to which that length belongs
    passed_over: int = 0  # by later requests


class WaitingQueue:
    """Waiting requests. Iterates over them in the order of priority and arrival."""

    def __init__(self, prefix: PrefixCache, longest_prefix: bool) -> None:
        """`longest_prefix`: lpm; otherwise fcfs, as with a cache that caches nothing."""
        self._prefix = prefix
        self._lpm = longest_prefix and not isinstance(prefix, NoPrefixCache)
        self._requests: list[Request] = []  # sorted by `Request.order`
        self._candidates: dict[Request, _Candidate] = {}
        self._ranking: deque[Request] = deque()  # the next ones, of this step; empty: not known

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: object) -> bool:
        return isinstance(request, Request) and self._find(request) is not None

    def add(self, request: Request) -> None:
        """Queues a request, whose `order` is its place among all others."""
        insort(self._requests, request, key=order_of)
        self._ranking.clear()

    def remove(self, request: Request) -> None:
        """Takes a request out that has ended.

        Raises:
            InternalError: it does not wait.
        """
        at = self._find(request)
        if at is None:
            raise InternalError(f"Request {request.rid!r} does not wait.")
        del self._requests[at]
        self._candidates.pop(request, None)
        self._ranking.clear()

    def begin_step(self) -> None:
        """Prefixes may have been cached or evicted since the last step."""
        self._ranking.clear()

    def peek(self) -> Request | None:
        """The request that gets the next slot."""
        if not self._requests:
            return None
        if not self._lpm:
            return self._requests[0]
        if not self._ranking:
            self._ranking.extend(self._ranked())
        return self._ranking[0]

    def pop(self) -> Request:
        """Takes out the request that `peek` returns: it was admitted."""
        request = self.peek()
        assert request is not None
        at = self._find(request)
        assert at is not None
        del self._requests[at]
        self._candidates.pop(request, None)
        if self._lpm:
            self._ranking.popleft()
            self._count_passed_over(at)
        return request

    def uncached_tokens(self, request: Request) -> int:
        """Tokens that its prefill will compute, or fewer (`PrefixCache.cached_length`)."""
        return len(request.tokens) - self._looked_up(request).cached_length

    def _count_passed_over(self, before: int) -> None:
        """A request was admitted before the first `before` ones, which are older."""
        for older in self._requests[:before]:
            candidate = self._candidates[older]
            candidate.passed_over += 1
            if candidate.passed_over == MAX_PASSED_OVER:
                self._ranking.clear()  # it is first now

    def _ranked(self) -> list[Request]:
        """The oldest requests of the highest priority, the next one first."""
        rank = self._requests[0].order[0]
        window = [request for request in self._requests[:WINDOW] if request.order[0] == rank]
        due, rest = [], []
        for request in window:
            candidate = self._looked_up(request)
            if candidate.passed_over >= MAX_PASSED_OVER:
                due.append(request)
            else:
                rest.append((-candidate.cached_length, request.order, request))
        rest.sort(key=lambda each: each[:2])
        return [*due, *(request for _, _, request in rest)]

    def _looked_up(self, request: Request) -> _Candidate:
        prefix = self._prefix
        candidate = self._candidates.get(request)
        if candidate is None:
            candidate = _Candidate(prefix.key(request.shareable_tokens))
            self._candidates[request] = candidate
        if candidate.version != prefix.version:
            candidate.version = prefix.version
            candidate.cached_length = prefix.cached_length(candidate.key)
        return candidate

    def _find(self, request: Request) -> int | None:
        at = bisect_left(self._requests, request.order, key=order_of)
        found = at < len(self._requests) and self._requests[at] is request
        return at if found else None
