"""The iterator of partial outputs that a streaming call returns."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from forerun.llm.loop import Call, EngineLoop, Event, Job
from forerun.llm.output import RequestOutput, make_output
from forerun.llm.text import Tokenizer, detokenize


class OutputStream(Iterator[RequestOutput]):
    """Partial outputs of the requests of one call; each request's last one has a finish reason.

    The requests start with the first `next`. They are aborted when the stream is closed, which any
    thread may do, or garbage-collected.
    """

    def __init__(
        self, loop: EngineLoop, call: Call, tokenizer: Tokenizer | None, owner: object
    ) -> None:
        """`owner`: kept alive by the stream."""
        self._loop, self._call, self._tokenizer, self._owner = loop, call, tokenizer, owner
        self._lock = threading.Lock()
        self._started = self._over = False
        self._shown: dict[Job, str] = {}

    def __next__(self) -> RequestOutput:
        with self._lock:
            if not self._started and not self._over:
                self._loop.submit(self._call)
                self._started = True
        event = None if self._over else self._wait()
        if event is None or self._over:
            self._over = True
            self._call.events.put(None)  # for other threads that wait
            raise StopIteration
        if isinstance(event, BaseException):
            raise event
        return self._output(event)

    def _wait(self) -> Event | BaseException | None:
        try:
            return self._call.events.get()
        except KeyboardInterrupt:
            self.close()
            raise

    def close(self) -> None:
        """Aborts running requests and ends the iteration."""
        with self._lock:
            runs = self._started and not self._over
            self._over = True
        if runs:
            self._loop.abandon(self._call)

    def __del__(self) -> None:
        if self._started and not self._over:
            self._loop.abandon_later(self._call)

    def _output(self, event: Event) -> RequestOutput:
        job, progress = event.job, event.progress
        if job.text is not None:
            text = self._shown[job] = self._shown.get(job, "") + event.text
        elif self._tokenizer is not None:
            skip = job.request.params.skip_special_tokens
            text = detokenize(self._tokenizer, progress.output, skip)
        else:
            text = ""
        return make_output(job.request, progress, text, job.prompt_index, job.index)
