"""What clients do to the server, and whether each got what it should have."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.server.soak.bodies import GENERATE, StreamError, StreamSamples, body, routes, samples
from tests.server.soak.cases import Case, Reference, Sample
from tests.server.wire import Answer, Wire, fetch, post, request

HANG_SECONDS = 180.0  # no request takes as long
BURST = 40  # requests at once: more than may run and wait
SCORED = {"return_logprob": True, "top_logprobs_num": 5}

MALFORMED = (
    b"",
    b"{",
    b'{"text": "\xff"}',
    b'{"text": "x", "sampling_params": {"temperature": NaN}}',
    b'{"text": "x", "sampling_params": {"regex": "(a"}}',
    b'{"text": "x", "sampling_params": {"json_schema": {"type": "no"}}}',
    b'{"input_ids": [[1], [99999999]]}',
    b"[" * 5000,
)


@dataclass
class Sent:
    """A request of which the server saw at least the head."""

    ident: str  # X-Request-Id
    route: str
    copies: int = 1  # samples of each prompt
    status: int | None = None  # None: the client left before it knew
    ends: list[str] = field(default_factory=list)  # why its generations ended, where it knows


@dataclass
class Clients:
    """All clients, and what they have seen."""

    url: str
    cases: Sequence[Case]
    references: Sequence[Reference]
    rng: random.Random
    sent: list[Sent] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    down: list[tuple[float, float]] = field(default_factory=list)  # times without an engine
    tokens: int = 0  # of answers that were compared
    start: float = field(default_factory=time.monotonic)

    async def run(self, until: float) -> None:
        """One client, until a time."""
        while time.monotonic() < until:
            action = self._action()
            started = time.monotonic()
            try:
                async with asyncio.timeout(HANG_SECONDS):
                    outcome = await action()
            except TimeoutError:
                load = await fetch(self.url, request("GET", "/v1/loads"))
                outcome = self._failed(
                    action,
                    f"no answer from {started - self.start:.0f} s to"
                    f" {time.monotonic() - self.start:.0f} s; now {load.body.decode()}",
                )
            except (OSError, EOFError, ValueError, KeyError, IndexError) as error:
                outcome = self._failed(action, f"{type(error).__name__}: {error}")
            self.outcomes[outcome] += 1
            if outcome == "lost" and not self.was_down(started):
                self._failed(action, "503 while the engine was up")
            await asyncio.sleep(0.5 if outcome in ("lost", "queue full") else self.rng.random() / 4)

    def was_down(self, since: float) -> bool:
        now = time.monotonic()
        return any(start <= now and end >= since for start, end in self.down)

    def _failed(self, action: Callable[[], Awaitable[str]], what: str) -> str:
        self.failures.append(f"{getattr(action, '__name__', action)}: {what}")
        return "failed"

    def _action(self) -> Callable[[], Awaitable[str]]:
        actions: dict[Callable[[], Awaitable[str]], float] = {
            self.whole: 5,
            self.stream: 5,
            self.slow_reader: 1,
            self.batch: 1,
            self.burst: 0.2,
            self.leave_a_stream: 1.5,
            self.leave_an_answer: 1,
            self.leave_in_the_body: 0.5,
            self.abort: 1,
            self.malformed: 1,
            self.flush: 0.5,
        }
        return self.rng.choices(list(actions), list(actions.values()))[0]

    # --- requests that are answered -------------------------------------------------------------

    async def whole(self) -> str:
        at, route = self._pick()
        data = body(route, self.cases[at], self.references[at], stream=False)
        if route == GENERATE and self.rng.random() < 0.4:
            data |= SCORED
        sent, answer = await self._fetch(route, data, self.cases[at].n)
        if answer.status != 200:
            return self._refused(sent, answer)
        return self._compare(sent, samples(route, answer.json()), [at])

    async def stream(self, pause: float = 0.0, buffer: int | None = None) -> str:
        at, route = self._pick()
        if pause:
            route = GENERATE  # its events have everything so far: many bytes
        data = body(route, self.cases[at], self.references[at], stream=True)
        data |= SCORED if pause else {}
        sent = self._new(route, self.cases[at].n)
        found = StreamSamples(route)
        async with Wire(self.url, buffer) as wire:
            await wire.send(post(route, data, X_Request_Id=sent.ident))
            answer = await wire.head()
            sent.status = answer.status
            pieces = wire.pieces(answer, pause)
            if answer.status != 200:
                answer.body = b"".join([piece async for piece in pieces])
                return self._refused(sent, answer)
            try:
                async for piece in pieces:
                    found.feed(piece)
            except StreamError as error:
                return self._lost(error.code, str(error))
        if not found.ended:
            return self._failed(self.stream, f"{sent.ident}: the stream has no end")
        return self._compare(sent, found.samples(), [at])

    async def slow_reader(self) -> str:
        outcome = await self.stream(pause=0.02 + self.rng.random() / 10, buffer=4096)
        return "read slowly" if outcome == "equal" else outcome

    async def batch(self) -> str:
        some = [at for at, case in enumerate(self.cases) if not case.chat and case.n == 1]
        chosen = self.rng.sample(some, self.rng.randint(2, 6))
        data = {
            "text": [self.cases[at].text for at in chosen],
            "sampling_params": [self.cases[at].params for at in chosen],
        }
        sent, answer = await self._fetch(GENERATE, data)
        if answer.status != 200:
            return self._refused(sent, answer)
        return self._compare(sent, samples(GENERATE, answer.json()), chosen)

    async def burst(self) -> str:
        """Many at once; some are refused because the queue is full."""
        ends = await asyncio.gather(*(self.whole() for _ in range(BURST)))
        self.outcomes.update(ends)
        return "burst"

    def _pick(self) -> tuple[int, str]:
        at = self.rng.randrange(len(self.cases))
        return at, self.rng.choice(routes(self.cases[at]))

    def _compare(self, sent: Sent, got: list[Sample], numbers: list[int]) -> str:
        sent.ends = [sample.finish for sample in got]
        want = [sample for at in numbers for sample in self.references[at].samples]
        self.tokens += sum(len(sample.ids) for sample in want)
        if len(got) != len(want) or not all(map(equal, got, want)):
            what = f"{sent.ident} {sent.route} of cases {numbers} differs: {got} != {want}"
            return self._failed(self._compare, what)
        return "equal"

    # --- requests that are not ------------------------------------------------------------------

    async def leave_a_stream(self) -> str:
        at, route = self._single()
        sent = self._new(route)
        data = body(route, self.cases[at], self.references[at], stream=True)
        events, found = self.rng.randint(0, 6), StreamSamples(route)
        async with Wire(self.url) as wire:
            await wire.send(post(route, data, X_Request_Id=sent.ident))
            answer = await wire.head()
            sent.status = answer.status
            if answer.status != 200:
                return "left"
            try:
                async for piece in wire.pieces(answer):
                    found.feed(piece)
                    if found.events >= events:
                        break
            except StreamError as error:
                return self._lost(error.code, str(error))
        return "left"

    async def leave_an_answer(self) -> str:
        at, route = self._single()
        sent = self._new(route)
        data = body(route, self.cases[at], self.references[at], stream=False)
        async with Wire(self.url) as wire:
            await wire.send(post(route, data, X_Request_Id=sent.ident))
            await asyncio.sleep(self.rng.choice((0.0, 0.01, 0.1, 0.5)))
        return "left"

    async def leave_in_the_body(self) -> str:
        at, route = self._single()
        sent = self._new(route)
        data = body(route, self.cases[at], self.references[at], stream=False)
        raw = post(route, data, X_Request_Id=sent.ident)
        head = raw.index(b"\r\n\r\n") + 4
        async with Wire(self.url) as wire:
            await wire.send(raw[: self.rng.randrange(head, len(raw))])
            await asyncio.sleep(self.rng.choice((0.0, 0.05)))
        return "left in the body"

    async def abort(self) -> str:
        """The answer is a beginning of the reference, or all of it."""
        at, _ = self._single()
        rid = f"rid-{self.rng.getrandbits(64)}"
        data = body(GENERATE, self.cases[at], self.references[at], stream=False)
        waiting = asyncio.create_task(self._fetch(GENERATE, {**data, "rid": rid}))
        await asyncio.sleep(self.rng.random() / 2)
        aborting = self._new("/abort_request")
        aborting.status = (
            await fetch(self.url, post("/abort_request", {"rid": rid}, X_Request_Id=aborting.ident))
        ).status
        sent, answer = await waiting
        if answer.status != 200:
            return self._refused(sent, answer)
        (got,), (want,) = samples(GENERATE, answer.json()), self.references[at].samples
        if got.finish != "abort":
            return self._compare(sent, [got], [at])
        sent.ends = ["abort"]
        if got.ids != want.ids[: len(got.ids)]:
            return self._failed(self.abort, f"{sent.ident}: {got} is no beginning of {want}")
        return "aborted"

    async def malformed(self) -> str:
        sent = self._new(GENERATE)
        raw = self.rng.choice(MALFORMED)
        headers = {"Content-Type": "application/json", "X-Request-Id": sent.ident}
        answer = await fetch(self.url, request("POST", GENERATE, raw, **headers))
        sent.status = answer.status
        if answer.status == 400:
            return "malformed"
        return self._refused(sent, answer)

    async def flush(self) -> str:
        sent = self._new("/flush_cache")
        answer = await fetch(self.url, request("POST", sent.route, X_Request_Id=sent.ident))
        sent.status = answer.status
        if answer.status in (200, 400):
            return "flushed" if answer.status == 200 else "busy, not flushed"
        return self._refused(sent, answer)

    def _single(self) -> tuple[int, str]:
        """A case with one sample."""
        while True:
            at, route = self._pick()
            if self.cases[at].n == 1:
                return at, route

    # --- inside ---------------------------------------------------------------------------------

    def _new(self, route: str, copies: int = 1) -> Sent:
        sent = Sent(f"soak-{len(self.sent)}", route, copies)
        self.sent.append(sent)
        return sent

    async def _fetch(self, route: str, data: Any, copies: int = 1) -> tuple[Sent, Answer]:
        sent = self._new(route, copies)
        raw = post(route, data, X_Request_Id=sent.ident)
        answer = await fetch(self.url, raw, HANG_SECONDS)
        sent.status = answer.status
        return sent, answer

    def _refused(self, sent: Sent, answer: Answer) -> str:
        if answer.status == 429 and "retry-after" in answer.headers:
            return "queue full"
        if answer.status == 503:
            return self._lost(answer.json()["error"]["code"], answer.body.decode())
        what = f"{sent.ident} {sent.route}: {answer.status} {answer.body!r}"
        return self._failed(self._refused, what)

    def _lost(self, code: str | None, message: str) -> str:
        return "lost" if code == "engine_unavailable" else self._failed(self._lost, message)


def equal(got: Sample, want: Sample) -> bool:
    """Responses have no ids."""
    return (got.ids or want.ids, got.text, got.finish) == (want.ids, want.text, want.finish)
