"""The ranks of another node, as node 0 reaches them: through the process that has joined.

Messages are a tag byte and a body, as those to a process (`messages.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import msgspec

from forerun.core.errors import ConfigError, ExecutorError
from forerun.executor.ranks.link import Link
from forerun.executor.ranks.local import NodeRanks, RankGone
from forerun.executor.ranks.messages import CLOSE, CLOSE_SECONDS, FAILED, REFUSED

START, GRAMMAR = b"s", b"G"  # to the node, besides those to its ranks
READY, ANSWER, GONE = b"i", b"g", b"e"  # from the node, besides REFUSED and FAILED


class Start(msgspec.Struct):
    """Body of `START`: all nodes have joined."""

    store_port: int  # on node 0, of the ranks' `meeting_point`
    overlap_depth: int | None


class RemoteRanks(NodeRanks):
    """A thread receives what the node sends."""

    def __init__(self, number: int, host: str, ranks: range, link: Link) -> None:
        """The node has joined. Until `start`, `lost` tells whether it is still there."""
        self.host = host
        self.lost: Exception | None = None
        self._name = f"Node {number} ({host}, {link.peer})"
        self._ranks, self._link = ranks, link
        self._ready = threading.Event()
        self._answers: SimpleQueue[bytes | None] = SimpleQueue()  # to grammars; None: no more
        self._on_end: Callable[[Exception], None] | None = None
        self._ending = threading.Lock()  # of `lost` and `_on_end`
        self._closed = False
        self._receiving = threading.Thread(target=self._receive, daemon=True)
        self._receiving.start()

    def start(self, start: Start, on_end: Callable[[Exception], None]) -> None:
        """Starts the ranks there. `on_end`: as of `LocalRanks`."""
        with self._ending:
            self._on_end = on_end
            lost = self.lost
        if lost is not None:
            on_end(lost)
            return
        self.send(START + msgspec.msgpack.encode(start))

    def wait_ready(self) -> None:
        self._ready.wait()
        if self.lost is not None:
            raise EOFError(str(self.lost))

    def send(self, message: bytes) -> None:
        if self.lost is not None:
            raise EOFError(str(self.lost))
        self._link.send_bytes(message)

    def send_grammar(self, message: bytes) -> None:
        self.send(GRAMMAR + message)

    def receive_grammar(self) -> bytes:
        answer = self._answers.get()
        if answer is None:
            raise EOFError(str(self.lost))
        return answer

    def kill(self, cause: Exception) -> None:
        """The node learns of the cause."""
        if self._closed:
            return
        self._closed = True
        tag = REFUSED if isinstance(cause, ConfigError) else FAILED
        self._last_message(tag + str(cause).encode())
        self._link.close()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._last_message(CLOSE)
        self._receiving.join(CLOSE_SECONDS)
        self._link.close()

    def _last_message(self, message: bytes) -> None:
        try:
            self.send(message)
        except (EOFError, OSError):
            return  # it is gone

    def _receive(self) -> None:
        """Body of the receiving thread."""
        try:
            while True:
                message = self._link.recv_bytes()
                tag, body = message[:1], message[1:]
                if tag == READY:
                    self._ready.set()
                elif tag == ANSWER:
                    self._answers.put(body)
                else:
                    self._end(self._error(tag, body.decode(errors="replace")))
                    return
        except (EOFError, OSError) as error:
            ranks = ", ".join(map(str, self._ranks))
            self._end(RankGone(f"{self._name}, ranks {ranks}: the connection is lost ({error})."))

    def _error(self, tag: bytes, text: str) -> Exception:
        """What the node says before it ends."""
        if tag == REFUSED:
            return ConfigError(f"{self._name}: {text}")
        kind = RankGone if tag == GONE else ExecutorError
        return kind(f"{self._name}: {text}")

    def _end(self, cause: Exception) -> None:
        with self._ending:
            self.lost = cause
            on_end = self._on_end
        self._ready.set()
        self._answers.put(None)
        if on_end is not None and not self._closed:
            on_end(cause)
