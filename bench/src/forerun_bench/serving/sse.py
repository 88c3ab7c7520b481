"""Server-sent events, from bytes as they arrive (WHATWG HTML, section 9.2)."""

from __future__ import annotations

from collections.abc import Iterator

from forerun_bench.serving.http import RequestFailed

MALFORMED = "malformed stream"
FIELDS = (b"event", b"id", b"retry")  # allowed and ignored
MAX_LINE = 64 << 20  # bytes


class EventParser:
    """Cuts a stream into the data of its events. Lines end with LF or CR LF."""

    def __init__(self) -> None:
        self._tail = b""  # of a line
        self._data: list[bytes] = []  # of the event that has begun

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of every event that `piece` completes.

        Raises:
            RequestFailed: a line that is none of the format's; a benchmark counts it as an error,
                where a browser would ignore it.
        """
        lines = (self._tail + piece).split(b"\n")
        self._tail = lines.pop()
        if len(self._tail) > MAX_LINE:
            raise RequestFailed(MALFORMED, f"a line of more than {MAX_LINE} bytes")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line:
                if self._data:
                    data, self._data = b"\n".join(self._data), []
                    yield data
            elif not line.startswith(b":") and line.partition(b":")[0] not in FIELDS:
                raise RequestFailed(MALFORMED, f"not a server-sent event: {line[:80]!r}")

    def close(self) -> None:
        """Call it at the end of the stream.

        Raises:
            RequestFailed: it ended within an event.
        """
        if self._tail.strip() or self._data:
            raise RequestFailed(MALFORMED, "the stream ended within an event")
