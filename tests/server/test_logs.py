"""The log: one line per request, ids, no text unless asked for; spans around the engine's."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from forerun import SamplingParams
from forerun.core.errors import ConfigError
from forerun.core.request import FinishReason, Request
from forerun.server.engines.messages import Advance
from forerun.server.engines.metrics import ServerMetrics
from forerun.server.generation import Call, Generation, Place
from forerun.server.http.exchange import Exchange, current_exchange, request_id
from forerun.server.http.request_log import RequestLog
from forerun.server.logs import Event, JsonFormatter
from forerun.server.native.observe import Observe
from forerun.server.settings import ServerSettings
from forerun.server.text import TextService
from tests.server.support import LiveServer, wait_for

SECRET = "zebra umbrella xylophone"
PATHS = {
    "/generate": {"text": SECRET, "sampling_params": {"temperature": 0, "max_new_tokens": 12}},
    "/v1/completions": {"prompt": SECRET, "max_tokens": 12, "temperature": 0},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 12},
}


def lines(server: LiveServer) -> list[dict[str, Any]]:
    """Of the server's log, without what it prints."""
    return [json.loads(line) for line in server.lines if line.startswith("{")]


def line_of(server: LiveServer, ident: str) -> dict[str, Any]:
    """The one line of a request; it comes just after the answer."""
    found = wait_for(lambda: [x for x in lines(server) if x.get("request_id") == ident], 5)
    assert len(found) == 1
    return dict(found[0])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_one_line_per_request_without_its_text(server: LiveServer, path: str, stream: bool) -> None:
    ident = f"id{path.replace('/', '-')}-{stream}"
    response = server.http.post(
        path, json={**PATHS[path], "stream": stream}, headers={"X-Request-Id": ident}
    )
    assert response.status_code == 200
    assert response.headers["x-request-id"] == ident
    line = line_of(server, ident)
    assert (line["level"], line["logger"], line["message"]) == (
        "INFO",
        "forerun.requests",
        "request",
    )
    assert (line["method"], line["path"], line["status"]) == ("POST", path, 200)
    assert line["client"] == "127.0.0.1"
    assert 0 < line["ttft"] <= line["e2e"] <= line["seconds"]
    assert line["completion_tokens"] == 12
    assert line["finish_reason"] == "length"
    if path == "/generate" and not stream:
        info = response.json()["meta_info"]
        assert line["rid"] == info["id"]
        assert line["prompt_tokens"] == info["prompt_tokens"]
        assert line["accept_length"] == pytest.approx(info["spec_accept_length"], abs=1e-4)
    for word in SECRET.split():
        assert word not in server.output
    if not stream:
        answer = response.json()
        text = answer.get("text") or answer["choices"][0].get("text")
        assert text is None or text.strip() not in server.output


def test_refusals_have_a_line_and_an_id(server: LiveServer) -> None:
    refused = server.http.post("/generate", json={"text": SECRET, "nope": SECRET})
    ident = refused.headers["x-request-id"]
    assert len(ident) == 32
    line = line_of(server, ident)
    assert line["status"] == 400
    assert "rid" not in line
    assert SECRET not in server.output
    odd = server.http.get("/v1/models", headers={"X-Request-Id": "two words"})
    assert odd.headers["x-request-id"] != "two words"
    health = server.http.get("/health").headers["x-request-id"]
    line_of(server, server.http.get("/v1/models").headers["x-request-id"])
    assert all(x.get("request_id") != health for x in lines(server))  # asked for all the time
    assert "INFO:" not in server.output  # of uvicorn's own log


# --- parts ----------------------------------------------------------------------------------------


class Letters:
    """A tokenizer: token 1 is "b"."""

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0}

    def decode(self, token_ids: list[int], **options: bool) -> str:
        return "".join(chr(97 + token % 26) for token in token_ids)


def finished_call(tokenizer: Letters | None = None) -> Call:
    params = SamplingParams(temperature=0.5, max_new_tokens=3)
    request = Request("r-0", tuple([7] * 3000), params, seed=0, stop_ids=frozenset())
    one = Generation(request, tokenizer, Place("r", 0, 0), stream=False)
    one.apply(Advance("r-0", [1, 2, 3], [2], [1], 9, 16, FinishReason("length", length=3)))
    return Call([one], False, lambda rids: None)


@pytest.fixture
def requests_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("forerun.requests")
    yield logger
    logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize("tokenizer", [Letters(), None])
@pytest.mark.parametrize("level", [None, 0, 1, 2, 3])
def test_details_are_logged_where_asked_for(
    level: int | None,
    tokenizer: Letters | None,
    caplog: pytest.LogCaptureFixture,
    requests_logger: logging.Logger,
) -> None:
    text = TextService(tokenizer)
    exchange = Exchange("id", calls=[finished_call(tokenizer)], status=200)
    asyncio.run(RequestLog(text, level).ended(exchange, "POST", "/generate", None))
    text.close()
    events = [record.msg for record in caplog.records if isinstance(record.msg, Event)]
    if level is None:  # like other messages of its level: off by default
        assert events == []
        return
    line, *details = (event.fields for event in events)
    assert line["prompt_tokens"] == 3000
    assert line["completion_tokens"] == 3
    assert line["accept_length"] == 3.0
    assert len(details) == (level >= 1)
    for fields in details:
        assert fields["sampling_params"] == {"temperature": 0.5, "max_new_tokens": 3}
        assert ("prompt" in fields) == ("output" in fields) == (level >= 2)
        if level >= 2:
            assert fields["output"] == ("bcd" if tokenizer else [1, 2, 3])
            assert len(fields["prompt"]) == (2048 if level == 2 else 3000)


def test_both_formats() -> None:
    fields = {"path": '/a\nb "c"', "seconds": 0.1234567, "rid": "x y", "none": None, "n": 3}
    shown = str(Event("request", fields))
    assert shown == r'request path="/a\nb \"c\"" seconds=0.123457 rid="x y" none=None n=3'
    record = logging.LogRecord("forerun", logging.INFO, "", 0, Event("request", fields), (), None)
    line = json.loads(JsonFormatter().format(record))
    assert {name: line[name] for name in fields} == fields
    assert line["message"] == "request"
    assert line["time"].endswith("+00:00")
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        caught = (type(error), error, error.__traceback__)
    record = logging.LogRecord("forerun", logging.ERROR, "", 0, "%d failed", (2,), caught)
    text = JsonFormatter().format(record)
    assert "\n" not in text
    assert json.loads(text)["message"] == "2 failed"
    assert "ValueError: two\nlines" in json.loads(text)["exception"]


def test_request_ids() -> None:
    assert request_id("abc-1/2") == "abc-1/2"
    for bad in (None, "", "a b", "a\nb", "é", "x" * 129):
        assert len(request_id(bad)) == 32


def test_settings() -> None:
    with pytest.raises(ConfigError, match="log_format must be plain or json, got 'xml'"):
        ServerSettings(log_format="xml")
    with pytest.raises(ConfigError, match="log_requests_level"):
        ServerSettings(log_requests_level=4)


# --- spans ----------------------------------------------------------------------------------------

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize("given", [True, False])
def test_spans_continue_the_trace_of_the_caller(
    given: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Caller → server → request in the engine, which got the context in its message."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from forerun.engine.tracing import Tracing
    from forerun.server.engines.messages import NewRequest, Submit, decode_to_engine, encode
    from forerun.server.tracing import ServerTracing

    caplog.set_level(logging.INFO, "forerun.requests")
    memory, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    engine = Tracing(provider)
    request = Request("r", (1,), SamplingParams(), seed=0, stop_ids=frozenset())

    async def app(scope: Any, receive: Any, send: Any) -> None:
        new = NewRequest("r", [1], SamplingParams(), current_exchange.get().trace_context)
        message = decode_to_engine(encode(Submit([new])))
        engine.open(request, message.requests[0].trace_context)
        engine.close(request)
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    headers = [(b"traceparent", f"00-{TRACE}-{CALLER}-01".encode()), (b"tracestate", b"a=b")]
    sent: list[Any] = []
    asyncio.run(ask(app, sent, headers if given else [], ServerTracing(provider)))
    inner, outer = memory.get_finished_spans()
    assert (inner.name, outer.name) == ("request", "POST other")
    assert inner.parent.span_id == outer.context.span_id
    assert inner.context.trace_id == outer.context.trace_id
    assert outer.attributes["http.response.status_code"] == 503
    assert not outer.status.is_ok
    (line,) = (record.msg.fields for record in caplog.records if isinstance(record.msg, Event))
    assert line["trace_id"] == f"{outer.context.trace_id:032x}"
    names = {name for name, _ in sent[0]["headers"]}
    assert b"x-request-id" in names
    if given:
        assert f"{outer.context.trace_id:032x}" == TRACE
        assert f"{outer.parent.span_id:016x}" == CALLER
        assert outer.context.trace_state.get("a") == inner.context.trace_state.get("a") == "b"
    else:
        assert outer.parent is None


async def ask(app: Any, sent: list[Any], headers: Any, tracing: Any) -> None:
    """One request to an application within `Observe`."""

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/x",
        "scheme": "http",
        "headers": headers,
        "client": None,
    }
    metrics, text = ServerMetrics(), TextService(None)
    await Observe(app, metrics, RequestLog(text, None), tracing)(scope, None, send)
    text.close()
    assert metrics.responses == {("other", 503): 1}
