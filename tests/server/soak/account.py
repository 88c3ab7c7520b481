"""Afterwards: the log has one line per request, and the metrics are sums of its lines."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.server.soak.clients import Sent

# Of requests whose clients left: nothing was sent, the stream had begun, or the client was gone.
LEFT = {0, 200, 400, 429, 499, 503}


def log_lines(output: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Lines about requests, by request id."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in output:
        if line.startswith("{"):
            record = json.loads(line)
            if record["logger"] == "forerun.requests":
                found.setdefault(record["request_id"], []).append(record)
    return found


def problems(sent: Sequence[Sent], output: Sequence[str], metrics: str) -> Iterator[str]:
    """Where the log and the metrics do not agree with what was sent."""
    lines = log_lines(output)
    yield from _one_line_each(sent, lines)
    values = {
        (sample.name, *(v for k, v in sorted(sample.labels.items()) if k != "model_name")): value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        for value in [sample.value]
    }
    yield from _answers(lines, values)
    yield from _generations(sent, lines, values)


def _one_line_each(sent: Sequence[Sent], lines: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    for one in sent:
        found = lines.get(one.ident, [])
        if len(found) != 1:
            yield f"{one.ident} {one.route} has {len(found)} lines in the log"
            continue
        status = found[0]["status"]
        if status not in (LEFT if one.status is None else {one.status}):
            yield f"{one.ident} {one.route}: status {status} in the log, {one.status} was sent"


def _answers(lines: dict[str, list[dict[str, Any]]], values: dict[Any, float]) -> Iterator[str]:
    """`forerun_http_responses_total` by route and status."""
    logged = Counter(
        (line["path"], str(line["status"])) for some in lines.values() for line in some
    )
    for (path, status), count in logged.items():
        value = values.get(("forerun_http_responses_total", path, status), 0)
        # The scrape's own line comes after it.
        if path not in ("/v1/loads", "/server_info") and value != count:
            yield f"{path} was answered with {status} {count} times, the metric says {value:.0f}"


def _generations(
    sent: Sequence[Sent], lines: dict[str, list[dict[str, Any]]], values: dict[Any, float]
) -> Iterator[str]:
    """Ends, tokens and prompts of everything that was queued."""
    known = {one.ident: one for one in sent}
    queued = {
        ident: line for ident, some in lines.items() for line in some if "generations" in line
    }
    total = sum(line["generations"] for line in queued.values())
    ends, unclear = Counter[str](), Counter[str]()
    prompt_tokens = 0
    for ident, line in queued.items():
        one = known[ident]
        prompt_tokens += line["prompt_tokens"] * one.copies
        reasons = line["finish_reason"].split(",")
        if one.ends:
            ends.update(one.ends)
        elif len(reasons) == 1:
            ends[reasons[0]] += line["generations"]
        else:  # the engine died while some had ended
            unclear.update(dict.fromkeys(reasons, line["generations"]))
    for reason in ("stop", "length", "abort", "error"):
        value = values["vllm:request_success_total", reason]
        if not ends[reason] <= value <= ends[reason] + unclear[reason]:
            yield (
                f"{ends[reason]} to {ends[reason] + unclear[reason]} requests ended with {reason},"
                f" the metric says {value:.0f}"
            )
    tokens = sum(line["completion_tokens"] for line in queued.values())
    for name, count in (
        ("sglang:num_requests_total", total),
        ("vllm:e2e_request_latency_seconds_count", total),
        ("vllm:request_generation_tokens_sum", tokens),
        ("vllm:request_prompt_tokens_sum", prompt_tokens),
    ):
        if values[name,] != count:
            yield f"{name} is {values[name,]:.0f}; the log's lines add up to {count}"
