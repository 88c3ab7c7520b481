"""HTTP as uvicorn reads it with httptools, with limits on what a connection may cost.

uvicorn keeps any number of headers of any size, waits for them without end, and stops reading a
connection with a second request on it, so that it does not notice when the client leaves. It takes
a client that sends no more (a half-closed connection) for one that has left.
"""

from __future__ import annotations

import asyncio
import re
import socket

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from forerun.server.http.errors import ApiError

MAX_HEAD_BYTES = 1 << 16  # request line and headers
HEAD_SECONDS = 60.0  # from the connection, or the first byte of a request, to the end of its head
PROBE_SECONDS = 0.5  # between two looks whether the client of a half-closed connection is there


class _PipelinedRequest(Exception):
    """Another request begins on a connection whose last one is not answered yet."""


class _HeadTooLarge(Exception):
    """The request line and headers are."""


class LimitedProtocol(HttpToolsProtocol):
    """One connection. What cannot be read is refused in OpenAI's shape, and the connection closed.

    Bytes after a request that is being answered are not read as another one (pipelining): the
    connection closes after the answer, and meanwhile it is noticed if the client leaves.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _probe: asyncio.TimerHandle | None = None
    _in_head = False
    _head_bytes = 0  # of the parts that have been read
    _pending = 0  # bytes since the last part
    _received = 0  # bytes that came together
    _ignores_input = False  # nothing is read any more

    # --- uvicorn's callbacks: the connection ----------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._probe is not None:
            self._probe.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more: it has left, or it waits for its answer.

        TCP tells these apart once something is sent, so it gets a 100 (Continue) now and then
        before an answer that has not begun; who has left resets the connection. TLS has no
        half-closed connections, and HTTP/1.0 no 100: there it has left.
        """
        waits = self._unanswered and not self.cycle.more_body
        if self.scheme == "https" or not waits or self.scope["http_version"] != "1.1":
            return False
        self.cycle.keep_alive = False
        self._look()
        return True

    def data_received(self, data: bytes) -> None:
        if self._ignores_input:
            return
        self._received = len(data)
        super().data_received(data)
        if self._in_head and not self._ignores_input:
            self._pending += len(data)
            if self._pending > MAX_HEAD_BYTES:
                self._refuse(_head_too_large())

    def send_400_response(self, msg: str) -> None:
        """The bytes cannot be parsed, or a callback has raised an exception."""
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(_head_too_large())
        else:
            self._refuse(ApiError(400, "This is not a valid HTTP request."))

    # --- and of the parser ----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._unanswered:
            raise _PipelinedRequest
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self._read_part(0)
        if self._head_timer is None:
            self._wait_for_head()

    def on_url(self, url: bytes) -> None:
        self._read_part(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._read_part(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_waiting()
        self._name_host()
        super().on_headers_complete()
        if self.parser.should_upgrade():  # it is not, and the parser reads no other request
            self.cycle.keep_alive = False

    def _unsupported_upgrade_warning(self) -> None:
        """Any client could fill a disk with it."""

    # --- inside ---------------------------------------------------------------------------------

    @property
    def _unanswered(self) -> bool:
        """Whether a request is being answered, or its body read."""
        return self.cycle is not None and not self.cycle.response_complete

    def _name_host(self) -> None:
        """The host of a request with a whole URL is the URL's (RFC 9112, 3.2.2)."""
        _, scheme, rest = self.url.partition(b"://")
        if scheme and not self.url.startswith(b"/"):
            others = [header for header in self.headers if header[0] != b"host"]
            self.headers[:] = [(b"host", re.split(rb"[/?#]", rest, maxsplit=1)[0]), *others]

    def _look(self) -> None:
        """Ends a half-closed connection that has been reset."""
        if self.transport.is_closing():
            return
        peer: socket.socket = self.transport.get_extra_info("socket")
        if peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if not self.cycle.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._probe = self.loop.call_later(PROBE_SECONDS, self._look)

    def _read_part(self, size: int) -> None:
        self._head_bytes += size
        self._pending = -self._received
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _HeadTooLarge

    def _refuse(self, error: ApiError) -> None:
        """Closes the connection with an error, or after the answer that is being made."""
        self._ignores_input = True
        self._in_head = False
        self._stop_waiting()
        if not self._unanswered:
            self._write(error)
            self.transport.close()
        elif self.cycle.more_body:  # the rest of it will never come
            if not self.cycle.response_started:
                self._write(error)
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    def _write(self, error: ApiError) -> None:
        body = msgspec.json.encode(error.body())
        head = (
            f"HTTP/1.1 {error.status} {_PHRASES[error.status]}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._no_head)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _no_head(self) -> None:
        if self._in_head:
            message = f"The request line and headers did not come within {HEAD_SECONDS:.0f} s."
            self._refuse(ApiError(408, message))
        else:  # not a byte of them
            self.transport.close()


_PHRASES = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


def _head_too_large() -> ApiError:
    return ApiError(
        431, f"The request line and headers are larger than {MAX_HEAD_BYTES} bytes; send less."
    )
