"""Figures of a run, under SGLang's names.

TTFT: from sending to the first chunk with output. ITL: from a chunk to the next, spread evenly over
the tokens of the later one, so that every token counts once (as SGLang does); `chunk_itl` is the
gap itself, once per chunk. TPOT: (last chunk - first chunk) / (tokens - 1) of a request. E2E: from
sending to the last byte. Failed requests count as errors only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from forerun_bench.serving.client import Outcome
from forerun_bench.serving.load import Load

PERCENTILES: Final = (50, 90, 95, 99)
CLIENT_LIMIT: Final = 0.01  # seconds of p99 delay above which the client distorts the figures
LATENCIES: Final = ("ttft", "tpot", "itl", "chunk_itl", "e2e")


@dataclass(frozen=True)
class Stats:
    """Of one latency, in seconds."""

    mean: float
    std: float
    percentiles: dict[int, float]

    @classmethod
    def of(cls, values: Sequence[float]) -> Stats | None:
        """None without values. Percentiles are interpolated linearly."""
        if not values:
            return None
        array = np.asarray(values)
        found = np.percentile(array, PERCENTILES)
        return cls(
            float(array.mean()),
            float(array.std()),
            {p: float(v) for p, v in zip(PERCENTILES, found, strict=True)},
        )

    def as_dict(self, name: str) -> dict[str, float]:
        """`{"mean_ttft_ms": ..., "median_ttft_ms": ..., "p99_ttft_ms": ...}`"""
        out = {f"mean_{name}_ms": self.mean, f"median_{name}_ms": self.percentiles[50]}
        out[f"std_{name}_ms"] = self.std
        out |= {f"p{p}_{name}_ms": value for p, value in self.percentiles.items()}
        return {key: 1000 * value for key, value in out.items()}


@dataclass(frozen=True)
class Acceptance:
    """Tokens per verify step, and where the figure comes from."""

    length: float
    source: str  # "requests", "counters" or "server average"


@dataclass(frozen=True)
class Run:
    """One load on a server, and what came of it."""

    request_rate: float  # requests per second; inf: all at once
    load: Load
    streamed: bool
    goals: Mapping[str, float]  # seconds
    acceptance: Acceptance | None = None

    @property
    def rate_label(self) -> str:
        """The request rate in words."""
        if math.isinf(self.request_rate):
            return "all at once"
        return f"{self.request_rate:.3g} requests/s"

    @property
    def completed(self) -> list[Outcome]:
        return [outcome for outcome in self.load.outcomes if outcome.failure is None]

    @property
    def errors(self) -> dict[str, int]:
        """Failed requests by kind, the most frequent first."""
        failures = [o.failure for o in self.load.outcomes if o.failure is not None]
        return dict(Counter(failure.kind for failure in failures).most_common())

    @property
    def first_error(self) -> str | None:
        return next((str(o.failure) for o in self.load.outcomes if o.failure is not None), None)

    @property
    def output_tokens(self) -> int:
        return sum(outcome.output_tokens for outcome in self.completed)

    @property
    def request_throughput(self) -> float:
        """Completed requests per second, ramp-up and tail included."""
        return len(self.completed) / self.load.seconds if self.completed else 0.0

    @property
    def tokens_by_chunk(self) -> bool:
        """Whether ITL per token is known: the server told the tokens of every chunk."""
        return self.streamed and all(outcome.tokens_by_chunk for outcome in self.completed)

    def values(self, name: str) -> list[float]:
        """Of one of `LATENCIES`, in seconds; none where it cannot be known."""
        done = self.completed
        if name == "e2e":
            return [outcome.e2e for outcome in done]
        if not self.streamed:
            return []
        if name == "ttft":
            return [outcome.ttft for outcome in done]
        if name == "tpot":
            return [tpot for outcome in done if (tpot := outcome.tpot) is not None]
        gaps = [gap for outcome in done for gap in _gaps(outcome)]
        if name == "chunk_itl":
            return [seconds for seconds, _ in gaps]
        if not self.tokens_by_chunk:
            return []
        return [seconds / tokens for seconds, tokens in gaps for _ in range(tokens)]

    def stats(self, name: str) -> Stats | None:
        return Stats.of(self.values(name))

    @property
    def good(self) -> int | None:
        """Requests that met every goal; None without goals."""
        if not self.goals:
            return None
        return sum(_meets(outcome, self.goals) for outcome in self.completed)

    @property
    def send_delays(self) -> list[float]:
        """Seconds from when a request was due to when it was sent."""
        return [outcome.sent - outcome.due for outcome in self.load.outcomes]

    @property
    def client_delay(self) -> float:
        """p99 of the client's own delays, in seconds: the larger of sending's and the loop's.

        At rate inf all requests are due at once, and only the event loop's counts.
        """
        delays = (
            [self.load.lags]
            if self.request_rate == float("inf")
            else [
                self.load.lags,
                self.send_delays,
            ]
        )
        return max((s.percentiles[99] for d in delays if (s := Stats.of(d))), default=0.0)

    def as_dict(self) -> dict[str, Any]:
        """SGLang's keys, and a few more. Latencies that are not known are left out."""
        done, seconds = self.completed, self.load.seconds
        prompt = sum(outcome.prompt_tokens or 0 for outcome in done)
        out: dict[str, Any] = {
            "request_rate": "inf" if self.request_rate == float("inf") else self.request_rate,
            "duration": seconds,
            "completed": len(done),
            "failed": len(self.load.outcomes) - len(done),
            "errors": self.errors,
            "first_error": self.first_error,
            "total_input_tokens": prompt,
            "total_cached_tokens": _total([outcome.cached_tokens for outcome in done]),
            "total_output_tokens": self.output_tokens,
            "output_tokens_counted_by_server": all(outcome.counted for outcome in done),
            "request_throughput": self.request_throughput,
            "input_throughput": prompt / seconds if done else 0.0,
            "output_throughput": self.output_tokens / seconds if done else 0.0,
            "concurrency": sum(outcome.e2e for outcome in done) / seconds if done else 0.0,
            "peak_concurrency": self.load.peak,
            "goodput": None if self.good is None else self.good / seconds,
            "accept_length": self.acceptance.length if self.acceptance else None,
            "accept_length_source": self.acceptance.source if self.acceptance else None,
        }
        for name in LATENCIES:
            stats = self.stats(name)
            if stats is not None:
                out |= stats.as_dict("e2e_latency" if name == "e2e" else name)
        for name, values in (("send_delay", self.send_delays), ("loop_lag", self.load.lags)):
            stats = Stats.of(values)
            if stats is not None:
                out[f"client_p99_{name}_ms"] = 1000 * stats.percentiles[99]
        return out

    def details(self) -> dict[str, Any]:
        """One entry per request, as SGLang's `--output-details`. Seconds."""
        outcomes = self.load.outcomes
        return {
            "input_lens": [outcome.prompt_tokens for outcome in outcomes],
            "output_lens": [outcome.output_tokens for outcome in outcomes],
            "arrivals": [outcome.due - self.load.started for outcome in outcomes],
            "ttfts": [outcome.ttft if outcome.chunk_times else None for outcome in outcomes],
            "e2e_latencies": [outcome.e2e for outcome in outcomes],
            "itls": [[gap for gap, _ in _gaps(outcome)] for outcome in outcomes],
            "chunk_tokens": [outcome.chunk_tokens for outcome in outcomes],
            "errors": [str(outcome.failure or "") for outcome in outcomes],
        }


def _gaps(outcome: Outcome) -> list[tuple[float, int]]:
    """(seconds since the chunk before, tokens) of every chunk but the first."""
    times, tokens = outcome.chunk_times, outcome.chunk_tokens
    return [(times[i] - times[i - 1], tokens[i]) for i in range(1, len(times))]


def _meets(outcome: Outcome, goals: Mapping[str, float]) -> bool:
    found = {"e2e": outcome.e2e}
    if "ttft" in goals:
        found["ttft"] = outcome.ttft
    if "tpot" in goals:
        found["tpot"] = outcome.tpot or 0.0
    return all(found[name] <= limit for name, limit in goals.items())


def _total(values: Sequence[int | None]) -> int | None:
    """None if the server said nothing about any."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
