"""Messages between the API process and the engine process: MessagePack, no pickle.

Only token ids, numbers and reasons are sent; text stays in the API process. The engine answers one
step with one message, however many requests it advanced.
"""

from __future__ import annotations

from typing import Any

import msgspec

from forerun.core.executor import ExecutorInfo
from forerun.core.grammar import Grammar
from forerun.core.logprobs import LogprobParams, TokenLogprobs
from forerun.core.pooling import Pooling
from forerun.core.profile import ProfileParams
from forerun.core.request import FinishReason
from forerun.core.sampling_params import SamplingParams
from forerun.core.scheduling_params import DEFAULT_SCHEDULING, SchedulingParams
from forerun.engine.metrics import EngineMetrics


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


# --- to the engine ------------------------------------------------------------------------------


class NewRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that the API process has checked. `params` has its seed, and n = 1."""

    rid: str
    prompt: list[int]
    params: SamplingParams
    trace_context: dict[str, str] = {}  # headers of the HTTP request's span, if there is one
    logprobs: LogprobParams | None = None  # that it returns
    scheduling: SchedulingParams = DEFAULT_SCHEDULING
    pooling: Pooling | None = None
    number: int = 0  # repeated in its `Advance`s: a later request may have the same rid


class Submit(_Message, frozen=True):
    """Requests to queue, in this order."""

    requests: list[NewRequest]


class Finish(_Message, frozen=True):
    """A stop string was found: the request ends with its first `num_tokens` tokens."""

    rid: str
    reason: FinishReason
    num_tokens: int


class Abort(_Message, frozen=True):
    """Requests whose clients have disconnected, or that were aborted; unknown ids have ended."""

    rids: list[str]


class Query(_Message, frozen=True):
    """A question, answered between two steps by a `Reply` with the same number."""

    number: int
    what: str  # "flush_cache", "load" or "stats"


class Compile(_Message, frozen=True):
    """A grammar of requests to come, answered by a `Reply` once it is compiled."""

    number: int
    grammar: Grammar
    client: str = ""  # who asks for it


class StartProfile(_Message, frozen=True):
    """Record steps from now on; answered by a `Reply` between two steps."""

    number: int
    params: ProfileParams


class StopProfile(_Message, frozen=True):
    """End the profile; answered by a `Reply` once its files are written."""

    number: int


class Ping(_Message, frozen=True):
    """Asks for a sign of life, a `Pong`, between two steps."""


class Shutdown(_Message, frozen=True):
    """Ends the process; running requests are dropped."""


# --- from the engine ----------------------------------------------------------------------------


class Ready(_Message, frozen=True):
    """The engine serves requests."""

    info: ExecutorInfo


class Refused(_Message, frozen=True):
    """The settings cannot work (`ConfigError`); the process ends."""

    error: str


class Advance(msgspec.Struct, frozen=True, array_like=True):
    """What a step added to one request, and its end if `finish` is set."""

    rid: str
    tokens: list[int]
    accept_lengths: list[int]  # of new verify steps; `RequestRecord` has the meanings
    correct_drafts: list[int]
    proposed: int  # so far
    cached_tokens: int
    finish: FinishReason | None = None
    # Of a request that returns them: one per token, and of the prompt in order.
    output_logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    pooled: list[bytes] = []  # with `finish`, of a request that is pooled
    number: int = 0  # of the `NewRequest`


class Step(_Message, frozen=True):
    """The requests that one step advanced or ended; a few times a second with metrics."""

    advances: list[Advance]
    metrics: EngineMetrics | None = None


class Reply(_Message, frozen=True):
    """The answer to a question: a value, or why there is none."""

    number: int
    value: dict[str, Any] | None
    error: str | None = None
    busy: bool = False  # the error may be gone a little later


class Pong(_Message, frozen=True):
    """The answer to a `Ping`."""


ToEngine = Submit | Finish | Abort | Query | Compile | StartProfile | StopProfile | Ping | Shutdown
FromEngine = Ready | Refused | Step | Reply | Pong

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
