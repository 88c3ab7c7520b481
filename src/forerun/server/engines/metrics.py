"""What the API process counts: tokens, latencies, ends of requests, HTTP answers.

Everything happens on the event loop, where messages of the engine and HTTP requests are handled.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

from forerun.engine.metrics import Histogram
from forerun.server.generation import Generation

# Upper bounds: seconds, and tokens.
FIRST_TOKEN_BUCKETS = (
    0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0,
)  # fmt: skip
TOKEN_BUCKETS = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2,
    0.5, 1.0, 2.0, 5.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0,
)  # fmt: skip
LENGTH_BUCKETS = tuple(float(n * 10**power) for power in range(6) for n in (1, 2, 5))

THROUGHPUT_SECONDS = 5.0
FINISHED = ("stop", "length", "abort", "error")
ABORTED = ("disconnect", "timeout", "queue_timeout", "abort_request")


class Throughput:
    """Tokens per second over the last `THROUGHPUT_SECONDS`."""

    RESOLUTION = 0.1  # seconds

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._recent: deque[list[float]] = deque()  # start of an interval, and its tokens
        self._sum = 0.0

    def add(self, tokens: int, now: float) -> None:
        self._sum += tokens
        if self._recent and now - self._recent[-1][0] < self.RESOLUTION:
            self._recent[-1][1] += tokens
        else:
            self._recent.append([now, tokens])
            self._forget(now)

    def value(self) -> float:
        self._forget(self._clock())
        return self._sum / THROUGHPUT_SECONDS

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] <= now - THROUGHPUT_SECONDS:
            self._sum -= self._recent.popleft()[1]


class ServerMetrics:
    """Counters and histograms since the start of the server, also over deaths of the engine."""

    def __init__(self) -> None:
        self.prompt_tokens = self.generation_tokens = 0
        self.throughput = Throughput()
        # Requests of the engine: one per prompt and sample.
        self.finished = Counter(dict.fromkeys(FINISHED, 0))
        self.aborted = Counter(dict.fromkeys(ABORTED, 0))
        self.first_token_seconds = Histogram(FIRST_TOKEN_BUCKETS)
        self.token_seconds = Histogram(TOKEN_BUCKETS)
        self.request_seconds = Histogram(REQUEST_BUCKETS)
        self.prompt_lengths = Histogram(LENGTH_BUCKETS)
        self.generation_lengths = Histogram(LENGTH_BUCKETS)
        self.retried = 0  # on another replica
        self.watchdog_restarts = 0  # engines that were killed because they hung
        self.routed: Counter[int] = Counter()  # requests by replica
        self.routed_cached_tokens = 0  # of their prompts, by what was routed there before
        self.responses: Counter[tuple[str, int]] = Counter()  # by route and HTTP status

    def generated(self, generation: Generation, tokens: int, now: float) -> None:
        """Tokens have come from the engine.

        The time since the last ones is spread over them: a verify step brings several at once.
        """
        self.generation_tokens += tokens
        self.throughput.add(tokens, now)
        last, generation.last_token_at = generation.last_token_at, now
        if last is None:
            self.prompt_tokens += len(generation.record.prompt)
            self.first_token_seconds.observe(now - generation.record.arrival)
            last, tokens = now, tokens - 1
        if tokens:
            self.token_seconds.observe((now - last) / tokens, tokens)

    def ended(self, generation: Generation, reason: str) -> None:
        """A request has ended; `reason` is one of `FINISHED`."""
        record = generation.record
        self.finished[reason] += 1
        self.request_seconds.observe(time.monotonic() - record.arrival)
        self.prompt_lengths.observe(len(record.prompt))
        self.generation_lengths.observe(len(record.output))
