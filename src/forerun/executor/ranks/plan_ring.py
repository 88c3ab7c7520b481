"""A broadcast ring buffer in shared memory: messages from one process to several on its machine.

A message is written once, however many processes read it. Long ones take several slots. Each
reader counts the slots that it has read, and the writer waits before it overwrites one that is
still to be read.

Memory order: the stores of a slot may reach another core in any order (Arm). So a slot has a
number and a checksum: a reader takes it if the number is the next one and the checksum is right.

Waiting: a reader looks at the ring for a while, if its core has nothing better to do. Then it sets
a flag, by which the writer knows that it has to send a WAKE over the reader's pipe. Each of them
stores (the flag, a slot) before it loads what the other has stored, which every CPU may reorder,
so both may miss it. The reader therefore looks until its flag has long been visible, and blocks
only then.

The memory has no name in the file system, so nothing is left there, however the processes end.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import time
import zlib
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

SLOTS = 8
SLOT_BYTES = 64 << 10
WAKE = b""
VISIBLE_SECONDS = 2e-5  # far more than a store takes to reach the other cores

WORD = 8  # bytes; loads and stores of aligned words are atomic
# Words of a reader's cache line.
READ, SLEEPS, READER_WORDS = 0, 1, 8
# Words of a slot before its body. MARK: its number * 2, + 1 if the message goes on in the next.
MARK, LENGTH, CHECKSUM, HEADER_WORDS = 0, 1, 2, 3
BODY_BYTES = SLOT_BYTES - WORD * HEADER_WORDS


class PlanRing:
    """The memory. A process gets it as an argument when it is started."""

    def __init__(self, readers: int) -> None:
        self.readers = readers
        size = WORD * READER_WORDS * readers + SLOT_BYTES * SLOTS
        # A deleted file that is mapped, and whose descriptor `spawn` hands on.
        self.memory = multiprocessing.get_context("spawn").RawArray(ctypes.c_char, size)

    def bytes(self) -> memoryview:
        return memoryview(self.memory).cast("B")

    def slot(self, number: int) -> int:
        """The index of its first word. Numbers begin at 1, since the memory is zeros at first."""
        return READER_WORDS * self.readers + number % SLOTS * (SLOT_BYTES // WORD)


class RingWriter:
    """One thread at a time writes."""

    def __init__(
        self, ring: PlanRing, pipes: Sequence[Connection], wait: Callable[[], None]
    ) -> None:
        """
        Args:
            pipes: to the readers.
            wait: called again and again while the ring is full. Raises if a reader has ended.
        """
        self._ring, self._pipes, self._wait = ring, pipes, wait
        self._bytes = ring.bytes()
        self._words = self._bytes.cast("Q")
        self._lines = range(0, READER_WORDS * ring.readers, READER_WORDS)
        self._next = 1

    def send(self, message: bytes) -> None:
        """Waits while the ring is full."""
        rest = memoryview(message)
        while len(rest) > BODY_BYTES:
            self._write(rest[:BODY_BYTES], goes_on=True)
            rest = rest[BODY_BYTES:]
        self._write(rest, goes_on=False)

    @property
    def is_full(self) -> bool:
        return self._next - min(self._words[line + READ] for line in self._lines) > SLOTS

    def _write(self, body: memoryview, goes_on: bool) -> None:
        while self.is_full:
            self._wait()
        words, slot = self._words, self._ring.slot(self._next)
        mark = 2 * self._next + goes_on
        begin = WORD * (slot + HEADER_WORDS)
        self._bytes[begin : begin + len(body)] = body
        words[slot + LENGTH] = len(body)
        words[slot + CHECKSUM] = _checksum(mark, body)
        words[slot + MARK] = mark
        self._next += 1
        for line, pipe in zip(self._lines, self._pipes, strict=True):
            if words[line + SLEEPS]:
                _wake(pipe)


class RingReader:
    """One of the readers, in its process."""

    spin_seconds = 0.0  # for which `receive` keeps looking before it sleeps

    def __init__(self, ring: PlanRing, index: int, pipe: Connection) -> None:
        """`pipe`: from the writer, for its WAKE messages only."""
        self._ring, self._pipe = ring, pipe
        self._bytes = ring.bytes()
        self._words = self._bytes.cast("Q")
        self._line = READER_WORDS * index
        self._next = 1
        self._parts: list[bytes] = []  # of a message that goes on

    def take(self) -> bytes | None:
        """The next message, if it has arrived."""
        words, goes_on = self._words, True
        while goes_on:
            slot = self._ring.slot(self._next)
            mark, begin = words[slot + MARK], WORD * (slot + HEADER_WORDS)
            if mark >> 1 != self._next:
                return None
            body = bytes(self._bytes[begin : begin + words[slot + LENGTH]])
            if _checksum(mark, body) != words[slot + CHECKSUM]:
                return None  # stores are still on their way
            words[self._line + READ] = self._next
            self._next += 1
            self._parts.append(body)
            goes_on = bool(mark & 1)
        message = b"".join(self._parts)
        self._parts.clear()
        return message

    def receive(self) -> bytes:
        """Waits for the next message.

        Raises:
            EOFError, OSError: the writer has ended.
        """
        end = time.perf_counter() + self.spin_seconds
        while (message := self.take()) is None:
            if time.perf_counter() >= end:
                return self._sleep()
        return message

    def _sleep(self) -> bytes:
        """`receive`, for one that no longer looks all the time."""
        while self._pipe.poll():
            self._pipe.recv_bytes()  # a WAKE that was not needed: the pipe must not fill up
        self._words[self._line + SLEEPS] = 1
        visible = time.perf_counter() + VISIBLE_SECONDS
        while True:
            is_visible = time.perf_counter() > visible  # the flag
            if (message := self.take()) is not None:
                break
            if is_visible:
                self._pipe.recv_bytes()
        self._words[self._line + SLEEPS] = 0
        return message


def _checksum(mark: int, body: bytes | memoryview) -> int:
    return zlib.crc32(body, mark & 0xFFFFFFFF)


def _wake(pipe: Connection) -> None:
    try:
        pipe.send_bytes(WAKE)
    except OSError:
        return  # the reader has ended: who waits for its answers learns of it
