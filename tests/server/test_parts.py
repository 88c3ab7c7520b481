"""The server's parts on their own: what the engine process does with messages, and the rest."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import zmq
from starlette.types import ASGIApp, Receive, Scope, Send

from forerun import LLM, SamplingParams
from forerun.config.engine_config import EngineConfig
from forerun.core.errors import BusyError, RequestError
from forerun.core.grammar import Grammar
from forerun.core.logprobs import LogprobParams, TokenLogprobs
from forerun.core.request import FinishReason, Request
from forerun.engine import tracing
from forerun.engine.stats import accepted_per_position
from forerun.server.engines import link as engine_link
from forerun.server.engines import process
from forerun.server.engines.backoff import HEALTHY_SECONDS, MAX_DELAY, MAX_QUICK_DEATHS, Backoff
from forerun.server.engines.client import EngineClient, EngineState
from forerun.server.engines.link import EngineLink
from forerun.server.engines.messages import (
    Abort,
    Advance,
    Compile,
    Finish,
    FromEngine,
    NewRequest,
    Query,
    Reply,
    Shutdown,
    Step,
    Submit,
    ToEngine,
    decode_from_engine,
    encode,
)
from forerun.server.engines.metrics import ServerMetrics
from forerun.server.engines.placement import Placement
from forerun.server.engines.process import MAX_FAILURES, METRICS_SECONDS, EngineServer
from forerun.server.generation import Call, Generation, Place
from forerun.server.http import api_keys, auth
from forerun.server.http.api_keys import ApiKeys
from forerun.server.http.errors import ApiError, EngineUnavailable, json_response
from forerun.server.http.exchange import Exchange, current_exchange
from forerun.server.http.limits import check_queue
from tests.golden_engine import CASES, golden_llm

PROMPT = CASES[0]["prompt"]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True, sampling_seed=1)


class Wire:
    """Both sockets of an engine process. The next message comes after so many steps."""

    def __init__(self) -> None:
        self.inbox: deque[tuple[int, bytes]] = deque()
        self.sent: list[FromEngine] = []

    def say(self, *messages: ToEngine, after: int = 0) -> None:
        self.inbox.extend((after if i == 0 else 0, encode(m)) for i, m in enumerate(messages))

    def recv(self, flags: int) -> bytes:
        if not self.inbox:
            assert flags == zmq.NOBLOCK, "the engine sleeps, and nobody wakes it up"
            raise zmq.Again
        wait, data = self.inbox[0]
        if flags == zmq.NOBLOCK and wait > 0:
            self.inbox[0] = (wait - 1, data)
            raise zmq.Again
        self.inbox.popleft()
        return data

    def send(self, data: bytes) -> None:
        self.sent.append(decode_from_engine(data))

    def advances(self, rid: str) -> list[Advance]:
        steps = [message for message in self.sent if isinstance(message, Step)]
        return [a for step in steps for a in step.advances if a.rid == rid]

    def tokens(self, rid: str) -> list[int]:
        return [token for advance in self.advances(rid) for token in advance.tokens]

    def replies(self) -> dict[int, Reply]:
        return {m.number: m for m in self.sent if isinstance(m, Reply)}


@pytest.fixture
def llm() -> Iterator[LLM]:
    with golden_llm("DFLASH") as made:
        yield made


def new(rid: str, number: int = 0, **changes: Any) -> NewRequest:
    return NewRequest(rid, list(PROMPT), replace(GREEDY, **changes), number=number)


def run(llm: LLM, wire: Wire) -> None:
    EngineServer(llm.engine, wire, wire).run()  # type: ignore[arg-type]
    llm.engine.check()
    assert not llm.engine._requests


def test_collections_pass_over_what_is_loaded_when_an_engine_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened: list[object] = []
    outbox = Mock(send=lambda _: happened.append("ready"))
    monkeypatch.setattr("forerun.executor.start.start_executor", Mock())
    monkeypatch.setattr(process, "Engine", Mock())
    monkeypatch.setattr(process, "EngineServer", Mock())
    monkeypatch.setattr(process, "Ready", Mock())
    monkeypatch.setattr(process, "encode", Mock())
    monkeypatch.setattr(process, "freeze_loaded", lambda: happened.append("frozen"))
    process._serve(Mock(model_path=""), Mock(), outbox)
    assert happened == ["frozen", "ready"]


def test_requests_run_together_and_end(llm: LLM) -> None:
    want = llm.generate(input_ids=PROMPT, sampling_params=GREEDY)
    wire = Wire()
    wire.say(Submit([new("a"), new("b", max_new_tokens=7)]))
    wire.say(Query(1, "load"), after=2)
    wire.say(Shutdown(), after=99)
    run(llm, wire)
    assert wire.tokens("a") == want.output_ids
    assert wire.tokens("b") == want.output_ids[:7]
    last = wire.advances("a")[-1]
    assert last.finish == FinishReason("length", length=20)
    assert last.proposed == want.meta_info["spec_num_proposed_drafts"]
    lengths = [n for advance in wire.advances("a") for n in advance.accept_lengths]
    assert lengths == want.meta_info["spec_accept_lengths"]
    value = wire.replies()[1].value
    assert value is not None
    assert value["num_running_reqs"] == 2


def test_logprobs_are_sent_for_requests_that_asked(llm: LLM) -> None:
    want = llm.generate(
        input_ids=[PROMPT, PROMPT],
        sampling_params=GREEDY,
        return_logprob=[True, False],
        logprob_start_len=1,
        top_logprobs_num=[2, 0],
    )[0].meta_info
    asked = LogprobParams(start_len=1, top=2)
    wire = Wire()
    wire.say(Submit([NewRequest("asked", list(PROMPT), GREEDY, logprobs=asked), new("not")]))
    wire.say(Shutdown(), after=99)
    run(llm, wire)
    sent = wire.advances("asked")
    output = [each for advance in sent for each in advance.output_logprobs]
    prompt = [each for advance in sent for each in advance.prompt_logprobs]
    assert [len(a.output_logprobs) for a in sent] == [len(a.tokens) for a in sent]
    for each, name in ((output, "output"), (prompt, "input")):
        entries = want[f"{name}_token_logprobs"][-len(each) :]
        assert [e.logprob for e in each] == [value for value, _, _ in entries]
        tops = want[f"{name}_top_logprobs"][-len(each) :]
        assert [e.top for e in each] == [tuple((v, i) for v, i, _ in top) for top in tops]
    assert len(prompt) == len(PROMPT) - 2
    assert not any(a.output_logprobs or a.prompt_logprobs for a in wire.advances("not"))


def test_finish_and_abort_release_everything(llm: LLM) -> None:
    wire = Wire()
    long = {"max_new_tokens": 400}
    wire.say(Submit([new("stopped", **long), new("left", **long)]))
    wire.say(Query(1, "flush_cache"), after=3)
    wire.say(Finish("stopped", FinishReason("stop", matched="x"), 1), Abort(["left", "unknown"]))
    wire.say(Query(2, "load"), Query(3, "flush_cache"), Query(4, "stats"), Shutdown())
    run(llm, wire)
    replies = wire.replies()
    assert "while requests run" in str(replies[1].error)
    load = replies[2].value
    assert load is not None
    assert load["num_running_reqs"] == 0
    assert load["num_free_pages"] + load["num_cached_pages"] == load["num_pages"]
    assert replies[3].error is None
    assert replies[4].value
    assert len(wire.tokens("left")) < 400


def test_grammars_are_compiled_while_requests_run(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = llm.generate(input_ids=PROMPT, sampling_params=GREEDY).output_ids
    wire, go, asked = Wire(), threading.Event(), list[tuple[str, str]]()

    def compile_grammar(grammar: Grammar, client: str) -> None:
        asked.append((grammar.kind, client))
        assert go.wait(10)
        if grammar.kind == "structural_tag":
            raise BusyError("later")
        if grammar.kind == "regex":
            raise RequestError("regex is invalid")
        if grammar.kind == "ebnf":
            raise ZeroDivisionError("broken")

    def send(data: bytes) -> None:
        wire.sent.append(decode_from_engine(data))
        if wire.tokens("a") == want:  # it ends before any grammar does
            go.set()

    monkeypatch.setattr(llm.engine.executor, "compile_grammar", compile_grammar)
    monkeypatch.setattr(wire, "send", send)
    kinds = ("json_schema", "regex", "ebnf", "structural_tag", "regex")
    wire.say(
        *(Compile(i, Grammar(kind, "x"), f"client {i}") for i, kind in enumerate(kinds)),
        Submit([new("a")]),
    )
    server = EngineServer(llm.engine, wire, wire)  # type: ignore[arg-type]
    recv = wire.recv

    def recv_until_answered(flags: int) -> bytes:
        if len(wire.replies()) == len(kinds):
            wire.say(Shutdown())
        return recv(flags)

    monkeypatch.setattr(wire, "recv", recv_until_answered)
    server.run()
    assert wire.tokens("a") == want
    replies = wire.replies()
    assert replies[0] == Reply(0, {})
    assert replies[1] == Reply(1, None, "regex is invalid")
    assert replies[4] == Reply(4, None, "regex is invalid")  # asked for once
    assert "ZeroDivisionError: broken" in str(replies[2].error)
    assert replies[3] == Reply(3, None, "later", busy=True)
    assert sorted(asked) == sorted((kinds[i], f"client {i}") for i in range(4))
    assert wire.sent.index(replies[0]) > max(
        i for i, m in enumerate(wire.sent) if isinstance(m, Step) and m.advances
    )


def test_a_failed_step_ends_its_requests_and_several_end_the_process(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = llm.generate(input_ids=PROMPT, sampling_params=GREEDY).output_ids
    step, failures = llm.engine.step, [1]

    def failing() -> list[Request]:
        if failures[0] > 0:
            failures[0] -= 1
            raise ZeroDivisionError("broken")
        return step()

    monkeypatch.setattr(llm.engine, "step", failing)
    wire = Wire()
    wire.say(Submit([new("a")]))
    wire.say(Submit([new("b")]), after=1)
    wire.say(Shutdown(), after=99)
    run(llm, wire)
    finish = wire.advances("a")[-1].finish
    assert finish == FinishReason("abort", message="ZeroDivisionError: broken")
    assert wire.tokens("b") == want

    failures[0] = MAX_FAILURES
    for i in range(MAX_FAILURES):
        wire.say(Submit([new(f"c{i}")]), after=1)
    with pytest.raises(ZeroDivisionError):
        run(llm, wire)


def test_requests_that_the_engine_refuses_end_alone(llm: LLM) -> None:
    wire = Wire()
    wire.say(Submit([new("same"), new("same"), NewRequest("big", [10**6], GREEDY)]))
    wire.say(Shutdown(), after=99)
    run(llm, wire)
    assert "vocabulary" in str(wire.advances("big")[0].finish)
    assert [a.finish.type for a in wire.advances("same") if a.finish] == ["abort", "length"]


def test_requests_of_one_rid_are_told_apart_by_their_numbers(llm: LLM) -> None:
    wire = Wire()
    wire.say(Submit([new("a", 5)]))
    wire.say(Abort(["a"]), Submit([new("a", 6), new("a", 7)]), after=2)
    wire.say(Shutdown(), after=99)
    run(llm, wire)
    ends = {advance.number: advance.finish for advance in wire.advances("a")}
    assert list(ends) == [5, 7, 6]  # in the order of their first words
    assert ends[5] is None
    assert [str(end.type) for end in (ends[7], ends[6]) if end] == ["abort", "length"]


def test_metrics_come_with_the_steps_and_at_the_end(llm: LLM) -> None:
    wire = Wire()
    wire.say(Submit([new("a"), new("b", max_new_tokens=300)]))
    wire.say(Query(1, "flush_cache"), Shutdown(), after=999)
    started = time.monotonic()
    run(llm, wire)
    seconds = time.monotonic() - started
    steps = [message for message in wire.sent if isinstance(message, Step)]
    snapshots = [step.metrics for step in steps if step.metrics is not None]
    # At the start, when idle, after the flush and at the end; in between a few per second.
    assert 3 <= len(snapshots) <= 5 + seconds / METRICS_SECONDS
    assert len([step for step in steps if step.metrics is None]) > 20 - seconds / METRICS_SECONDS
    first, last = snapshots[0], snapshots[-1]
    assert first.request_steps == sum(first.accepted) == sum(first.queue_seconds.counts) == 0
    stats = llm.engine.stats()
    assert last.decode_tokens == stats["decode_tokens"] > 300
    assert sum(last.accepted) == stats["spec_decode_num_drafts"]
    assert last.draft_tokens == stats["spec_decode_num_draft_tokens"]
    assert accepted_per_position(last.accepted) == stats["spec_decode_num_accepted_tokens_per_pos"]
    assert sum(last.steps_by_width.values()) >= stats["decode_steps"] > 0
    assert sum(last.queue_seconds.counts) == 2
    assert last.prefix.queries == 2 * len(PROMPT)
    assert last.load["num_running_reqs"] == last.load["num_cached_pages"] == 0
    assert last.load["num_free_pages"] == last.load["num_pages"]


def test_a_preempted_request_is_counted_once_in_the_queue(llm: LLM) -> None:
    engine = llm.engine
    request = engine.make_request(list(PROMPT), GREEDY)
    engine.submit(request)
    for step in range(60):
        if step == 3:
            engine.scheduler._preempt(request)
        engine.step()
    engine.close_request(request)
    metrics = engine.metrics()
    assert metrics.preemptions == request.preemptions == 1
    assert sum(metrics.queue_seconds.counts) == 1
    assert metrics.prefix.queries == len(PROMPT)
    assert sum(metrics.prefill_seconds.counts) == 2


def test_the_engines_spans_belong_to_the_http_request(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    memory = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "make_exporter", lambda endpoint: memory)
    trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with golden_llm("DFLASH", enable_trace=True) as llm:
        wire = Wire()
        context = {"traceparent": f"00-{trace}-{span}-01"}
        wire.say(Submit([NewRequest("a", list(PROMPT), GREEDY, trace_context=context), new("b")]))
        wire.say(Shutdown(), after=99)
        run(llm, wire)
    spans = memory.get_finished_spans()
    roots = {s.attributes["request.id"]: s for s in spans if s.name == "request"}
    assert f"{roots['a'].parent.span_id:016x}" == span
    assert roots["b"].parent is None
    verify = [s for s in spans if s.name == "spec_verify"]
    assert {f"{s.context.trace_id:032x}" for s in verify} > {trace}


# --- in the API process ---------------------------------------------------------------------------


class Letters:
    """A tokenizer: token 1 is "b"."""

    def decode(self, token_ids: list[int], **options: bool) -> str:
        return "".join(chr(97 + token) for token in token_ids)


def generation(stream: bool = True, **params: Any) -> Generation:
    request = Request("r", (1, 2), SamplingParams(**params), seed=0, stop_ids=frozenset())
    return Generation(request, Letters(), Place("r", 0, 0), stream)


def advance(*tokens: int, finish: FinishReason | None = None) -> Advance:
    return Advance("r", list(tokens), [len(tokens)], [len(tokens) - 1], 9, 1, finish)


def call_of(one: Generation, deadline: float | None = None) -> tuple[Call, list[str]]:
    aborted: list[str] = []
    return Call([one], True, aborted.extend, deadline), aborted


def test_a_slow_reader_gets_fewer_and_larger_parts() -> None:
    async def read() -> None:
        one = generation()
        call, aborted = call_of(one)
        parts = call.parts()
        one.apply(advance(0))
        call.notify(ended=False)
        assert [part.text for _, part in await anext(parts)] == ["a"]
        for token in range(1, 6):
            one.apply(advance(token))
            call.notify(ended=False)
        ((_, part),) = await anext(parts)
        assert (part.text, part.token_ids, part.finish) == ("bcdef", [1, 2, 3, 4, 5], None)
        one.apply(advance(6, finish=FinishReason("length", length=7)))
        call.notify(ended=True)
        ((_, part),) = await anext(parts)
        assert (part.text, part.finish) == ("g", FinishReason("length", length=7))
        assert [part async for part in parts] == []
        call.close()
        assert aborted == []

    asyncio.run(read())


def test_a_stop_string_trims_text_ids_and_figures() -> None:
    one = generation(stop=["de"], max_new_tokens=9)
    assert one.apply(advance(0, 1, 2)) is None
    part = one.take()
    assert part is not None
    assert part.text == "abc"
    told = one.apply(advance(3, 4, 5))
    assert told == Finish("r", FinishReason("stop", matched="de"), 3)
    output = one.output()
    assert (output.text, output.output_ids) == ("abc", [0, 1, 2])
    assert output.meta_info["spec_accept_lengths"] == [3, 0]
    assert output.finish_reason == {"type": "stop", "matched": "de"}


def test_a_token_with_logprobs_is_shown_with_its_text() -> None:
    asked = LogprobParams()
    params = SamplingParams(stop=["cd"])
    request = Request("r", (1,), params, seed=0, stop_ids=frozenset(), logprobs=asked)
    one = Generation(request, Letters(), Place("r", 0, 0), True)
    shown = []
    for token in (0, 1, 2, 4, 2, 3):
        values = [TokenLogprobs(-float(token))]
        one.apply(Advance("r", [token], [1], [0], 0, 0, output_logprobs=values))
        part = one.take()
        if part is not None:
            scored = one.scored_tokens(part)
            shown.append((part.text, [(each.token, each.offset) for each in scored]))
            assert all(each.logprobs == TokenLogprobs(-float(each.token)) for each in scored)
    assert shown == [
        ("a", [(0, 0)]),
        ("b", [(1, 1)]),
        ("ce", [(2, 2), (4, 3)]),
        ("", []),
    ]
    assert [each.token for each in one.scored_tokens()] == [0, 1, 2, 4]
    assert len(one.output().meta_info["output_token_logprobs"]) == 4


def test_errors_and_deadlines_reach_who_waits() -> None:
    async def wait(call: Call) -> None:
        await call.wait()

    one = generation()
    call, aborted = call_of(one)
    call.fail(EngineUnavailable("gone"))
    with pytest.raises(EngineUnavailable):
        asyncio.run(wait(call))
    call, aborted = call_of(one, deadline=0.0)
    with pytest.raises(ApiError, match="--request-timeout"):
        asyncio.run(wait(call))
    call.close()
    assert aborted == ["r"]


class Link:
    """Of an engine that never answers."""

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)


def engine_client() -> EngineClient:
    return EngineClient(Placement(EngineConfig()), Path("model"), ServerMetrics())


def test_refused_grammars_are_400_and_busy_ones_503() -> None:
    client, loop = engine_client(), asyncio.new_event_loop()
    refused, busy = (client._queries.setdefault(i, loop.create_future()) for i in range(2))
    client._answer(Reply(0, None, "regex is invalid"))
    client._answer(Reply(1, None, "later", busy=True))
    assert type(refused.exception()) is RequestError
    error = busy.exception()
    assert isinstance(error, ApiError) and error.status == 503
    assert error.response().headers["Retry-After"] == "5"
    assert error.body()["error"]["code"] == "grammar_busy"
    loop.close()


def test_questions_that_take_too_long_end_with_the_server() -> None:
    client, loop = engine_client(), asyncio.new_event_loop()
    client.end_questions()  # there are none
    quick, slow = (client._queries.setdefault(i, loop.create_future()) for i in range(2))
    assert client.num_questions == 2
    client._answer(Reply(0, {"a": 1}))
    client.end_questions()
    assert quick.result() == {"a": 1}
    with pytest.raises(EngineUnavailable, match="The server is shutting down"):
        slow.result()
    loop.close()


def test_ends_are_counted_by_their_reason() -> None:
    client, link = engine_client(), Link()
    client._link, client.state = link, EngineState.READY  # type: ignore[assignment]
    calls: dict[str, Call] = {}
    for rid in ("left", "late", "asked", "lost", "broken", "whole"):
        request = Request(rid, (1, 2), SamplingParams(), seed=0, stop_ids=frozenset())
        one = Generation(request, None, Place(rid, 0, 0), stream=False)
        calls[rid] = Call([one], False, client.abort, trace_context={"traceparent": rid})
        client.submit(calls[rid].generations, calls[rid])
    (first, *_) = link.sent
    assert isinstance(first, Submit)
    assert first.requests[0].trace_context == {"traceparent": "left"}
    calls["left"].close()
    calls["late"].deadline = 0.0
    with pytest.raises(ApiError, match="--request-timeout"):
        asyncio.run(calls["late"].wait())
    calls["late"].close()
    client.abort_group("asked", lambda call: False)
    client.abort_group("asked", lambda call: True)
    message = FinishReason("abort", message="NaN")
    broken, whole = (calls[rid].generations[0].number for rid in ("broken", "whole"))
    client._advance(Advance("broken", [], [], [], 0, 0, message, number=broken), now=1.0)
    for token, end in ((1, None), (2, FinishReason("length"))):
        advance = Advance("whole", [token], [], [], 0, 0, end, number=whole)
        client._advance(advance, now=time.monotonic())
    client._lose("The engine died.")
    for call in calls.values():
        call.close()  # nothing is counted twice
    metrics = client.metrics
    assert metrics.aborted == {
        "disconnect": 1, "timeout": 1, "queue_timeout": 0, "abort_request": 1,
    }  # fmt: skip
    assert metrics.finished == {"stop": 0, "length": 1, "abort": 3, "error": 2}
    assert sum(metrics.request_seconds.counts) == sum(metrics.generation_lengths.counts) == 6
    assert sum(metrics.first_token_seconds.counts) == sum(metrics.token_seconds.counts) == 1
    assert (metrics.prompt_tokens, metrics.generation_tokens) == (2, 2)


def test_tokens_of_an_ended_request_do_not_reach_the_next_one_of_its_rid() -> None:
    client, link = engine_client(), Link()
    client._link, client.state = link, EngineState.READY  # type: ignore[assignment]
    numbers, ones = [], []
    for _ in range(2):
        request = Request("same", (1, 2), SamplingParams(), seed=0, stop_ids=frozenset())
        ones.append(Generation(request, None, Place("same", 0, 0), stream=False))
        call = Call([ones[-1]], False, client.abort)
        client.submit(call.generations, call)
        submitted = link.sent[-1]
        assert isinstance(submitted, Submit)
        numbers.append(submitted.requests[0].number)
        if len(ones) == 1:
            call.close()
    for number, token in zip(numbers, (7, 8), strict=True):  # 7 was sent before the abort came
        end = FinishReason("length")
        client._advance(Advance("same", [token], [], [], 0, 0, end, number=number), now=1.0)
    assert [one.record.output for one in ones] == [[], [8]]


class NoProcess:
    """An engine process that says nothing and does not end."""

    pid, exitcode = None, None

    def __init__(self) -> None:
        self.sentinel, self._writer = os.pipe()

    def is_alive(self) -> bool:
        return True

    def kill(self) -> None: ...

    def join(self) -> None: ...

    def close(self) -> None:
        os.close(self.sentinel)
        os.close(self._writer)


def test_others_get_their_turn_while_messages_of_the_engine_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = NoProcess()
    monkeypatch.setattr(engine_link, "start_engine", lambda task: process)
    count, turns = 100, 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def read() -> int:
        link = EngineLink(Placement(EngineConfig()), Path("model"), tmp_path, "plain", 0)
        context = zmq.Context()
        engine = context.socket(zmq.PUSH)
        engine.connect(link._task.outbox)
        for number in range(count):
            engine.send(encode(Reply(number, None)))
        await link.receive()
        time.sleep(0.2)  # all have arrived
        task = asyncio.create_task(others())
        before = turns
        for _ in range(count - 1):
            await link.receive()
            time.sleep(0.002)  # in which an engine would have sent more
        found = turns - before
        task.cancel()
        engine.close()
        context.term()
        await link.close()
        return found

    assert asyncio.run(read()) >= 10
    process.close()


def test_a_dead_engine_is_unhealthy_before_its_last_words_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    links: list[SilentLink] = []

    def link(*arguments: Any) -> SilentLink:
        links.append(SilentLink())
        return links[-1]

    monkeypatch.setattr("forerun.server.engines.client.EngineLink", link)

    async def die() -> None:
        client = engine_client()
        await client.start()
        waiting = asyncio.ensure_future(client.query("load"))
        await asyncio.sleep(0)
        assert client.state is EngineState.READY
        (one,) = links
        assert one.on_end is not None
        one.on_end()
        assert client.state is EngineState.RESTARTING
        with pytest.raises(ApiError, match="restarting"):
            await client.query("load")
        assert not waiting.done()  # its answer may be on the way
        await client.close()
        with pytest.raises(EngineUnavailable, match="was lost"):
            await waiting

    asyncio.run(die())


class SilentLink(Link):
    """A process that says nothing."""

    on_end: Callable[[], None] | None = None
    hangs = False

    async def ready(self) -> None:
        return None

    async def receive(self) -> None:
        await asyncio.sleep(60)

    async def close(self, at_once: bool) -> None:
        return None


class Observed:
    """An application that is asked within an exchange, as all are."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        current_exchange.set(Exchange("id"))
        await self._app(scope, receive, send)


class Asked:
    """Counts comparisons of keys."""

    def __init__(self) -> None:
        self.pairs: list[tuple[bytes, bytes]] = []

    def __call__(self, given: bytes, key: bytes) -> bool:
        self.pairs.append((given, key))
        return given == key


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the function that takes as long for any two values of the same length."""
    compare = Asked()
    monkeypatch.setattr(api_keys.hmac, "compare_digest", compare)
    reached: list[str] = []

    async def inside(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(scope["path"])
        await json_response({})(scope, receive, send)

    async def ask(*headers: tuple[str, str | bytes], path: str = "/v1/models") -> int:
        transport = httpx.ASGITransport(
            Observed(auth.RequireKey(inside, ApiKeys("key", None, None)))
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            named = [
                (name.encode(), v.encode() if isinstance(v, str) else v) for name, v in headers
            ]
            return (await client.get(path, headers=named)).status_code

    async def all_() -> list[int]:
        name = "Authorization"
        return [
            await ask((name, "Bearer key")),
            await ask((name, "bearer  key ")),
            await ask((name, "Bearer ke")),
            await ask((name, "Bearer keyy")),
            await ask((name, "Basic key")),
            await ask((name, "key")),
            await ask((name, "")),
            await ask(),
            await ask((name, "Bearer wrong"), (name, "Bearer key")),
            await ask((name, b"Bearer \xff")),
            await ask(path="/health"),
            await ask(path="/health/"),
            await ask(path="/health/../v1/models"),
        ]

    assert asyncio.run(all_()) == [200, 200, *[401] * 8, 200, 401, 401]
    assert reached == ["/v1/models", "/v1/models", "/health"]
    assert len(compare.pairs) == 12  # whatever else is wrong; not for /health
    assert {key for _, key in compare.pairs} == {b"key"}


def test_the_queue_is_bounded() -> None:
    check_queue(in_flight=5, new=1, slots=4, max_queued=2)
    with pytest.raises(ApiError) as caught:
        check_queue(in_flight=6, new=1, slots=4, max_queued=2)
    assert caught.value.status == 429
    with pytest.raises(RequestError):
        check_queue(in_flight=0, new=7, slots=4, max_queued=2)


def test_delays_double_and_end() -> None:
    now = [0.0]
    backoff = Backoff(clock=lambda: now[0])
    assert [backoff.died() for _ in range(3)] == [0.5, 1.0, 2.0]
    backoff.started()
    now[0] += HEALTHY_SECONDS
    assert backoff.died() == 0.5  # a long life: from the beginning
    backoff.started()
    delays = [backoff.died() for _ in range(MAX_QUICK_DEATHS)]
    assert delays[-1] is None
    assert all(delay is not None and delay <= MAX_DELAY for delay in delays[:-1])
