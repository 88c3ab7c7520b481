"""Spans of requests: parents, times and counts, with and without overlap; none by default."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import defaultdict
from typing import Any

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.core.errors import ConfigError
from forerun.engine import tracing
from forerun.executor.step import timing as phases
from forerun.executor.step.timing import WINDOW, ClockOffset, PhaseBoundary, StepTimer
from tests.golden_engine import CASES, golden_llm
from tests.toy_algorithms import register_toys

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

register_toys()
PROMPTS = [c["prompt"] for c in CASES[:5]]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 20}
Spans = dict[str, list[Any]]


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    memory = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "make_exporter", lambda endpoint: memory)
    return memory


def by_request(exporter: InMemorySpanExporter) -> dict[str, tuple[Any, Spans]]:
    """Request id -> its root span and its other spans by name."""
    finished = exporter.get_finished_spans()
    roots = {s.context.span_id: s for s in finished if s.parent is None}
    children: dict[int, Spans] = defaultdict(lambda: defaultdict(list))
    for span in finished:
        assert span.start_time <= span.end_time
        if span.parent is not None:
            root = roots[span.parent.span_id]
            assert span.context.trace_id == root.context.trace_id
            assert root.start_time <= span.start_time and span.end_time <= root.end_time
            children[span.parent.span_id][span.name].append(span)
    assert all(root.name == "request" for root in roots.values())
    return {r.attributes["request.id"]: (r, children[i]) for i, r in roots.items()}


def check_spans(root: Any, spans: Spans, info: dict[str, Any]) -> None:
    """Counts and times of the spans agree with `meta_info`."""
    attributes = root.attributes
    assert attributes["prompt_tokens"] == info["prompt_tokens"]
    assert attributes["completion_tokens"] == info["completion_tokens"]
    assert attributes["finish_reason"] == info["finish_reason"]["type"]
    assert attributes["spec_accept_length"] == info["spec_accept_length"]
    drafts, verifies, accepts = (spans[f"spec_{name}"] for name in ("draft", "verify", "accept"))
    assert len(drafts) == len(verifies) == len(accepts)
    assert len(verifies) + len(spans["decode"]) == info["spec_verify_ct"]
    steps = [s.attributes for s in accepts]
    assert sum(r["drafted_tokens"] for r in steps) == info["spec_num_proposed_drafts"]
    assert sum(r["accepted_tokens"] for r in steps) == info["spec_num_correct_drafts"]
    steps = sorted([*accepts, *spans["decode"]], key=lambda s: s.start_time)
    assert [s.attributes["new_tokens"] for s in steps] == info["spec_accept_lengths"]
    for draft, verify, accept in zip(drafts, verifies, accepts, strict=True):
        assert draft.end_time == verify.start_time and verify.end_time == accept.start_time
        assert draft.start_time < draft.end_time < verify.end_time < accept.end_time
        assert accept.attributes["width"] > 1 and 1 <= accept.attributes["batch_size"] <= 5


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("algorithm", ["DFLASH", "NGRAM", "TOY-TREES", "TOY-ORACLE", None])
def test_spans_agree_with_meta_info(
    algorithm: str | None, overlap_depth: int, exporter: InMemorySpanExporter
) -> None:
    before = time.time_ns()
    kinds = [{**GREEDY, "max_draft_tokens": n} for n in (None, 0, 2, None, None)]
    settings = {"overlap_depth": overlap_depth, "enable_trace": True, "chunked_prefill_size": 16}
    with golden_llm(algorithm, **settings) as llm:
        outs = llm.generate(input_ids=PROMPTS, sampling_params=kinds)
    spans = by_request(exporter)
    assert len(spans) == len(outs)
    for out in outs:
        root, own = spans[out.meta_info["id"]]
        check_spans(root, own, out.meta_info)
        (prefill,) = own["prefill"]
        assert prefill.attributes["tokens"] == len(out.prompt_token_ids)
        assert before <= root.start_time and root.end_time <= time.time_ns()
        first = min(s.start_time for name in ("spec_draft", "decode") for s in own[name])
        assert prefill.start_time < first
    if algorithm is None:
        assert not any(own["spec_verify"] for _, own in spans.values())


@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
def test_spans_of_steps_do_not_overlap(overlap_depth: int, exporter: InMemorySpanExporter) -> None:
    """Although a step is launched before the previous one has completed."""
    with golden_llm("DFLASH", overlap_depth=overlap_depth, enable_trace=True) as llm:
        llm.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
    ((_, own),) = by_request(exporter).values()
    for accept, draft in zip(own["spec_accept"], own["spec_draft"][1:], strict=False):
        assert accept.end_time <= draft.start_time


@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
def test_preemption_adds_a_prefill_span(overlap_depth: int, exporter: InMemorySpanExporter) -> None:
    with golden_llm("DFLASH", overlap_depth=overlap_depth, enable_trace=True) as llm:
        engine = llm.engine
        requests = [engine.make_request(p, SamplingParams.of(GREEDY)) for p in PROMPTS[:2]]
        for request in requests:
            engine.submit(request)
        for step in range(100):
            if step == 2:
                engine.scheduler._preempt(requests[1])
            engine.step()
        for request in requests:
            engine.close_request(request)
    spans = by_request(exporter)
    root, own = spans[requests[1].rid]
    assert root.attributes["preemptions"] == requests[1].preemptions == 1
    assert len(own["prefill"]) == 2
    accepted = sum(s.attributes["accepted_tokens"] for s in own["spec_accept"])
    assert accepted == sum(requests[1].correct_drafts)
    assert len(spans[requests[0].rid][1]["prefill"]) == 1


@pytest.mark.parametrize("overlap_depth", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_spans_of_aborted_requests_end(
    overlap_depth: int, steps: int, exporter: InMemorySpanExporter
) -> None:
    with golden_llm("DFLASH", overlap_depth=overlap_depth, enable_trace=True) as llm:
        engine = llm.engine
        request = engine.make_request(PROMPTS[0], SamplingParams.of(GREEDY))
        engine.submit(request)
        for _ in range(steps):
            engine.step()
        engine.abort(request.rid)
        engine.close_request(request)
        while engine.has_work:
            engine.step()
        assert not engine._tracing._open
    ((root, own),) = by_request(exporter).values()
    assert root.attributes["finish_reason"] == "abort"
    assert len(own["spec_verify"]) == request.verify_ct


def test_no_timestamps_without_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also none in captured steps. With tracing: four per step."""
    calls: list[int] = []
    write_timestamp = phases.write_timestamp
    monkeypatch.setattr(
        phases, "write_timestamp", lambda out, at: (calls.append(at), write_timestamp(out, at))
    )
    with golden_llm("DFLASH") as llm:
        llm.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
        assert llm.engine.executor.step.timer is None
    assert calls == []
    monkeypatch.setattr(tracing, "make_exporter", lambda endpoint: InMemorySpanExporter())
    with golden_llm("DFLASH", enable_trace=True) as llm:
        calls.clear()
        out = llm.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
    assert calls == list(PhaseBoundary) * out.meta_info["spec_verify_ct"]


def test_opentelemetry_is_not_imported_when_off() -> None:
    check = (
        "import sys, forerun.engine.engine, forerun_bench.cli.app;"
        "sys.exit(any(n.partition('.')[0] == 'opentelemetry' for n in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(endpoint: str) -> Any:
        raise ImportError("No module named 'opentelemetry.exporter'")

    monkeypatch.setattr(tracing, "make_exporter", missing)
    with pytest.raises(ConfigError, match=r"pip install 'forerun\[trace\]'"):
        LLM(enable_trace=True)
    monkeypatch.undo()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "carrier-pigeon")
    with pytest.raises(ConfigError, match="known: grpc, http/protobuf"):
        LLM(enable_trace=True)


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("localhost:4318", "http://localhost:4318/v1/traces"),
        ("https://a.example", "https://a.example/v1/traces"),
        ("http://a.example/otlp/v1/traces", "http://a.example/otlp/v1/traces"),
    ],
)
def test_http_endpoints_are_completed(endpoint: str, url: str) -> None:
    assert tracing.traces_url(endpoint) == url


def test_the_offset_is_the_smallest_of_two_windows() -> None:
    offset = ClockOffset()
    assert offset.update(0, WINDOW * 2) == 2 * WINDOW
    assert offset.update(100, WINDOW * 2 + 50) == 2 * WINDOW - 50  # arrived sooner
    assert offset.update(200, WINDOW * 2 + 900) == 2 * WINDOW - 50
    at = 4 * WINDOW  # the device's clock falls behind
    assert offset.update(at - 2 * WINDOW - 10, at) == 2 * WINDOW - 50
    assert offset.update(at - 2 * WINDOW + 2 * WINDOW, at + 2 * WINDOW + 70) == 2 * WINDOW + 10


def test_phase_times_are_unix_times() -> None:
    clock = StepTimer(torch.device("cpu"))
    before = time.time_ns()
    for boundary in PhaseBoundary:
        clock.mark(boundary)
    boundaries = clock.unix(clock.take())
    tolerance = 2_000_000  # ns, of the calibration
    assert before - tolerance <= boundaries[0] <= boundaries[3] <= time.time_ns()
    assert list(boundaries) == sorted(boundaries)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_phases_in_captured_steps(graph: bool, exporter: InMemorySpanExporter) -> None:
    own = {"device": "cuda", "disable_cuda_graph": not graph, "max_running_requests": 6}
    before = time.time_ns()
    with golden_llm("DFLASH", enable_trace=True, **own) as llm:
        outs = llm.generate(input_ids=PROMPTS, sampling_params=GREEDY)
    spans = by_request(exporter)
    for out in outs:
        root, children = spans[out.meta_info["id"]]
        check_spans(root, children, out.meta_info)
        steps = zip(children["spec_accept"], children["spec_draft"][1:], strict=False)
        assert all(accept.end_time <= draft.start_time for accept, draft in steps)
        assert before <= min(s.start_time for s in children["spec_draft"])
