"""Below HTTP's semantics: heads without end, bytes behind a request, clients that do not read."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from forerun.server.http import limits, protocol
from forerun.server.http.errors import json_response
from forerun.server.http.limits import LimitBody
from forerun.server.http.protocol import LimitedProtocol
from tests.server.malformed import Seen, requests, send_all
from tests.server.processes import held
from tests.server.support import LONG, PROMPT, LiveServer, wait_for
from tests.server.wire import Answer, Wire, fetch, post, request

GREEDY = {"temperature": 0.0, "max_new_tokens": 8}
BODY = {"text": PROMPT, "sampling_params": GREEDY}
STREAM = {"text": PROMPT, "sampling_params": LONG, "stream": True}


def refusal(answer: Answer) -> str:
    """The message, after a look at its shape."""
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["connection"] == "close"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


def on(server: LiveServer, use: Callable[[Wire], Awaitable[Any]]) -> Any:
    """The value of a coroutine with a connection."""

    async def used() -> Any:
        async with asyncio.timeout(30), Wire(server.url) as wire:
            return await use(wire)

    return asyncio.run(used())


def hold_refused(server: LiveServer, raw: bytes, status: int, message: str) -> None:
    """With a part of the message; then the connection is closed."""

    async def refused(wire: Wire) -> None:
        await wire.send(raw)
        answer = await wire.answer()
        assert answer.status == status
        assert message in refusal(answer)
        assert await wire.closed(5)

    on(server, refused)


# --- what cannot be read --------------------------------------------------------------------------


def test_malformed_requests_of_all_kinds(server: LiveServer) -> None:
    """A part of what `python -m tests.server.malformed` sends."""
    server.wait_idle()
    before = held(server.process.pid)
    source, seen = requests(7), Seen()
    asyncio.run(send_all(server.url, [next(source) for _ in range(200)], seen))
    assert not seen.problems
    assert len(seen.refusals) > 100
    server.wait_idle()
    assert held(server.process.pid).files <= before.files + 1  # this client's own connection
    assert server.get("/server_info")["engine_restarts"] == 0
    assert "Traceback" not in server.output


GARBAGE = (b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\nno colon\r\n\r\n", b"\x00" * 50)


@pytest.mark.parametrize("raw", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_refused_as_everything_else_is(server: LiveServer, raw: bytes) -> None:
    hold_refused(server, raw, 400, "not a valid HTTP request")


def heads() -> list[bytes]:
    one = b"GET /health HTTP/1.1\r\nHost: x\r\n"
    return [
        one + b"X-Long: " + b"x" * 100_000 + b"\r\n\r\n",
        one + b"".join(b"X-%d: x\r\n" % i for i in range(10_000)) + b"\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ]


@pytest.mark.parametrize("raw", heads(), ids=("header", "headers", "path"))
def test_large_heads_are_refused(server: LiveServer, raw: bytes) -> None:
    hold_refused(server, raw, 431, "65536 bytes")
    fits = request("GET", "/health", X_Long="x" * 60_000)
    assert asyncio.run(fetch(server.url, fits)).status == 200


def test_a_head_without_end_is_not_kept(server: LiveServer) -> None:
    """Parts of one name, each below the limit."""

    async def endless(wire: Wire) -> Answer:
        await wire.send(b"GET /health HTTP/1.1\r\n")
        for _ in range(6):
            await asyncio.sleep(0.02)  # each is read by itself
            await wire.send(b"x" * 15_000)
        return await wire.answer()

    assert on(server, endless).status == 431


def test_a_large_body_does_not_count_as_a_head(server: LiveServer) -> None:
    async def several(wire: Wire) -> None:
        """Of different sizes, on one connection, in parts of any size."""
        for size in (10, 200_000, 5, 70_000):
            raw = post("/tokenize", {"prompt": "x " * (size // 2)})
            for at in range(0, len(raw), 50_001):
                await wire.send(raw[at : at + 50_001])
            answer = await wire.answer()
            assert answer.status in (200, 400)
            assert "connection" not in answer.headers

    on(server, several)


# --- bytes behind a request -----------------------------------------------------------------------


@pytest.mark.parametrize("more", [b"garbage \x00\r\n\r\n", post("/generate", BODY), b"\r\n" * 9])
def test_a_request_with_bytes_behind_it_is_answered(server: LiveServer, more: bytes) -> None:
    want = server.generate(**BODY)["output_ids"]

    async def pipelined(wire: Wire) -> None:
        await wire.send(post("/generate", BODY) + more)
        answer = await wire.answer()
        assert answer.json()["output_ids"] == want
        assert await wire.closed(5 if more.strip() else 0.1) is bool(more.strip())

    on(server, pipelined)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_pipelines_and_leaves_ends_its_request(
    server: LiveServer, stream: bool
) -> None:
    async def leave(wire: Wire) -> None:
        body = {**STREAM, "stream": stream}
        await wire.send(post("/generate", body) + post("/generate", body))
        while not (await load(server))["num_running_reqs"]:
            await asyncio.sleep(0.01)

    on(server, leave)
    started = time.monotonic()
    server.wait_idle(5)
    assert time.monotonic() - started < 1.0


async def load(server: LiveServer) -> dict[str, Any]:
    return dict((await fetch(server.url, request("GET", "/v1/loads"))).json())


# --- clients that read slowly, or leave -----------------------------------------------------------


@pytest.mark.exhaustive
def test_a_client_that_does_not_read_blocks_nobody(server: LiveServer) -> None:
    """Its stream is larger than what the kernel keeps for it; it gets all of it later."""
    params = {**LONG, "max_new_tokens": 500}
    large = {"return_logprob": True, "top_logprobs_num": 20}
    body = {"text": PROMPT, "sampling_params": params, "stream": True}
    want = server.generate(text=PROMPT, sampling_params=params)["output_ids"]
    short = server.generate(**BODY)["output_ids"]

    async def read_late() -> None:
        async with asyncio.timeout(100), Wire(server.url, receive_buffer=4096) as slow:
            await slow.send(post("/generate", {**body, **large}))
            answer = await slow.head()
            while True:  # it runs to its end meanwhile
                others = await asyncio.gather(
                    *(fetch(server.url, post("/generate", BODY)) for _ in range(3))
                )
                assert [other.json()["output_ids"] for other in others] == [short] * 3
                if not (await load(server))["num_running_reqs"]:
                    break
            data = b"".join([piece async for piece in slow.pieces(answer)])
        events = data.removesuffix(b"\n\n").split(b"\n\n")
        assert events[-1] == b"data: [DONE]"
        last = json.loads(events[-2].removeprefix(b"data: "))
        assert last["output_ids"] == want
        # Not one per step: what it had not read became one larger event.
        assert len(events) < last["meta_info"]["spec_verify_ct"] / 2

    asyncio.run(read_late())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request_at_once(server: LiveServer, stream: bool) -> None:
    async def leave(wire: Wire) -> None:
        await wire.send(post("/generate", {**STREAM, "stream": stream}))
        while not (await load(server))["num_running_reqs"]:
            await asyncio.sleep(0.01)

    on(server, leave)
    started = time.monotonic()
    server.wait_idle(5)
    assert time.monotonic() - started < 1.0


# --- connections on which nothing happens ---------------------------------------------------------


def serve(use: Callable[[str], Awaitable[Any]]) -> Any:
    """The value of a coroutine with the URL of an application that returns its bodies."""

    async def echo(scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        await json_response({"bytes": len(body)})(scope, receive, send)

    async def served() -> Any:
        app = LimitBody(ExceptionMiddleware(echo), 10**6)
        config = uvicorn.Config(app, log_config=None, ws="none")  # as in service
        config.load()
        state = ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: LimitedProtocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
        )
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await use(f"http://127.0.0.1:{port}")

    return asyncio.run(served())


def test_connections_without_a_request_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)

    async def wait(url: str) -> None:
        async with Wire(url) as silent, Wire(url) as begun, Wire(url) as used:
            await begun.send(b"GET / HT")
            await used.send(request("POST", "/", b"abc"))
            assert (await used.answer()).json() == {"bytes": 3}
            answer = await begun.answer()
            assert answer.status == 408
            assert "did not come within" in refusal(answer)
            assert await silent.closed(1)
            # Between two requests it may take longer.
            await asyncio.sleep(0.5)
            await used.send(request("POST", "/", b"abcd"))
            assert (await used.answer()).json() == {"bytes": 4}
            await used.send(b"POST / H")
            assert (await used.answer()).status == 408

    serve(wait)


def test_a_body_that_stops_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.3)
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)

    async def stop(url: str) -> None:
        raw = request("POST", "/", b"x" * 40)
        async with Wire(url) as slow, Wire(url) as stopped:
            await stopped.send(raw[:-1])
            for at in range(0, len(raw), 8):  # longer than the limit, but it goes on
                await slow.send(raw[at : at + 8])
                await asyncio.sleep(0.06 if at > len(raw) - 60 else 0)
            assert (await slow.answer()).json() == {"bytes": 40}
            answer = await stopped.answer()
            assert answer.status == 408
            assert b"The body stopped" in answer.body
            assert await stopped.closed(1)

    serve(stop)


def test_a_body_that_drips_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WHOLE_BODY_SECONDS", 0.3)

    async def drip(url: str) -> None:
        raw = request("POST", "/", b"x" * 40)
        async with Wire(url) as slow:
            await slow.send(raw[:-40])
            for _ in range(4):
                await slow.send(b"x")
                await asyncio.sleep(0.06)
            answer = await slow.answer()
            assert answer.status == 408
            assert b"did not come within" in answer.body

    serve(drip)


# --- what is not plain HTTP/1.1 -------------------------------------------------------------------

UPGRADE = {"Connection": "Upgrade, HTTP2-Settings", "HTTP2_Settings": "AAMAAABkAARAAAAAAAIAAAAA"}


@pytest.mark.parametrize("protocol_name", ["h2c", "websocket"])
def test_upgrades_are_not_taken(protocol_name: str) -> None:
    """The parser would read nothing more on such a connection."""

    async def upgrade(url: str) -> None:
        async with Wire(url) as wire:
            await wire.send(request("GET", "/", Upgrade=protocol_name, **UPGRADE))
            answer = await wire.answer()
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert await wire.closed(1)

    serve(upgrade)


def test_the_host_of_a_whole_url_counts(server: LiveServer) -> None:
    """Not the header's; for health there is no check."""
    for url, status in (
        ("http://evil.example.com/page.css", 403),
        ("http://user@localhost/page.css", 400),
        ("HTTP://LOCALHOST:1/page.css", 200),
        ("http://evil.example.com/health", 200),
    ):
        assert asyncio.run(fetch(server.url, request("GET", url))).status == status
    header = request("GET", "http://localhost/page.css", Host="evil.example.com")
    assert asyncio.run(fetch(server.url, header)).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_half_closed_connection_gets_its_answer(server: LiveServer, stream: bool) -> None:
    want = server.generate(**BODY)

    async def half(wire: Wire) -> None:
        await wire.send(post("/generate", {**BODY, "stream": stream}))
        wire.end()
        answer = await wire.head()
        while answer.status == 100:
            answer = await wire.head()
        body = b"".join([piece async for piece in wire.pieces(answer)])
        last = body.split(b"\n\n")[-3].removeprefix(b"data: ") if stream else body
        assert json.loads(last)["output_ids"] == want["output_ids"]
        assert await wire.closed(5)

    on(server, half)


def test_a_half_closed_connection_that_is_reset_ends_its_request(server: LiveServer) -> None:
    async def leave(wire: Wire) -> None:
        await wire.send(post("/generate", {**STREAM, "stream": False}))
        while not (await load(server))["num_running_reqs"]:
            await asyncio.sleep(0.01)
        wire.end()
        assert (await wire.head()).status == 100
        assert (await load(server))["num_running_reqs"]

    on(server, leave)
    started = time.monotonic()
    server.wait_idle(5)
    assert time.monotonic() - started < 1.5


def test_a_stream_that_its_client_left_is_logged_as_499(server: LiveServer) -> None:
    async def leave(wire: Wire) -> None:
        await wire.send(post("/generate", STREAM, X_Request_Id="leaves-its-stream"))
        await wire.head()

    on(server, leave)

    def status() -> int | None:
        """In the log; it comes just after the end."""
        lines = [line for line in server.lines if '"leaves-its-stream"' in line]
        return json.loads(lines[0])["status"] if lines else None

    assert wait_for(status, 5) == 499
