"""Which requests have run out of time. No torch."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from forerun.core.request import QUEUE_TIMEOUT, REQUEST_TIMEOUT, Request, State

MIN_SIZE = 256


class _Deadline(NamedTuple):
    at: float  # time.monotonic()
    number: int  # breaks ties
    request: Request
    err_type: str


class Deadlines:
    """The deadlines of submitted requests.

    Those of requests that have ended stay until they pass, or until there are as many others.
    """

    def __init__(self) -> None:
        self._heap: list[_Deadline] = []
        self._max_size = MIN_SIZE
        self._number = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        params = request.scheduling
        timeouts = (
            (params.queue_timeout, QUEUE_TIMEOUT),
            (params.request_timeout, REQUEST_TIMEOUT),
        )
        for seconds, err_type in timeouts:
            if seconds is not None:
                self._number += 1
                at = request.arrival + seconds
                heapq.heappush(self._heap, _Deadline(at, self._number, request, err_type))
        if len(self._heap) > self._max_size:
            self._heap = [each for each in self._heap if each.request.state is not State.FINISHED]
            heapq.heapify(self._heap)
            self._max_size = max(2 * len(self._heap), MIN_SIZE)

    def passed(self, now: float) -> Iterator[tuple[Request, str]]:
        """Requests whose time is over, with `err_type`; each deadline comes once.

        The time in the queue ends with the first slot, also if that is lost again.
        """
        while self._heap and self._heap[0].at <= now:
            deadline = heapq.heappop(self._heap)
            request = deadline.request
            if request.state is State.FINISHED:
                continue
            has_run = request.state is not State.WAITING or request.preemptions > 0
            if deadline.err_type == REQUEST_TIMEOUT or not has_run:
                yield request, deadline.err_type


def timeout_message(request: Request, err_type: str) -> str:
    params = request.scheduling
    if err_type == QUEUE_TIMEOUT:
        return f"The request waited longer than its queue_timeout of {params.queue_timeout:g} s."
    return f"The request took longer than its request_timeout of {params.request_timeout:g} s."
