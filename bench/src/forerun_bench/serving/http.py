"""One HTTP/1.1 request on a connection of its own, and when every piece of the answer arrived.

h11 parses, asyncio's transport reads. h11 is what uvicorn and httpx parse with, so the base install
has it. On top of httpx a streamed chunk costs twice the CPU time (84 against 37 µs), and its time
would be taken only when the caller's task gets its turn; here it is taken when the event loop hands
over the bytes. Proxies, redirects and compression are not used.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import urlsplit

import h11

from forerun import __version__
from forerun.core.errors import ConfigError

CLOSED: Final = "connection closed early"
NO_CONNECTION: Final = "no connection"
TIMEOUT: Final = "timeout"
CONNECT_SECONDS: Final = 10.0  # for the first connection

Listener = Callable[[float, bytes], None]  # event-loop time, piece of the body


class RequestFailed(Exception):
    """A request without a complete answer. `kind` is what errors are counted by."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}" if message else kind)
        self.kind, self.message = kind, message


@dataclass(frozen=True)
class Endpoint:
    """A server. `address` is its IP address once known: names are not resolved under load."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    prefix: str  # of every path
    api_key: str | None
    timeout: float  # seconds, of a whole request
    address: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None, timeout: float) -> Endpoint:
        """
        Raises:
            ConfigError: not an http(s) URL.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise ConfigError(f"--base-url is not a URL: {url!r}.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--base-url must look like http://127.0.0.1:30000, got {url!r}.")
        secure = parts.scheme == "https"
        found = cls(
            host=parts.hostname,
            port=port or (443 if secure else 80),
            tls=ssl.create_default_context() if secure else None,
            prefix=parts.path.rstrip("/").removesuffix("/v1"),  # the paths have it
            api_key=api_key,
            timeout=timeout,
        )
        try:
            found.request("GET", "/", 0)
        except (h11.LocalProtocolError, UnicodeEncodeError):
            raise ConfigError(
                "--base-url or --api-key has characters that HTTP does not allow."
            ) from None
        return found

    async def connected(self) -> Endpoint:
        """With its address, from a first connection.

        Raises:
            ConfigError: nothing answers there.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                transport, _ = await loop.create_connection(asyncio.Protocol, self.host, self.port)
        except (OSError, UnicodeError) as error:  # TimeoutError; a name that cannot be one
            said = str(error) or "no answer"
            raise ConfigError(
                f"No server at {self.host}:{self.port} ({said}). Start it, or set --base-url."
            ) from None
        address = transport.get_extra_info("peername")[0]
        transport.abort()
        return replace(self, address=address)

    def request(self, method: str, path: str, length: int) -> h11.Request:
        """The head of a request with a body of `length` bytes."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        headers = [
            ("host", f"{host}:{self.port}"),
            ("user-agent", f"forerun/{__version__}"),
            ("accept", "text/event-stream, application/json"),
            ("content-type", "application/json"),
            ("content-length", str(length)),
            ("connection", "close"),
        ]
        if self.api_key is not None:
            headers.append(("authorization", f"Bearer {self.api_key}"))
        return h11.Request(method=method, target=self.prefix + path, headers=headers)


@dataclass(frozen=True, slots=True)
class Answer:
    """`body` is empty if a listener got it."""

    status: int
    body: bytes

    def need_ok(self) -> None:
        """
        Raises:
            RequestFailed: the status is not 200.
        """
        if self.status != 200:
            raise RequestFailed(f"HTTP {self.status}", error_message(self.body))


def error_message(body: bytes) -> str:
    """The message of an error body in OpenAI's shape; else the body, cut."""
    try:
        value = json.loads(body)
    except ValueError:
        value = None
    error = value.get("error") if isinstance(value, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    said = message if isinstance(message, str) else body[:400].decode("utf-8", "replace")
    return " ".join(said.split())[:400]


async def fetch(
    endpoint: Endpoint, method: str, path: str, body: bytes = b"", listener: Listener | None = None
) -> Answer:
    """Sends a request and waits for the end of the answer.

    Args:
        listener: gets the pieces of the body of a 200, as they arrive. It may raise RequestFailed,
            which ends the request.

    Raises:
        RequestFailed: no connection, no complete answer in time, or not HTTP.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Answer] = loop.create_future()
    head = endpoint.request(method, path, len(body))
    try:
        async with asyncio.timeout(endpoint.timeout):
            transport, _ = await loop.create_connection(
                lambda: _Exchange(head, body, done, listener),
                endpoint.address or endpoint.host,
                endpoint.port,
                ssl=endpoint.tls,
                server_hostname=endpoint.host if endpoint.tls else None,
            )
            try:
                return await done
            finally:
                transport.close()
    except TimeoutError:
        raise RequestFailed(TIMEOUT, f"no complete answer in {endpoint.timeout:g} s") from None
    except OSError as error:
        raise RequestFailed(NO_CONNECTION, str(error)) from None


class _Exchange(asyncio.Protocol):
    """Writes one request and reads its answer into `done`."""

    def __init__(
        self,
        head: h11.Request,
        body: bytes,
        done: asyncio.Future[Answer],
        listener: Listener | None,
    ) -> None:
        self._done, self._listener = done, listener
        self._time = asyncio.get_running_loop().time
        self._parser = h11.Connection(h11.CLIENT)
        events = (head, h11.Data(data=body), h11.EndOfMessage())
        self._message = b"".join(self._parser.send(event) or b"" for event in events)
        self._status = 0
        self._body = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        self._read(self._time(), data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._read(self._time(), b"")  # ends an answer without a length
        if not self._done.done():
            self._fail(RequestFailed(CLOSED, str(exc or "")))

    def _read(self, now: float, data: bytes) -> None:
        if self._done.done():
            return
        try:
            self._parser.receive_data(data)
            while not self._done.done():
                event = self._parser.next_event()
                if isinstance(event, h11.Data):
                    self._on_body(now, bytes(event.data))
                elif isinstance(event, h11.Response):
                    self._status = event.status_code
                elif isinstance(event, h11.EndOfMessage):
                    self._done.set_result(Answer(self._status, bytes(self._body)))
                elif not isinstance(event, h11.InformationalResponse):
                    return  # needs more bytes
        except h11.RemoteProtocolError as error:
            kind = CLOSED if not data else "malformed HTTP"
            self._fail(RequestFailed(kind, str(error)))
        except RequestFailed as error:
            self._fail(error)

    def _on_body(self, now: float, piece: bytes) -> None:
        if self._status == 200 and self._listener is not None:
            self._listener(now, piece)
        else:
            self._body += piece

    def _fail(self, error: RequestFailed) -> None:
        if not self._done.done():
            self._done.set_exception(error)
