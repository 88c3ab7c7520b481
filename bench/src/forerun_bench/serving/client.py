"""One request of a load test, from when it is due to its last byte."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

from forerun_bench.serving.backends import Backend, Chunk
from forerun_bench.serving.http import Endpoint, RequestFailed, fetch
from forerun_bench.serving.sse import MALFORMED, EventParser

DONE: Final = b"[DONE]"


@dataclass(slots=True)
class Outcome:
    """What happened to one request. Times are the event loop's seconds."""

    due: float  # when it should have been sent
    sent: float
    ended: float = 0.0  # last byte, or failure
    chunk_times: list[float] = field(default_factory=list)  # of chunks with output
    chunk_tokens: list[int] = field(default_factory=list)  # new tokens in each; 0: unknown
    output_tokens: int = 0
    counted: bool = False  # the server said how many; else every chunk counts as one
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    verify_ct: int | None = None
    failure: RequestFailed | None = None

    @property
    def e2e(self) -> float:
        return self.ended - self.sent

    @property
    def ttft(self) -> float:
        """From sending (connecting included) to the first chunk with output."""
        return self.chunk_times[0] - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.output_tokens - 1)

    @property
    def tokens_by_chunk(self) -> bool:
        """Whether the tokens of every chunk are known."""
        return all(self.chunk_tokens) and sum(self.chunk_tokens) == self.output_tokens


@dataclass(slots=True)
class Live:
    """Counters of a run while it runs."""

    total: int
    done: int = 0
    failed: int = 0
    in_flight: int = 0
    peak: int = 0  # most in flight
    tokens: int = 0


class Client:
    """Sends requests to one endpoint of a server."""

    def __init__(self, endpoint: Endpoint, backend: Backend, stream: bool) -> None:
        self._endpoint, self._backend, self._stream = endpoint, backend, stream

    async def send(self, body: bytes, due: float, live: Live) -> Outcome:
        """Sends one request now. Failures are in the outcome, not raised."""
        time = asyncio.get_running_loop().time
        outcome = Outcome(due=due, sent=time())
        reader = _Reader(self._backend, outcome, live)
        listener = reader.piece if self._stream else None
        live.in_flight += 1
        live.peak = max(live.peak, live.in_flight)
        try:
            answer = await fetch(self._endpoint, "POST", self._backend.path, body, listener)
            answer.need_ok()
            if self._stream:
                reader.close()
            else:
                reader.whole(time(), answer.body)
            reader.check()
        except RequestFailed as failure:
            outcome.failure = failure
            live.failed += 1
        finally:
            outcome.ended = time()
            live.in_flight -= 1
            live.done += 1
        return outcome


class _Reader:
    """Fills an outcome from the answer's bytes."""

    def __init__(self, backend: Backend, outcome: Outcome, live: Live) -> None:
        self._backend, self._outcome, self._live = backend, outcome, live
        self._events = EventParser()
        self._seen = 0  # tokens in the chunks so far
        self._done = False

    def piece(self, now: float, data: bytes) -> None:
        """A piece of a stream that arrived at `now`."""
        for event in self._events.feed(data):
            if self._done:
                raise RequestFailed(MALFORMED, f"an event after [DONE]: {event[:80]!r}")
            if event == DONE:
                self._done = True
            else:
                self._add(now, self._backend.read(event))

    def whole(self, now: float, body: bytes) -> None:
        """An answer without streaming."""
        self._add(now, self._backend.read(body))

    def close(self) -> None:
        """The end of a stream."""
        self._events.close()
        if not self._done:
            raise RequestFailed(MALFORMED, "the stream ended without [DONE]")

    def check(self) -> None:
        """The whole answer."""
        outcome = self._outcome
        if not outcome.chunk_times:
            raise RequestFailed("no output", "the answer has no token")
        if not outcome.counted:
            outcome.output_tokens = max(len(outcome.chunk_times), self._seen)

    def _add(self, now: float, chunk: Chunk) -> None:
        outcome = self._outcome
        new = chunk.new_tokens
        if chunk.total_tokens is not None:
            outcome.output_tokens, outcome.counted = chunk.total_tokens, True
            if new is None and not chunk.closing:
                new = max(0, chunk.total_tokens - self._seen)
        if new or chunk.text:
            outcome.chunk_times.append(now)
            outcome.chunk_tokens.append(new or 0)
            self._seen += new or 0
            self._live.tokens += new or 1
        if chunk.prompt_tokens is not None:
            outcome.prompt_tokens = chunk.prompt_tokens
        if chunk.cached_tokens is not None:
            outcome.cached_tokens = chunk.cached_tokens
        if chunk.verify_ct is not None:
            outcome.verify_ct = chunk.verify_ct
