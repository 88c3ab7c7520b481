"""What every endpoint needs: from checked parameters to running generations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from uuid import uuid4

from forerun.core.errors import ContextLengthError, RequestError, shown
from forerun.core.scheduling_params import SchedulingParams
from forerun.llm.output import RequestOutput
from forerun.llm.pooling import Embedder, most_tokens
from forerun.llm.scoring import Scorer, make_scorer
from forerun.server.engines.replicas import Replicas
from forerun.server.generation import Call, Generation, Place
from forerun.server.http.api_keys import ApiKeys
from forerun.server.http.errors import EngineUnavailable
from forerun.server.http.exchange import current_exchange
from forerun.server.http.limits import check_queue
from forerun.server.openai.output_format import OutputFormat, choose_format
from forerun.server.openai.response_store import Limits, ResponseStore
from forerun.server.prompt import Prompt
from forerun.server.settings import ServerSettings
from forerun.server.text import TextService
from forerun.server.tracing import ServerTracing

MAX_RID_LENGTH = 256
BUNDLED_NAME = "bundled"


@dataclass(eq=False)
class Service:
    """One server: its engines, its tokenizer, its settings."""

    settings: ServerSettings
    engine: Replicas
    text: TextService
    tracing: ServerTracing | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False  # a signal to stop has come: nothing new is taken
    when_ready: list[Callable[[], None]] = field(default_factory=list)  # called once
    when_stopping: list[Callable[[], None]] = field(default_factory=list)
    format: OutputFormat = field(init=False)
    api_keys: ApiKeys | None = field(init=False)
    store: ResponseStore = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        self.api_keys = settings.api_keys()
        limits = Limits(settings.max_stored_responses, settings.max_stored_bytes)
        self.store = ResponseStore(settings.response_store, limits)
        self.format = choose_format(
            settings.tool_call_parser, settings.reasoning_parser, self.text.tokenizer
        )

    def close(self) -> None:
        """Ends what serves requests; the engines are not its own."""
        self.text.close()
        self.store.close()
        if self.tracing is not None:
            self.tracing.shutdown()

    @property
    def explain(self) -> dict[str, Any]:
        """What was chosen at start, and why."""
        count, method = self.settings.dp_size, self.settings.load_balance_method
        replicas = f"{count}; requests go by {method}" if count > 1 else "1"
        return {
            **self.engine.info.explain,
            "replicas": replicas,
            "embeddings": self.embedder.explain,
            "scores": self._scores,
            **dict(self.format.explain),
        }

    @property
    def _scores(self) -> str:
        try:
            return self.scorer.explain
        except RequestError as error:
            return f"none: {error}"

    @cached_property
    def embedder(self) -> Embedder:
        """
        Raises:
            ConfigError: a file of the model's folder is not what it should be.
        """
        engine = self.engine
        return Embedder.of(engine.config, engine.model_path, self.text.tokenizer)

    @cached_property
    def scorer(self) -> Scorer:
        """
        Raises:
            RequestError: texts cannot be scored.
        """
        engine = self.engine
        return make_scorer(
            engine.config.score_type, self.embedder, self.text.tokenizer, engine.info
        )

    @property
    def model_name(self) -> str:
        """The model's name in the OpenAI API."""
        return self.settings.served_model_name or BUNDLED_NAME

    @property
    def max_prompt_tokens(self) -> int:
        return self.engine.factory.context_length

    def most_tokens(self, truncate_prompt_tokens: int | None) -> int | None:
        """Tokens that a prompt is shortened to; None: it is not.

        Raises:
            RequestError: it is out of range.
        """
        return most_tokens(truncate_prompt_tokens, self.max_prompt_tokens)

    def check_open(self) -> None:
        """
        Raises:
            EngineUnavailable: the server is shutting down.
        """
        if self.draining:
            raise EngineUnavailable("The server is shutting down.")

    def check_size(self, prompts: Sequence[str] | Sequence[list[int]]) -> None:
        """Refuses what is certainly too much, before the prompts are looked at.

        Raises:
            RequestError: too many prompts, or too many tokens.
        """
        self._check_queue(0, len(prompts))
        longest = self.max_prompt_tokens
        for prompt in prompts:
            if isinstance(prompt, list) and len(prompt) > longest:
                how = f", and the prompt has {len(prompt)}; shorten it."
                raise ContextLengthError.of(longest, how)

    async def start(self, prompts: Sequence[Prompt], stream: bool) -> Call:
        """Starts all generations of a request, or none, once their grammars are compiled.

        Raises:
            RequestError: one of them cannot be served.
            ApiError: the queue is full, or there is no engine at the moment.
        """
        self.check_open()
        settings, engine = self.settings, self.engine
        for prompt in prompts:
            if not 1 <= prompt.n <= settings.max_n:
                raise RequestError(f"n must be in [1, {settings.max_n}], got {prompt.n}.")
            if prompt.rid is not None:
                _check_rid(prompt.rid)
        count = sum(prompt.n for prompt in prompts)
        self._check_queue(engine.num_requests, count)
        placed = engine.place(prompts)
        grammars = [
            (prompt.params.grammar, replica)
            for prompt, (replica, _) in zip(prompts, placed, strict=True)
        ]
        exchange = current_exchange.get()
        key = exchange.key
        for grammar, replica in dict.fromkeys(grammars):
            if grammar is not None:
                await engine.compile_grammar(grammar, replica, exchange.client)
        self.check_open()
        self._check_queue(engine.num_requests, count)
        generations = [
            self._generation(prompt, Place(group, at, index, key if prompt.rid else None), stream)
            for at, prompt in enumerate(prompts)
            for group in [prompt.rid or uuid4().hex]
            for index in range(prompt.n)
        ]
        for generation in generations:
            generation.replica, generation.uncached_tokens = placed[generation.prompt_index]
        self._check_ids(generations)
        timeout = _earlier(*(g.scheduling.request_timeout for g in generations))
        deadline = None if timeout is None else time.monotonic() + timeout
        trace = exchange.trace_context
        call = Call(generations, stream, engine.abort, deadline, trace_context=trace, key=key)
        engine.submit(call)
        exchange.calls.append(call)
        return call

    async def outputs(self, call: Call) -> list[RequestOutput]:
        """Waits for all generations. Their text is made in a thread: it may take a while.

        Raises:
            ApiError: as `Call.wait`.
        """
        try:
            await call.wait()
        finally:
            call.close()
        return await self.text.run(lambda: [g.output() for g in call.generations])

    def _check_queue(self, in_flight: int, new: int) -> None:
        check_queue(in_flight, new, self.engine.slots, self.settings.max_queued_requests)

    def _generation(self, prompt: Prompt, place: Place, stream: bool) -> Generation:
        if prompt.params.stop and self.text.tokenizer is None:
            raise RequestError("Stop strings need a tokenizer; use stop_token_ids instead.")
        rid = place.group if prompt.n == 1 else f"{place.group}-{place.sample_index}"
        # The samples of a prompt without a seed each get one of their own.
        params = replace(prompt.params, n=1)
        request = self.engine.factory.make(
            prompt.ids,
            params,
            rid,
            place.sample_index,
            prompt.logprobs,
            self._limited(prompt.scheduling),
            prompt.pooling,
        )
        return Generation(request, self.text.tokenizer, place, stream)

    def _limited(self, given: SchedulingParams) -> SchedulingParams:
        """Adds who asks, and the server's deadlines where they are earlier."""
        settings = self.settings
        return replace(
            given,
            queue_timeout=_earlier(given.queue_timeout, settings.queue_timeout),
            request_timeout=_earlier(given.request_timeout, settings.request_timeout),
            tenant=current_exchange.get().tenant,
        )

    def _check_ids(self, generations: Sequence[Generation]) -> None:
        seen: set[str] = set()
        for generation in generations:
            if self.engine.is_known(generation.rid) or generation.rid in seen:
                rid = shown(generation.record.rid)
                raise RequestError(f"A request with id {rid} is running already.")
            seen.add(generation.rid)


def _earlier(*timeouts: float | None) -> float | None:
    return min((each for each in timeouts if each is not None), default=None)


def _check_rid(rid: str) -> None:
    if not rid or len(rid) > MAX_RID_LENGTH or not rid.isprintable():
        raise RequestError(
            f"A rid has at most {MAX_RID_LENGTH} printable characters and at least one, got"
            f" {shown(rid)}."
        )
