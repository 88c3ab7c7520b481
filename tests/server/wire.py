"""HTTP/1.1 on a plain socket: requests as bytes, whole, malformed, cut off, or read slowly."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

JSON_TYPE = {"Content-Type": "application/json"}


def request(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """A request as it is sent; `_` in names of headers is written as `-`.

    Content-Length is added unless the caller says how long the body is.
    """
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    if not {"Content-Length", "Transfer-Encoding"} & names.keys():
        names["Content-Length"] = str(len(body))
    head = [
        f"{method} {path} HTTP/1.1",
        *(f"{k}: {v}" for k, v in {"Host": "localhost", **names}.items()),
    ]
    return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + body


def post(path: str, body: Any, **headers: str) -> bytes:
    """A POST with JSON."""
    data = json.dumps(body).encode()
    return request("POST", path, data, **{**JSON_TYPE, **headers})


@dataclass
class Answer:
    """What came back, and how many seconds after the request."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes = b""
    seconds: float = 0.0

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Wire:
    """One connection; an async context manager. `receive_buffer`: bytes that the kernel keeps."""

    url: str
    receive_buffer: int | None = None
    _reader: asyncio.StreamReader = field(init=False)
    _writer: asyncio.StreamWriter = field(init=False)
    _sent: float = 0.0

    async def __aenter__(self) -> Self:
        address = urlsplit(self.url)
        made = socket.socket()
        made.setblocking(False)
        limit = 2**16
        if self.receive_buffer is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.receive_buffer)
            limit = self.receive_buffer
        await asyncio.get_running_loop().sock_connect(made, (address.hostname, address.port))
        self._reader, self._writer = await asyncio.open_connection(sock=made, limit=limit)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._writer.transport.abort()

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()
        self._sent = time.monotonic()

    def end(self) -> None:
        """Sends no more; what comes can still be read."""
        self._writer.write_eof()

    async def head(self) -> Answer:
        """Status and headers.

        Raises:
            EOFError: the connection was closed instead.
        """
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.rstrip("\r\n").split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        status = int(first.split(" ", 2)[1])
        return Answer(status, headers, seconds=time.monotonic() - self._sent)

    async def pieces(self, answer: Answer, pause: float = 0.0) -> AsyncIterator[bytes]:
        """The body as it comes; `pause` seconds are waited before each piece is read.

        Raises:
            EOFError: the connection was closed too early.
        """
        if answer.headers.get("transfer-encoding") == "chunked":
            while size := int(await self._reader.readuntil(b"\r\n"), 16):
                await asyncio.sleep(pause)
                yield await self._reader.readexactly(size)
                await self._reader.readexactly(2)
            await self._reader.readexactly(2)
        elif length := int(answer.headers.get("content-length", "0")):
            await asyncio.sleep(pause)
            yield await self._reader.readexactly(length)

    async def answer(self) -> Answer:
        """The whole answer.

        Raises:
            EOFError: the connection was closed too early.
        """
        answer = await self.head()
        answer.body = b"".join([piece async for piece in self.pieces(answer)])
        answer.seconds = time.monotonic() - self._sent
        return answer

    async def closed(self, seconds: float) -> bool:
        """Whether the server closes the connection within some seconds."""
        try:
            async with asyncio.timeout(seconds):
                while await self._reader.read(2**16):
                    pass
        except TimeoutError:
            return False
        except ConnectionError:
            pass
        return True


async def fetch(url: str, data: bytes, seconds: float = 60.0) -> Answer:
    """The answer to one request on a connection of its own."""
    async with asyncio.timeout(seconds), Wire(url) as wire:
        await wire.send(data)
        return await wire.answer()
