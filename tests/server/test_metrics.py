"""`/metrics`: names, and values that agree with the answers that clients got; the dashboard."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from forerun.engine.metrics import Histogram
from forerun.server.engines.metrics import THROUGHPUT_SECONDS, Throughput
from tests.server.support import LONG, PROMPT, LiveServer, wait_for

DASHBOARD = Path(__file__).resolve().parents[2] / "dashboards" / "forerun.json"
EXACT = {"temperature": 0.0, "ignore_eos": True}
Figures = Counter[str]
KINDS = ("decode", "mixed", "prefill")  # of steps

# As users of SGLang and vLLM know them.
NAMES = {
    "sglang:spec_accept_length", "sglang:spec_accept_rate", "sglang:num_running_reqs",
    "sglang:num_queue_reqs", "sglang:token_usage", "sglang:cache_hit_rate",
    "sglang:gen_throughput", "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_accepted_tokens_per_pos",
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens", "vllm:generation_tokens", "vllm:request_success",
    "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds", "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens", "vllm:request_queue_time_seconds",
    "vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:num_preemptions",
    "sglang:time_to_first_token_seconds", "sglang:inter_token_latency_seconds",
    "sglang:e2e_request_latency_seconds", "sglang:queue_time_seconds", "sglang:prompt_tokens",
    "sglang:generation_tokens", "sglang:num_requests", "sglang:num_aborted_requests",
}  # fmt: skip


def scrape(server: LiveServer) -> Figures:
    """All samples; those of a metric with labels are called `name{value of its label}`."""
    out: Figures = Counter()
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "bundled"
            suffix = "{" + ",".join(labels[name] for name in sorted(labels)) + "}" if labels else ""
            assert sample.name + suffix not in out
            out[sample.name + suffix] = sample.value  # type: ignore[assignment]
    return out


def since(server: LiveServer, before: Figures) -> Figures:
    """What was added. The engine's last snapshot came before its answer to `wait_idle`."""
    server.wait_idle()
    after = scrape(server)
    after.subtract(before)
    return after


def test_names_and_format(server: LiveServer) -> None:
    server.wait_idle()
    response = server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    names = {family.name for family in text_string_to_metric_families(response.text)}
    assert names >= NAMES
    assert all(name.startswith(("sglang:", "vllm:", "forerun_")) for name in names)
    page = (DASHBOARD.parents[1] / "docs" / "observability.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`((?:sglang:|vllm:|forerun_)\w+?)(?:_total)?(?:\{.*?\})?`", page))
    assert listed == names
    # Names have their colons whatever Prometheus asks for.
    accept = {"Accept": "application/openmetrics-text;version=1.0.0;q=0.5,*/*;q=0.2"}
    asked = server.http.get("/metrics", headers=accept)
    assert asked.headers["content-type"] == response.headers["content-type"]
    assert "vllm:prompt_tokens_total" in asked.text


def test_counters_agree_with_the_answers(server: LiveServer) -> None:
    server.wait_idle()
    before = scrape(server)
    bodies: list[dict[str, Any]] = [
        {"text": PROMPT, "sampling_params": {**EXACT, "max_new_tokens": 40}},
        {"text": [PROMPT, "import os\n" * 20], "sampling_params": {**EXACT, "max_new_tokens": 9}},
        {"text": PROMPT * 9, "sampling_params": {"sampling_seed": 2, "n": 3, "max_new_tokens": 30}},
        {"text": "import os\n" * 20, "sampling_params": {**EXACT, "max_new_tokens": 2}},
        {"text": PROMPT, "sampling_params": {**EXACT, "max_new_tokens": 5, "speculative": False}},
        {"text": PROMPT, "sampling_params": {**EXACT, "max_new_tokens": 1}},
    ]
    infos: list[dict[str, Any]] = []
    for body in bodies:
        answers = server.generate(**body)
        infos += [a["meta_info"] for a in (answers if isinstance(answers, list) else [answers])]
    new = since(server, before)

    def total(name: str) -> float:
        return sum(info[name] for info in infos)

    tokens, prompts = total("completion_tokens"), total("prompt_tokens")
    assert new["vllm:prompt_tokens_total"] == prompts
    assert new["vllm:generation_tokens_total"] == tokens
    ends = Counter(info["finish_reason"]["type"] for info in infos)
    for reason in ("stop", "length", "abort", "error"):
        assert new[f"vllm:request_success_total{{{reason}}}"] == ends[reason]
    assert new["forerun_http_responses_total{/generate,200}"] == len(bodies)

    for name, count, value in (
        ("vllm:request_prompt_tokens", len(infos), prompts),
        ("vllm:request_generation_tokens", len(infos), tokens),
        ("vllm:e2e_request_latency_seconds", len(infos), total("e2e_latency")),
        ("vllm:time_to_first_token_seconds", len(infos), None),
        ("vllm:request_queue_time_seconds", len(infos), None),
        ("vllm:inter_token_latency_seconds", tokens - len(infos), None),
    ):
        assert new[f"{name}_count"] == new[f"{name}_bucket{{+Inf}}"] == count, name
        assert new[f"{name}_sum"] > 0
        assert value is None or new[f"{name}_sum"] == pytest.approx(value, rel=0.05), name
    # SGLang's names have the same values.
    for name in (
        "prompt_tokens_total",
        "generation_tokens_total",
        "inter_token_latency_seconds_sum",
    ):
        assert new[f"sglang:{name}"] == new[f"vllm:{name}"]
    assert new["sglang:num_requests_total"] == new["sglang:queue_time_seconds_count"] == len(infos)
    first, rest = (
        new[f"vllm:{name}_seconds_sum"] for name in ("time_to_first_token", "inter_token_latency")
    )
    assert first + rest == pytest.approx(new["vllm:e2e_request_latency_seconds_sum"], rel=0.05)

    assert new["vllm:prefix_cache_queries_total"] == prompts
    assert new["vllm:prefix_cache_hits_total"] == total("cached_tokens") > 0
    drafted = [info for info in infos if info["spec_num_proposed_drafts"]]
    steps = sum(info["spec_verify_ct"] for info in drafted)
    assert new["vllm:spec_decode_num_drafts_total"] == steps
    assert new["vllm:spec_decode_num_draft_tokens_total"] == total("spec_num_proposed_drafts")
    # The last step of a request may accept drafts past its end.
    accepted, correct = (
        new["vllm:spec_decode_num_accepted_tokens_total"],
        total("spec_num_correct_drafts"),
    )
    assert correct <= accepted <= correct + 15 * len(drafted)
    position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert sum(new[f"{position}{{{k}}}"] for k in range(15)) == accepted
    assert new["forerun_spec_accept_length_count"] == steps
    assert new["forerun_spec_accept_length_sum"] == steps + accepted
    assert new["forerun_request_steps_total"] == total("spec_verify_ct")
    plain = infos[-2]["spec_verify_ct"]
    assert new["forerun_decode_steps_total{1}"] == plain == 4
    assert new["forerun_decode_tokens_total"] == steps + accepted + plain
    kinds = [new[f"forerun_step_seconds_count{{{kind}}}"] for kind in KINDS]
    assert sum(kinds) >= sum(new[f"forerun_decode_steps_total{{{w}}}"] for w in (1, 16))
    assert kinds[0] > 0 and kinds[1] + kinds[2] == len(bodies)


def test_gauges_are_means_of_the_counters_and_those_of_server_info(server: LiveServer) -> None:
    server.generate(text=PROMPT, sampling_params={**EXACT, "max_new_tokens": 20})
    loads, all_ = server.wait_idle(), scrape(server)
    state = server.get("/server_info")["internal_states"][0]
    length, rate = all_["sglang:spec_accept_length"], all_["sglang:spec_accept_rate"]
    assert length == all_["forerun_decode_tokens_total"] / all_["forerun_request_steps_total"]
    accepted = all_["vllm:spec_decode_num_accepted_tokens_total"]
    assert rate == accepted / all_["vllm:spec_decode_num_draft_tokens_total"]
    assert (length, rate) == (state["spec_accept_length"], state["spec_accept_rate"])
    assert accepted == state["spec_decode_num_accepted_tokens"]
    hits, queries = (all_[f"vllm:prefix_cache_{what}_total"] for what in ("hits", "queries"))
    assert all_["sglang:cache_hit_rate"] == hits / queries
    assert all_["forerun_kv_pages{cached}"] == loads["num_cached_pages"]
    assert all_["forerun_kv_pages{free}"] == loads["num_free_pages"]
    assert all_["forerun_kv_pages{in_use}"] == all_["sglang:token_usage"] == 0
    assert all_["forerun_engine_up"] == 1


def test_scraped_while_streaming(server: LiveServer) -> None:
    """More requests than slots; a scrape waits for no step, and one of them shows the queue."""
    server.wait_idle()
    before = scrape(server)
    body = {"text": PROMPT, "sampling_params": {**LONG, "temperature": 1, "n": 10}, "stream": True}
    with server.http.stream("POST", "/generate", json=body) as response:
        lines = response.iter_lines()
        next(lines)

        def busy() -> Figures | None:
            now = scrape(server)
            return now if now["sglang:num_running_reqs"] == 8 else None

        now = wait_for(busy, 10)
        assert now["vllm:num_requests_running"] == 8
        assert now["sglang:num_queue_reqs"] == now["vllm:num_requests_waiting"] == 2
        assert 0 < now["sglang:token_usage"] == now["vllm:kv_cache_usage_perc"] <= 1
        assert now["forerun_kv_pages{in_use}"] > 0
        later = wait_for(lambda: grown(server, now), 10)
        assert later["sglang:gen_throughput"] > 0
    new = since(server, before)
    assert new["forerun_requests_aborted_total{disconnect}"] == 10
    assert new["vllm:request_success_total{abort}"] == 10
    assert new["vllm:time_to_first_token_seconds_count"] == 8  # two never ran
    assert new["vllm:e2e_request_latency_seconds_count"] == 10
    assert new["sglang:num_running_reqs"] == new["sglang:num_queue_reqs"] == 0
    assert new["vllm:spec_decode_num_drafts_total"] > 0


def grown(server: LiveServer, before: Figures) -> Figures | None:
    now = scrape(server)
    drafts = "vllm:spec_decode_num_drafts_total"
    return now if now[drafts] > before[drafts] else None


def test_refusals_and_aborts_are_counted(server: LiveServer) -> None:
    server.wait_idle()
    before = scrape(server)
    server.http.post("/generate", json={"text": PROMPT, "sampling_params": {"top_p": 7}})
    server.http.get("/no/such/path")
    server.http.post("/v1/completions", content=b"{")
    body = {"text": PROMPT, "sampling_params": LONG, "rid": "mine", "stream": True}
    with server.http.stream("POST", "/generate", json=body) as response:
        next(lines := response.iter_lines())
        server.http.post("/abort_request", json={"rid": "mine"})
        list(lines)
    server.wait_idle()
    new = since(server, before)
    assert new["forerun_http_responses_total{/generate,400}"] == 1
    assert new["forerun_http_responses_total{other,404}"] == 1
    assert new["forerun_http_responses_total{/v1/completions,400}"] == 1
    assert new["forerun_requests_aborted_total{abort_request}"] == 1
    assert new["forerun_requests_aborted_total{disconnect}"] == 0
    assert new["vllm:request_success_total{abort}"] == 1


# --- the dashboard --------------------------------------------------------------------------------


def test_the_dashboard_queries_what_is_exported(server: LiveServer) -> None:
    server.generate(text=PROMPT, sampling_params={**EXACT, "max_new_tokens": 20})
    server.wait_idle()
    exported: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            exported.setdefault(sample.name, set()).update(sample.labels)
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    rows = {panel["title"] for panel in panels if panel["type"] == "row"}
    assert rows >= {"Latency", "Throughput", "Queue", "Cache", "Speculation"}
    seen = set()
    for panel in panels:
        assert (panel["type"] == "row") == (not panel.get("targets"))
        for target in panel.get("targets", []):
            expr = target["expr"]
            selected = re.findall(r"((?:sglang:|vllm:|forerun_)\w+)\{(.*?)\}", expr)
            assert len(selected) == len(re.findall(r"sglang:|vllm:|forerun_", expr)) > 0, expr
            labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            for by in re.findall(r"by \((.*?)\)", expr):
                labels |= set(by.split(", "))
            for name, matchers in selected:
                wanted = labels | set(re.findall(r"(\w+)!?=", matchers))
                assert wanted <= exported[name] | ({"position"} if "scalar" in expr else set())
                seen.add(name)
    assert len(seen) > 25


# --- parts ----------------------------------------------------------------------------------------


def test_histogram_bounds_are_inclusive() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    histogram.observe(2.0, count=3)
    assert histogram.counts == [2, 5, 1]
    assert histogram.total == 20.0


def test_throughput_forgets() -> None:
    clock = [100.0]
    throughput = Throughput(clock=lambda: clock[0])
    for _ in range(20):
        clock[0] += 0.05
        throughput.add(10, clock[0])
    assert throughput.value() == 200 / THROUGHPUT_SECONDS
    clock[0] += THROUGHPUT_SECONDS - 0.5
    assert 0 < throughput.value() < 200 / THROUGHPUT_SECONDS
    clock[0] += 1
    assert throughput.value() == 0


def test_a_scrape_is_cheap(server: LiveServer) -> None:
    """It runs on the event loop, between the events of streams."""
    times = []
    for _ in range(10):
        started = time.perf_counter()
        assert isinstance(server.http.get("/metrics"), httpx.Response)
        times.append(time.perf_counter() - started)
    assert min(times) < 0.05
