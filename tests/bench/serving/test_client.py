"""What the client reports is what the server did: exact, because the clock is virtual."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from forerun_bench.serving.backends import RequestOptions, make_backend
from forerun_bench.serving.client import Client, Live, Outcome
from forerun_bench.serving.dataset import Prompt
from forerun_bench.serving.http import Endpoint, RequestFailed, error_message, fetch
from tests.bench.serving.stand_in import StandIn, virtually

BACKENDS = ("sglang", "openai", "openai-chat")
OPTIONS = RequestOptions(model="m", stream=True, ignore_eos=True, extra={})


def ask(
    server: StandIn,
    backend: str = "sglang",
    output_len: int = 8,
    options: RequestOptions = OPTIONS,
    timeout: float = 60.0,
) -> Outcome:
    """One request to a fresh server, in virtual time."""

    async def work() -> Outcome:
        listening = await server.start()
        async with listening:
            api = make_backend(backend)
            endpoint = Endpoint.parse(server.url, "key", timeout)
            client = Client(endpoint, api, options.stream)
            body = json.dumps(api.body(Prompt("Hello", output_len), options)).encode()
            return await client.send(body, 0.0, Live(total=1))

    return virtually(work)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("per_chunk", [1, 4])
def test_times_and_tokens_are_the_servers(backend: str, per_chunk: int) -> None:
    server = StandIn(first=0.25, gap=0.0625, per_chunk=per_chunk)
    outcome = ask(server, backend)
    assert outcome.failure is None
    assert outcome.chunk_times == server.written[0]
    assert outcome.sent == server.arrived[0]
    chunks = 8 // per_chunk
    assert outcome.ttft == pytest.approx(0.25)
    assert outcome.e2e == pytest.approx(0.25 + 0.0625 * (chunks - 1))
    assert outcome.tpot == pytest.approx(0.0625 * (chunks - 1) / 7)
    assert outcome.chunk_tokens == [per_chunk] * chunks
    assert (outcome.output_tokens, outcome.prompt_tokens) == (8, 7)
    assert outcome.counted and outcome.tokens_by_chunk


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_chunks_whose_tokens_the_server_does_not_tell(backend: str) -> None:
    outcome = ask(StandIn(per_chunk=4, say_tokens=False), backend)
    assert outcome.chunk_tokens == [0, 0]
    assert outcome.output_tokens == 8 and outcome.counted
    assert not outcome.tokens_by_chunk


def test_a_server_without_usage_is_counted_by_its_ids() -> None:
    options = RequestOptions("m", True, True, {"stream_options": None})
    outcome = ask(StandIn(per_chunk=4), "openai", options=options)
    assert (outcome.output_tokens, outcome.counted) == (8, False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_streaming_there_is_only_the_end(backend: str) -> None:
    options = RequestOptions("m", stream=False, ignore_eos=True, extra={})
    outcome = ask(StandIn(first=0.25, gap=0.0625), backend, options=options)
    assert outcome.failure is None
    assert outcome.e2e == pytest.approx(0.25 + 7 * 0.0625)
    assert outcome.output_tokens == 8


# How the server fails, and what it is counted as.
FAULTS = {
    "429": "HTTP 429",
    "500": "HTTP 500",
    "hang up": "connection closed early",
    "oops\n": "malformed stream",
    "data: {\n\n": "malformed stream",
    "data: [1]\n\n": "malformed stream",
    "data: \udcff\n\n".encode("utf-8", "surrogateescape").decode("latin-1"): "malformed stream",
    "data: {}\n\n": "malformed stream",  # no choices, no meta_info
    ": bye\n\n": "malformed stream",  # no [DONE]
    "data: [DONE]\n\ndata: [DONE]\n\n": "malformed stream",
    'data: {"error": {"message": "out of memory"}}\n\n': "error event",
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_failures_have_a_kind(backend: str, fault: str) -> None:
    outcome = ask(StandIn(faults={0: fault}), backend)
    assert outcome.failure is not None
    assert outcome.failure.kind == FAULTS[fault]


def test_an_error_event_keeps_its_message() -> None:
    fault = 'data: {"error": {"message": "out of memory", "code": 500}}\n\n'
    assert str(ask(StandIn(faults={0: fault})).failure) == "error event: out of memory"


def test_a_slow_answer_times_out() -> None:
    outcome = ask(StandIn(first=5.0), timeout=2.0)
    assert str(outcome.failure) == "timeout: no complete answer in 2 s"
    assert outcome.e2e == pytest.approx(2.0)


def test_no_tokens_are_a_failure() -> None:
    outcome = ask(StandIn(per_chunk=9))  # of 8 tokens: no chunk
    assert outcome.failure is not None and outcome.failure.kind == "no output"


def test_nobody_listens() -> None:
    async def work() -> Outcome:
        server = StandIn()
        listening = await server.start()
        listening.close()
        await listening.wait_closed()
        client = Client(Endpoint.parse(server.url, None, 60.0), make_backend("sglang"), True)
        return await client.send(b"{}", 0.0, Live(total=1))

    failure = virtually(work).failure
    assert failure is not None and failure.kind == "no connection"


def raw(answer: bytes) -> Any:
    """What `fetch` makes of a server that writes these bytes and closes."""

    async def work() -> Any:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            writer.close()

        listening = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with listening:
            port = listening.sockets[0].getsockname()[1]
            return await fetch(Endpoint.parse(f"http://127.0.0.1:{port}", None, 60.0), "GET", "/")

    return virtually(work)


def test_answers_end_by_length_by_chunks_or_by_closing() -> None:
    assert raw(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi").body == b"hi"
    assert raw(b"HTTP/1.1 200 OK\r\n\r\nhi").body == b"hi"
    chunked = b"HTTP/1.1 404 no\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"
    assert (raw(chunked).status, raw(chunked).body) == (404, b"hi")
    assert (
        raw(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").body
        == b""
    )


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", "connection closed early"),
        (HEAD + b"content-length: 5\r\n\r\nhi", "connection closed early"),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi",
            "connection closed early",
        ),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "malformed HTTP"),
    ],
)
def test_answers_that_are_cut_or_not_http(answer: bytes, kind: str) -> None:
    with pytest.raises(RequestFailed) as caught:
        raw(answer)
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too  long", "type": "x"}}', "too long"),
        (b'{"error": "busy"}', "busy"),
        (b'{"detail": "not found"}', '{"detail": "not found"}'),
        (b"[1]", "[1]"),
        (b"<html>\n\xff", "<html> \ufffd"),
        (b"", ""),
    ],
)
def test_the_message_of_an_error(body: bytes, message: str) -> None:
    assert error_message(body) == message


def test_the_key_and_the_path_of_the_url_are_sent() -> None:
    server = StandIn()
    ask(server)
    (head,) = server.headers
    assert b"authorization: bearer key\r\n" in head.lower()
    endpoint = Endpoint.parse("https://example.org/llm/v1/", None, 1.0)
    assert (endpoint.port, endpoint.prefix, endpoint.host) == (443, "/llm", "example.org")
    assert endpoint.tls is not None
    assert Endpoint.parse("http://[::1]:8000", None, 1.0).host == "::1"


def test_bodies() -> None:
    ids = Prompt((1, 2), 5)
    extra = {"sampling_params": {"top_p": 0.5}, "lora": "x"}
    options = RequestOptions("m", True, False, extra)
    body = make_backend("sglang").body(ids, options)
    assert body["input_ids"] == (1, 2) and "text" not in body
    assert body["sampling_params"] == {
        **{"temperature": 0.0, "max_new_tokens": 5, "ignore_eos": False, "top_p": 0.5}
    }
    assert body["lora"] == "x"
    body = make_backend("openai").body(ids, options)
    assert (body["prompt"], body["max_tokens"], body["model"]) == ((1, 2), 5, "m")
    assert body["ignore_eos"] is False
    body = make_backend("openai-chat").body(Prompt("hi", 5), options)
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert body["stream_options"] == {"include_usage": True}
