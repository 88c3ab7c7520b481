"""What the server under test says of itself, and emptying its prefix cache."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from forerun.core.errors import ConfigError
from forerun_bench.serving.client import Outcome
from forerun_bench.serving.http import Answer, Endpoint, RequestFailed, error_message, fetch
from forerun_bench.serving.metrics import Acceptance

CONTROL_SECONDS: Final = 30.0  # for requests that are not measured
FLUSH_TRIES, FLUSH_PAUSE = 3, 2.0  # pause in seconds; as SGLang's `_flush_cache_with_retry`
SETTLE_SECONDS: Final = 0.5  # until /metrics has what an engine process counted last
DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"


@dataclass(frozen=True)
class ServerInfo:
    """None: the server does not say."""

    model: str | None  # of /v1/models
    path: str | None  # of its model or tokenizer, as the server was given it


@dataclass(frozen=True)
class SpecCounters:
    """Verify steps with drafts, and accepted drafts, since the server's start."""

    steps: float
    accepted: float


@dataclass(frozen=True)
class StepTimes:
    """Seconds since the engine's start."""

    decode: float  # device time of decode steps
    gap: float  # that the device waited for the host before them


class Server:
    """Requests to the server that are not measured."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = replace(endpoint, timeout=CONTROL_SECONDS)

    async def info(self) -> ServerInfo:
        """
        Raises:
            ConfigError: it refuses the API key.
        """
        models, info = await self._json("/v1/models"), await self._json("/get_model_info")
        rows = models.get("data")
        first = rows[0] if isinstance(rows, list) and rows and isinstance(rows[0], dict) else {}
        path = info.get("tokenizer_path") or info.get("model_path") or first.get("root")
        return ServerInfo(_text(first.get("id")), _text(path))

    async def flush_cache(self) -> None:
        """Empties the prefix cache. A busy server (400) is asked again.

        Raises:
            ConfigError: it refuses, or cannot.
        """
        for attempt in range(FLUSH_TRIES):
            if attempt:
                await asyncio.sleep(FLUSH_PAUSE)
            answer = await self._ask("POST", "/flush_cache")
            if answer.status != 400:
                break
        if answer.status != 200:
            said = error_message(answer.body)
            raise ConfigError(
                f"The server did not flush its cache (HTTP {answer.status}: {said})."
                " Drop --flush-cache, or wait until it is idle."
            )

    async def counters(self) -> SpecCounters | None:
        """From /metrics, under vLLM's names; None if they are not there."""
        answer = await self._ask("GET", "/metrics")
        if answer.status != 200:
            return None
        text = answer.body.decode("utf-8", "replace")
        drafts, accepted = _counter(text, DRAFTS), _counter(text, ACCEPTED)
        return None if drafts is None or accepted is None else SpecCounters(drafts, accepted)

    async def step_times(self, settled: bool = False) -> StepTimes | None:
        """From Forerun's /metrics; None elsewhere. `settled`: wait until it is up to date."""
        if settled:
            await asyncio.sleep(SETTLE_SECONDS)
        text = (await self._ask("GET", "/metrics")).body.decode("utf-8", "replace")
        decode = _counter(text, "forerun_step_seconds_sum", 'kind="decode"')
        gap = _counter(text, "forerun_host_gap_seconds")
        return None if decode is None or gap is None else StepTimes(decode, gap)

    async def average(self) -> float | None:
        """`avg_spec_accept_length` of SGLang's /get_server_info."""
        states = (await self._json("/get_server_info")).get("internal_states")
        first = states[0] if isinstance(states, list) and states else {}
        value = first.get("avg_spec_accept_length") if isinstance(first, dict) else None
        return float(value) if isinstance(value, int | float) else None

    async def acceptance(
        self, before: SpecCounters | None, outcomes: Sequence[Outcome]
    ) -> Acceptance | None:
        """Accept length of a run, from the best source there is; None without speculation.

        The requests' own verify steps; else the difference of the server's counters, which
        includes other clients; else its average, which includes earlier requests too.
        """
        done = [outcome for outcome in outcomes if outcome.failure is None]
        if not done:
            return None
        steps = sum(outcome.verify_ct or 0 for outcome in done)
        if steps:
            tokens = sum(outcome.output_tokens for outcome in done if outcome.verify_ct)
            return Acceptance(tokens / steps, "requests")
        after = await self.counters()
        if before is not None and after is not None:
            new = after.steps - before.steps
            accepted = after.accepted - before.accepted
            return Acceptance(1 + accepted / new, "counters") if new > 0 else None
        average = await self.average()
        return Acceptance(average, "server average") if average else None

    async def _json(self, path: str) -> dict[str, Any]:
        """Empty where the server has no such path."""
        answer = await self._ask("GET", path)
        if answer.status in (401, 403):
            raise ConfigError(
                f"The server refuses the API key (HTTP {answer.status}). Set --api-key."
            )
        if answer.status != 200:
            return {}
        try:
            value = json.loads(answer.body)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    async def _ask(self, method: str, path: str) -> Answer:
        try:
            return await fetch(self._endpoint, method, path)
        except RequestFailed as failure:
            raise ConfigError(f"{method} {path} failed: {failure}.") from None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _counter(text: str, name: str, label: str = "") -> float | None:
    """Sum of a counter over the lines with `label`, in Prometheus' text format; None if none."""
    pattern = rf"^{re.escape(name)}(?:_total)?(?:\{{.*{re.escape(label)}.*\}})? (\S+)"
    values = [float(value) for value in re.findall(pattern, text, re.MULTILINE)]
    return math.fsum(values) if values else None
