"""Answers to a conversation: from messages and tools to text, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from forerun.core.logprobs import LogprobParams
from forerun.core.sampling_params import SamplingParams
from forerun.core.scheduling_params import DEFAULT_SCHEDULING, SchedulingParams
from forerun.llm.output import RequestOutput
from forerun.llm.prompts import AT_ANSWER, Ending
from forerun.server.generation import Call, Generation, Part
from forerun.server.http.client_names import in_client_names
from forerun.server.openai.output_format import TAIL_TOKENS, OutputFormat
from forerun.server.openai.output_grammar import with_output_grammar
from forerun.server.openai.protocol import MAX_TOKENS, openais_names
from forerun.server.openai.tools import ToolUse, template_messages
from forerun.server.parsers.events import (
    Arguments,
    CallBroken,
    CallEnd,
    CallStart,
    Event,
    Reasoning,
    Text,
)
from forerun.server.parsers.output import OutputParser
from forerun.server.prompt import Prompt
from forerun.server.service import Service


@dataclass(frozen=True)
class Ask:
    """A conversation to continue."""

    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]  # of the chat template
    tools: ToolUse
    sampling: Callable[[int], SamplingParams]  # from the most new tokens
    max_new_tokens: int | None  # None: up to the end of the context
    limit_name: str = MAX_TOKENS  # what the client calls it
    n: int = 1
    stream: bool = False
    separate_reasoning: bool = True  # False: it is text, with its markers
    include_reasoning: bool = True
    logprobs: LogprobParams | None = None
    scheduling: SchedulingParams = DEFAULT_SCHEDULING
    ending: Ending = AT_ANSWER


class Answered(NamedTuple):
    """A generation that has ended."""

    generation: Generation
    output: RequestOutput
    events: list[Event]


class News(NamedTuple):
    """What was added to a generation."""

    generation: Generation
    part: Part
    events: list[Event]


async def prompt_ids(
    service: Service,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    tools: ToolUse,
    ending: Ending = AT_ANSWER,
) -> list[int]:
    """The token ids that an answer to a conversation starts from.

    Raises:
        RequestError: the conversation cannot be served.
    """
    as_written = template_messages(messages, service.format.style)
    limit = service.max_prompt_tokens
    return await service.text.chat(as_written, variables, limit, tools.definitions, ending)


@dataclass(eq=False)
class Conversation:
    """The generations that answer a conversation, and what they have brought."""

    call: Call
    _service: Service
    _ask: Ask
    _format: OutputFormat
    _opened: bool | None  # the outputs begin with reasoning; None: it is not parsed
    _shows_special: bool  # special tokens are in the text for the parser only
    _readers: dict[Generation, _Reader] = field(default_factory=dict)
    _reasoning_tokens: dict[Generation, int] = field(default_factory=dict)

    @classmethod
    async def start(cls, service: Service, ask: Ask) -> Conversation:
        """
        Raises:
            RequestError: the conversation cannot be served.
            ApiError: as `Service.start`.
        """
        form = service.format
        ids = await prompt_ids(service, ask.messages, ask.variables, ask.tools, ask.ending)
        thinks = None
        if form.reasoning is not None:
            thinks = form.begins_in_reasoning(await service.text.decode(ids[-TAIL_TOKENS:]))
        opened = thinks if ask.separate_reasoning else None
        most = ask.max_new_tokens
        params = ask.sampling(
            service.engine.factory.max_new_tokens(len(ids)) if most is None else most
        )
        params = with_output_grammar(params, ask.tools, form, thinks)
        needs_special = form.special_reasoning or (bool(ask.tools.names) and form.special)
        shows_special = needs_special and params.skip_special_tokens
        if shows_special:
            params = replace(params, skip_special_tokens=False)
        prompt = Prompt(ids, params, ask.n, None, ask.logprobs, ask.scheduling)
        with in_client_names(openais_names(ask.limit_name)):
            call = await service.start([prompt], ask.stream)
        return cls(call, service, ask, form, opened, shows_special)

    @property
    def reads_reasoning(self) -> bool:
        return self._format.reasoning is not None and self._ask.separate_reasoning

    def reasoning_tokens(self, generations: Sequence[Generation]) -> int:
        """Tokens of the reasoning that was read so far, with its markers."""
        return sum(self._reasoning_tokens.get(generation, 0) for generation in generations)

    async def whole(self) -> list[Answered]:
        """Waits for all generations.

        Raises:
            ApiError: as `Call.wait`.
        """
        outputs = await self._service.outputs(self.call)
        pairs = list(zip(self.call.generations, outputs, strict=True))
        return await self._service.text.run(
            lambda: [
                Answered(g, output, self._events(g, output.text, ended=True)) for g, output in pairs
            ]
        )

    async def parts(self) -> AsyncIterator[list[News]]:
        """What `Call.parts` is."""
        async for taken in self.call.parts():
            yield [
                News(g, part, self._events(g, part.text, part.finish is not None))
                for g, part in taken
            ]

    def _events(self, generation: Generation, text: str, ended: bool) -> list[Event]:
        reader = self._readers.get(generation)
        if reader is None:
            parser = self._format.parser(self._opened, self._ask.tools.schemas)
            reader = self._readers[generation] = _Reader(parser, self._ask)
        if self._opened is not None:
            count = _count_reasoning(generation, self._format, self._opened)
            self._reasoning_tokens[generation] = count
        if ended and self._shows_special:
            text = text.removesuffix(self._stop_token(generation))
        return reader.read(text, ended)

    def _stop_token(self, generation: Generation) -> str:
        """The text of the token that ended a generation."""
        finish, tokenizer = generation.record.finish, self._service.text.tokenizer
        if finish is None or not isinstance(finish.matched, int):
            return ""
        text: str = tokenizer.decode([finish.matched], skip_special_tokens=False)
        return text


def _count_reasoning(generation: Generation, form: OutputFormat, opened: bool) -> int:
    """Tokens that spell the reasoning and its markers, each of which may be several tokens."""
    spelled, most = generation.spelled(), len(generation.record.output)
    syntax = form.reasoning_syntax
    end = None if spelled is None or syntax is None else syntax.length(spelled.text, opened)
    return most if spelled is None or end is None else min(most, spelled.num_tokens(end))


class _Reader:
    """What a client asked for of the events of one output."""

    def __init__(self, parser: OutputParser, ask: Ask) -> None:
        self._parser, self._ask = parser, ask
        self._calls = 0  # complete ones
        self._skips = False  # inside a call that was not asked for

    def read(self, text: str, ended: bool) -> list[Event]:
        events = self._parser.feed(text)
        if ended:
            events += self._rest()
        return list(self._wanted(events))

    def _rest(self) -> list[Event]:
        """What was left: where an answer consists of calls, no marker that was cut off."""
        events = self._parser.finish()
        if self._ask.tools.required and not any(isinstance(e, CallBroken) for e in events):
            return [event for event in events if not isinstance(event, Text)]
        return events

    def _wanted(self, events: list[Event]) -> Iterator[Event]:
        for event in events:
            if isinstance(event, Reasoning) and not self._ask.include_reasoning:
                continue
            if isinstance(event, CallStart) and self._calls and not self._ask.tools.parallel:
                self._skips = True
            if self._skips and isinstance(event, CallStart | Arguments | CallEnd | CallBroken):
                self._skips = not isinstance(event, CallEnd | CallBroken)
                continue
            self._calls += isinstance(event, CallEnd)
            yield event
