"""A small server with known delays, and an event loop whose clock only moves when it is idle."""

from __future__ import annotations

import asyncio
import json
import selectors
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
GRACE = 0.002  # real seconds in which bytes on the loopback must arrive before the clock moves


class VirtualLoop(asyncio.SelectorEventLoop):
    """Waiting takes no real time, and computing takes no virtual time: delays are exact."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_VirtualSelector(self))

    def time(self) -> float:
        return self.now


class _VirtualSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        events = super().select(GRACE)
        if not events:
            self._loop.now += timeout
        return events


def virtually(work: Callable[[], Awaitable[T]]) -> T:
    async def main() -> T:
        return await work()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())


@dataclass
class StandIn:
    """Answers in every API it is asked in: the first chunk after `first` seconds, then one every
    `gap`, each of `per_chunk` tokens."""

    first: float = 0.25
    gap: float = 0.0625
    per_chunk: int = 1
    say_tokens: bool = True  # `token_ids` in every chunk (OpenAI)
    verify_ct: bool = False  # in meta_info
    faults: dict[int, str] = field(default_factory=dict)  # by request number, from 0
    routes: dict[str, tuple[int, Any]] = field(default_factory=dict)  # status, JSON or text
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[bytes] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    written: list[list[float]] = field(default_factory=list)  # times of chunks
    asked: list[tuple[float, str]] = field(default_factory=list)  # other requests
    port: int = 0

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ")[1].decode()
            lengths = [line for line in head.lower().split(b"\r\n") if b"content-length" in line]
            body = await reader.readexactly(int(lengths[0].partition(b":")[2])) if lengths else b""
            if path in ("/generate", "/v1/completions", "/v1/chat/completions"):
                self.headers.append(head)
                await self._generate(path, json.loads(body), writer)
            else:
                self._control(path, writer)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client went away
        finally:
            writer.close()

    def _control(self, path: str, writer: asyncio.StreamWriter) -> None:
        self.asked.append((asyncio.get_running_loop().time(), path))
        default = (200, {"data": [{"id": "stand-in"}]}) if path == "/v1/models" else (404, {})
        status, value = self.routes.get(path, default)
        if isinstance(value, list):  # one answer after the other
            status, value = value.pop(0)
        text = value if isinstance(value, str) else json.dumps(value)
        writer.write(_answer(status, text.encode()))

    async def _generate(
        self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        time = asyncio.get_running_loop().time
        number = len(self.bodies)
        self.bodies.append(body)
        self.arrived.append(time())
        self.written.append([])
        fault = self.faults.get(number)
        if fault is not None and fault.isdigit():
            writer.write(_answer(int(fault), b'{"error": {"message": "no"}}'))
            return
        chunks = list(self._chunks(path, body))
        if not body["stream"]:
            await asyncio.sleep(self.first + self.gap * (len(chunks) - 1))
            writer.write(_answer(200, _whole(path, body, len(chunks) * self.per_chunk)))
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        for index, chunk in enumerate(chunks):
            await asyncio.sleep(self.gap if index else self.first)
            if fault is not None and index == 1:
                if fault != "hang up":
                    writer.write(_piece(fault.encode()))
                    writer.write(b"0\r\n\r\n")
                return
            self.written[number].append(time())
            writer.write(_piece(b"data: " + json.dumps(chunk).encode() + b"\n\n"))
        if path != "/generate" and body.get("stream_options"):
            usage = _usage(len(chunks) * self.per_chunk, [])
            writer.write(_piece(b"data: " + usage + b"\n\n"))
        writer.write(_piece(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    def _chunks(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        wanted = body.get("max_tokens") or body["sampling_params"]["max_new_tokens"]
        for index in range(wanted // self.per_chunk):
            total = (index + 1) * self.per_chunk
            if path == "/generate":
                meta = {"prompt_tokens": 7, "completion_tokens": total, "cached_tokens": 2}
                if self.verify_ct:
                    meta["spec_verify_ct"] = index + 1
                yield {"text": "a" * total, "meta_info": meta}
            else:
                choice: dict[str, Any] = {"index": 0, "text": "a" * self.per_chunk}
                if "chat" in path:
                    choice = {"index": 0, "delta": {"content": "a" * self.per_chunk}}
                if self.say_tokens:
                    choice["token_ids"] = [5] * self.per_chunk
                yield {"choices": [choice]}


def _whole(path: str, body: dict[str, Any], tokens: int) -> bytes:
    if path == "/generate":
        meta = {"prompt_tokens": 7, "completion_tokens": tokens}
        return json.dumps({"text": "a", "meta_info": meta}).encode()
    choice = {"message": {"content": "a"}} if "chat" in path else {"text": "a"}
    return _usage(tokens, [choice])


def _usage(tokens: int, choices: list[dict[str, Any]]) -> bytes:
    usage = {"prompt_tokens": 7, "completion_tokens": tokens}
    return json.dumps({"choices": choices, "usage": usage}).encode()


def _answer(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


def _piece(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@contextmanager
def in_a_thread(server: StandIn) -> Iterator[StandIn]:
    """Real time, for tests of the whole command."""
    ready = threading.Event()
    stop: list[Callable[[], object]] = []

    async def serve() -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(ended.set))
        listening = await server.start()
        ready.set()
        await ended.wait()
        listening.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield server
    finally:
        stop[0]()
        thread.join(10)
