"""Running requests on the API's side: what the engine has sent so far, as text.

There is no queue between engine and client. A generation accumulates, and whoever reads it takes
everything since the last time: a slow reader gets fewer, larger parts and delays no other request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple
from uuid import uuid4

from forerun.core.logprobs import TokenLogprobs
from forerun.core.request import FinishReason, Request, RequestRecord
from forerun.core.sampling_params import SamplingParams
from forerun.core.scheduling_params import SchedulingParams
from forerun.llm.output import Progress, RequestOutput, make_output
from forerun.llm.text import OutputText, Tokenizer, detokenize
from forerun.server.engines.messages import Advance, Finish
from forerun.server.http.errors import ApiError

TIMEOUT = "timeout"  # code of the error of a call whose deadline has passed


class Part(NamedTuple):
    """What was added to a generation since the last part."""

    text: str
    token_ids: list[int]
    finish: FinishReason | None  # of the last part
    start: int = 0  # index of the first token


class ScoredToken(NamedTuple):
    """A token with its log-probabilities."""

    token: int
    offset: int  # into the text, in characters
    logprobs: TokenLogprobs | None  # None: the first token of a prompt has none


class Place(NamedTuple):
    """Which of a call's generations it is."""

    group: str  # id that the client knows; of all samples of a prompt
    prompt_index: int
    sample_index: int  # with n > 1
    key: str | None = None  # name of the API key whose client chose the group


class Generation:
    """One request that the engine runs: one sample of one prompt."""

    def __init__(
        self, request: Request, tokenizer: Tokenizer | None, place: Place, stream: bool
    ) -> None:
        """`stream`: parts are taken while it runs."""
        self.params: SamplingParams = request.params
        self.scheduling: SchedulingParams = request.scheduling
        self.seed = request.seed
        self.last_token_at: float | None = None  # time.monotonic()
        self.number = 0  # of the `NewRequest`; set when it is sent
        self.replica = 0  # that runs it
        self.uncached_tokens = len(request.prompt)  # of the prompt, probably
        self.restarts = 0
        self.group, self.prompt_index, self.index, self._key = place
        self._request, self._tokenizer, self._stream = request, tokenizer, stream
        self._prompt_ids = list(request.prompt)  # of all outputs: a stream makes many
        self._begin()

    def _begin(self) -> None:
        """Nothing has arrived yet."""
        request, tokenizer = self._request, self._tokenizer
        self.record = RequestRecord(
            request.rid,
            request.prompt,
            arrival=request.arrival,
            logprobs=request.logprobs,
            pooling=request.pooling,
        )
        # Otherwise the text is made at the end, by `output`.
        scored = request.logprobs is not None
        self._text: OutputText | None = None
        if tokenizer is not None and (self._stream or request.params.stop or scored):
            self._text = OutputText(tokenizer, request.params, with_text=scored)
        self._shown_text = ""
        self._shown_tokens = 0
        self._over = False  # the last part was taken

    @property
    def was_shown(self) -> bool:
        """A client has seen a part of it."""
        return self._shown_tokens > 0

    def restart(self) -> None:
        """Drops what has arrived: another engine runs it again. Not after `was_shown`."""
        self.restarts += 1
        self._begin()

    @property
    def rid(self) -> str:
        """The engine's id, in which clients of different keys never clash; `record` has theirs."""
        rid = self.record.rid
        return rid if self._key is None else f"{self._key}\t{rid}"  # a client's rid has no tab

    @property
    def finished(self) -> bool:
        return self.record.finish is not None

    def apply(self, advance: Advance) -> Finish | None:
        """Adds what a step brought. A stop string ends it, which the engine has to be told."""
        record, new = self.record, bool(advance.tokens)
        if new and record.first_token_at is None:
            record.first_token_at = time.monotonic()
        record.output += advance.tokens
        record.output_logprobs += advance.output_logprobs
        record.prompt_logprobs += advance.prompt_logprobs
        record.pooled += advance.pooled
        record.accept_lengths += advance.accept_lengths
        record.correct_drafts += advance.correct_drafts
        record.proposed, record.cached_tokens = advance.proposed, advance.cached_tokens
        record.finish = advance.finish
        found = self._text.find_stop(record) if new and self._text is not None else None
        message = None
        if found is not None:
            reason, num_tokens = found
            if not self.finished:
                message = Finish(self.rid, reason, num_tokens)
            record.trim(num_tokens)
            record.finish = reason
        if self.finished:
            record.finished_at = time.monotonic()
        return message

    def end(self, reason: FinishReason) -> None:
        """Ends it with what has arrived."""
        self.record.finish, self.record.finished_at = reason, time.monotonic()

    def take(self) -> Part | None:
        """What can be shown since the last part; None if that is nothing."""
        record, text = self.record, self._text
        if self._over:
            return None
        if self.finished:
            self._over = True
            new, num_tokens = text.take_rest() if text else "", len(record.output)
        else:
            new, num_tokens = text.take() if text else ("", len(record.output))
        start = self._shown_tokens
        ids = record.output[start:num_tokens]
        self._shown_text += new
        self._shown_tokens = num_tokens
        return Part(new, ids, record.finish, start) if new or ids or self._over else None

    def scored_tokens(self, part: Part | None = None) -> list[ScoredToken]:
        """The output tokens of a part, or all of them.

        Empty for a request that returns no log-probabilities, or without a tokenizer.
        """
        text, record = self._text, self.record
        if record.logprobs is None or text is None:
            return []
        ids, start = (record.output, 0) if part is None else (part.token_ids, part.start)
        logprobs = record.output_logprobs[start : start + len(ids)]
        return [
            ScoredToken(token, text.offset(at), each)
            for at, (token, each) in enumerate(zip(ids, logprobs, strict=True), start)
        ]

    def output(self) -> RequestOutput:
        """Everything up to the last part; without parts, of a request that has ended."""
        return self.output_so_far()()

    def output_so_far(self) -> Callable[[], RequestOutput]:
        """`output` as of now, to be made in any thread."""
        record, ended = self.record, self.finished
        text = self._shown_text
        if ended and not self._over:
            text = self._final_text()
        progress = Progress.of(record, None if ended else self._shown_tokens)
        place = self.prompt_index, self.index
        return partial(make_output, record, progress, text, *place, self._prompt_ids)

    def spelled(self) -> OutputText | None:
        """The text with the places of its tokens; None without a tokenizer.

        Without a stream it is made here, in as much time as the output is long.
        """
        text = self._text
        if text is None and self._tokenizer is not None:
            text = OutputText(self._tokenizer, self.params)
            text.feed(self.record.output)
        return text

    def token_texts(self, output: RequestOutput) -> list[str]:
        """The parts of `output`'s text, one per token: the characters that it completed."""
        text = self.spelled()
        return text.token_texts(len(output.output_ids), output.text) if text else []

    def _final_text(self) -> str:
        if self._text is not None:
            return self._shown_text + self._text.take_rest()
        if self._tokenizer is None:
            return ""
        return detokenize(self._tokenizer, self.record.output, self.params.skip_special_tokens)


@dataclass(eq=False)
class Call:
    """The generations of one HTTP request. `close` aborts those that still run."""

    generations: Sequence[Generation]
    stream: bool
    abort: Callable[[list[str]], None]
    deadline: float | None = None  # time.monotonic()
    error: ApiError | None = None
    trace_context: dict[str, str] = field(default_factory=dict)  # of the HTTP request's span
    key: str | None = None  # name of the API key that it belongs to
    answer_id: str | None = None  # by which the client knows it, besides its generations' groups
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def new_answer_id(self, prefix: str) -> str:
        """The id of its answer, which `/abort_request` takes."""
        self.answer_id = f"{prefix}{uuid4().hex}"
        return self.answer_id

    @property
    def finished(self) -> bool:
        return all(generation.finished for generation in self.generations)

    @property
    def is_late(self) -> bool:
        """Its deadline has passed."""
        return self.error is not None and self.error.code == TIMEOUT

    def notify(self, ended: bool) -> None:
        """A generation advanced. Without a stream only the end of all is worth waking up for."""
        if self.stream or (ended and self.finished):
            self._changed.set()

    def fail(self, error: ApiError) -> None:
        self.error = error
        self._changed.set()

    async def wait(self) -> None:
        """Waits until all have ended.

        Raises:
            ApiError: the engine died, a request failed, or the deadline has passed.
        """
        while not self.finished:
            await self._wait()
        if self.error is not None:
            raise self.error

    async def parts(self) -> AsyncIterator[list[tuple[Generation, Part]]]:
        """The new parts of all generations, whenever there are some.

        Raises:
            ApiError: as `wait`.
        """
        open_ones = list(self.generations)
        while open_ones:
            await self._wait()
            taken = [(g, part) for g in open_ones if (part := g.take()) is not None]
            open_ones = [g for g in open_ones if not g.finished]
            if taken:
                yield taken

    def close(self) -> None:
        """Aborts what still runs: the client is gone, or has been told of an error."""
        running = [g.rid for g in self.generations if not g.finished]
        if running:
            self.abort(running)

    async def _wait(self) -> None:
        if self.deadline is None:
            await self._changed.wait()
        else:
            await self._wait_until(self.deadline)
        self._changed.clear()
        if self.error is not None:
            raise self.error

    async def _wait_until(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        try:
            async with asyncio.timeout(left):
                await self._changed.wait()
        except TimeoutError:
            message = (
                "The request took longer than its request_timeout, or the server's"
                " --request-timeout."
            )
            self.error = ApiError(504, message, code=TIMEOUT)
            raise self.error from None
