"""Messages through shared memory, and what `LocalRanks` does when a rank no longer reads them."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.executor.ranks import local, plan_ring, rank
from forerun.executor.ranks.local import LocalRanks, Rank, RankGone, spawn
from forerun.executor.ranks.messages import CLOSE
from forerun.executor.ranks.plan_ring import (
    BODY_BYTES,
    CHECKSUM,
    HEADER_WORDS,
    LENGTH,
    MARK,
    SLEEPS,
    SLOTS,
    WAKE,
    WORD,
    PlanRing,
    RingReader,
    RingWriter,
)

SHARED = Path("/dev/shm")


class Pipe(Connection):
    """Stands in for the reader's end. `events`: what happens while it waits, one after the other,
    until a WAKE comes.
    """

    def __init__(self, *events: Callable[[], None]) -> None:
        self.events = list(events)

    def __del__(self) -> None: ...

    def poll(self, timeout: float | None = 0.0) -> bool:
        return False

    def recv_bytes(self, maxlength: int | None = None) -> bytes:
        self.events.pop(0)()
        return WAKE


def no_room() -> None:
    raise EOFError("full")


def one(pipe: Connection | None = None) -> tuple[PlanRing, RingWriter, RingReader]:
    """A writer and a reader in this process. `pipe`: the reader's end."""
    ring = PlanRing(1)
    sender, receiver = multiprocessing.Pipe()
    return ring, RingWriter(ring, [sender], no_room), RingReader(ring, 0, pipe or receiver)


def words(ring: PlanRing) -> memoryview:
    return ring.bytes().cast("Q")


# --- order and content --------------------------------------------------------------------------


@given(
    st.lists(
        st.one_of(st.integers(0, 40), st.sampled_from([BODY_BYTES - 1, BODY_BYTES, BODY_BYTES + 1]))
    ),
    st.integers(1, 3),
)
def test_every_reader_takes_every_message_once(sizes: list[int], count: int) -> None:
    ring = PlanRing(count)
    pipes = [multiprocessing.Pipe() for _ in range(count)]
    readers = [RingReader(ring, index, pipe[1]) for index, pipe in enumerate(pipes)]
    writer = RingWriter(ring, [pipe[0] for pipe in pipes], no_room)
    for number, size in enumerate(sizes):
        message = random.Random(number).randbytes(size)
        writer.send(message)
        assert [reader.take() for reader in readers] == [message] * count
        assert [reader.take() for reader in readers] == [None] * count


def read_all(connection: Connection, _: Connection, ring: PlanRing, index: int) -> None:
    """Body of a process: answers with a digest of what it has read."""
    reader, digest, number = RingReader(ring, index, connection), hashlib.sha256(), 0
    while (message := reader.receive()) != CLOSE:
        digest.update(b"%d %d " % (number, len(message)) + message)
        number += 1
        if index == 1 and number % 8 == 0:
            time.sleep(5e-4)  # it is slow: the ring gets full
    connection.send_bytes(digest.digest())


@pytest.mark.exhaustive
def test_processes_read_the_same_messages() -> None:
    """Also those of several slots, and of more than there are, after pauses and without."""
    ring, draw = PlanRing(3), random.Random(0)
    ends = [spawn(read_all, (ring, index)) for index in range(3)]
    writer = RingWriter(ring, [end[0] for end in ends], lambda: time.sleep(1e-4))
    digest = hashlib.sha256()
    for number in range(600):
        most = (SLOTS + 2) * BODY_BYTES if number % 100 == 7 else 3000
        message = draw.randbytes(draw.randint(2, most))
        digest.update(b"%d %d " % (number, len(message)) + message)
        writer.send(message)
        if number % 20 == 0:
            time.sleep(draw.choice([1e-4, 1e-3, 3e-3]))
    writer.send(CLOSE)
    for connection, _, process in ends:
        assert connection.recv_bytes() == digest.digest()
        process.join()


def test_a_slot_is_not_taken_before_all_of_it_has_arrived() -> None:
    """Its number may arrive first."""
    ring, writer, reader = one()
    writer.send(b"first")
    assert reader.take() == b"first"
    slot, memory = ring.slot(2), words(ring)
    before = bytes(ring.bytes())
    writer.send(b"second")
    after = memory[slot : slot + HEADER_WORDS].tolist()
    body = ring.bytes()[WORD * (slot + HEADER_WORDS) :]
    for missing in (LENGTH, CHECKSUM):
        memory[slot + missing] = before[WORD * (slot + missing)]
        assert reader.take() is None
        memory[slot + missing] = after[missing]
    body[3] ^= 1
    assert reader.take() is None
    body[3] ^= 1
    memory[slot + MARK] += 2  # another slot's number
    assert reader.take() is None
    memory[slot + MARK] -= 2
    assert reader.take() == b"second"


def test_a_number_that_arrives_before_the_next_body() -> None:
    """The slot still has the message of a round before, which is right in itself."""
    ring, writer, reader = one()
    for _ in range(SLOTS):
        writer.send(b"the same")
        assert reader.take() == b"the same"
    words(ring)[ring.slot(SLOTS + 1) + MARK] = 2 * (SLOTS + 1)
    assert reader.take() is None
    writer.send(b"the same")
    assert reader.take() == b"the same"


def test_the_writer_waits_for_the_slowest_reader() -> None:
    ring = PlanRing(2)
    pipes = [multiprocessing.Pipe() for _ in range(2)]
    quick, slow = (RingReader(ring, index, pipe[1]) for index, pipe in enumerate(pipes))
    taken = []
    writer = RingWriter(ring, [pipe[0] for pipe in pipes], lambda: taken.append(slow.take()))
    sent = [b"%d" % number for number in range(SLOTS + 3)]
    for message in sent:
        writer.send(message)
        assert quick.take() == message
    assert taken == sent[:3] and writer.is_full
    assert [slow.take() for _ in range(SLOTS)] == sent[3:]
    assert slow.take() is None and not writer.is_full


# --- waiting ------------------------------------------------------------------------------------


def test_a_sleeping_reader_is_woken() -> None:
    ring, writer, reader = one()
    with ThreadPoolExecutor(1) as threads:
        for message in (b"a", b"b" * 2 * BODY_BYTES, b"c"):
            received = threads.submit(reader.receive)
            while not words(ring)[SLEEPS]:
                time.sleep(1e-4)
            time.sleep(5e-3)  # so that it blocks
            writer.send(message)
            assert received.result(20) == message
            assert not words(ring)[SLEEPS]


def test_a_flag_that_the_writer_has_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader looks again, at the time at which its flag is surely visible, before it blocks."""
    ring, writer, reader = one(Pipe())  # which would raise
    memory, looks = words(ring), iter([0.0, 0.0, 0.0, 1.0])

    def clock() -> float:
        seconds = next(looks)
        if seconds == 1.0:  # after that it may block
            assert memory[SLEEPS]
            memory[SLEEPS] = 0
            writer.send(b"message")
            memory[SLEEPS] = 1
        return seconds

    monkeypatch.setattr(plan_ring, "time", SimpleNamespace(perf_counter=clock))
    assert reader.receive() == b"message"
    assert not memory[SLEEPS]


def test_a_wake_of_an_earlier_message() -> None:
    pipe = Pipe(lambda: None, lambda: None, lambda: writer.send(b"message"))
    _, writer, reader = one(pipe)
    assert reader.receive() == b"message"
    assert not pipe.events


def test_wakes_that_are_not_needed_do_not_fill_the_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader sets its flag, and then sees each message by itself."""
    sender, receiver = multiprocessing.Pipe()
    ring = PlanRing(1)
    writer, reader = RingWriter(ring, [sender], no_room), RingReader(ring, 0, receiver)

    def clock() -> float:
        if words(ring)[SLEEPS] and next(looks):
            writer.send(b"message")
        return 0.0

    looks = itertools.cycle([False, True])  # calls with the flag set: before it looks, and then
    monkeypatch.setattr(plan_ring, "time", SimpleNamespace(perf_counter=clock))
    for _ in range(20):
        assert reader.receive() == b"message"
    assert receiver.poll()
    receiver.recv_bytes()
    assert not receiver.poll()  # the others have been read


def test_a_reader_that_spins_needs_no_wake() -> None:
    pipe = Pipe()
    ring, writer, reader = one(pipe)
    reader.spin_seconds = 20.0
    sending = threading.Timer(0.01, writer.send, [b"message"])
    sending.start()
    assert reader.receive() == b"message"  # the pipe would raise
    sending.join()
    assert not words(ring)[SLEEPS]


def test_a_reader_ends_with_the_writer() -> None:
    ring = PlanRing(1)
    sender, receiver = multiprocessing.Pipe()
    reader = RingReader(ring, 0, receiver)
    sender.close()
    with pytest.raises(EOFError):
        reader.receive()


@pytest.mark.parametrize(
    ("device", "cores", "spins"),
    [("cuda", 6, True), ("cuda", 5, False), ("cpu", 64, False)],
)
def test_ranks_spin_on_idle_cores_only(
    device: str, cores: int, spins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank, "logical_cores", lambda: cores)
    assert (rank._spin_seconds(device, 2) > 0) == spins


# --- ranks that no longer read ------------------------------------------------------------------


def never_read(connection: Connection, _: Connection) -> None:
    """Body of a process."""
    while True:
        signal.pause()


class IdleRank(Rank):
    """A process that builds no executor; it reads nothing unless `body` does."""

    def __init__(self, number: int, body: Any = never_read, *args: Any) -> None:
        self.number = number
        self.connection, self.grammars, self.process = spawn(body, args)
        self._reading, self._error = threading.Lock(), None


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LocalRanks, SimpleQueue[Exception]]]:
    """Two ranks that do not read, and why they have ended."""
    monkeypatch.setattr(local, "CLOSE_SECONDS", 0.2)
    ends: SimpleQueue[Exception] = SimpleQueue()
    ranks = LocalRanks([IdleRank(0), IdleRank(1)], PlanRing(2), ends.put)
    yield ranks, ends
    ranks.close()
    assert all(rank.process.exitcode is not None for rank in ranks.ranks)


def fill(ranks: LocalRanks) -> None:
    for _ in range(SLOTS):
        ranks.send(b"message")


def test_a_rank_that_dies_while_the_writer_waits(
    idle: tuple[LocalRanks, SimpleQueue[Exception]],
) -> None:
    ranks, ends = idle
    fill(ranks)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(ranks.send, b"message")
        time.sleep(0.02)
        assert not waiting.done()
        ranks.ranks[1].process.kill()
        error = waiting.exception(20)
    assert isinstance(error, EOFError)
    cause = ends.get_nowait()  # known before the writer's error
    assert isinstance(cause, RankGone) and str(cause).startswith("Rank 1 ended unexpectedly")
    with pytest.raises(EOFError):
        ranks.send(b"message")


def test_ranks_that_are_killed_while_the_writer_waits(
    idle: tuple[LocalRanks, SimpleQueue[Exception]],
) -> None:
    ranks, ends = idle
    fill(ranks)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(ranks.send, b"message")
        ranks.kill(RuntimeError("the engine says so"))
        assert isinstance(waiting.exception(20), EOFError)
    assert ends.empty()


def test_close_does_not_wait_forever_for_a_full_ring(
    idle: tuple[LocalRanks, SimpleQueue[Exception]],
) -> None:
    ranks, ends = idle
    fill(ranks)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(ranks.close).result(20)
    assert ends.empty()


def read_late(connection: Connection, _: Connection, ring: PlanRing) -> None:
    """Body of a process."""
    time.sleep(0.3)
    reader = RingReader(ring, 0, connection)
    while reader.receive() != CLOSE:
        pass


@pytest.mark.exhaustive
def test_close_waits_until_a_full_ring_has_been_read() -> None:
    """The rank ends in order: it is not killed."""
    ring = PlanRing(1)
    rank = IdleRank(0, read_late, ring)
    ranks = LocalRanks([rank], ring, SimpleQueue().put)
    fill(ranks)
    ranks.close()
    assert rank.process.exitcode == 0


# --- nothing is left ----------------------------------------------------------------------------


def files_of(pid: int) -> list[str]:
    """Shared memory of the process that has a name."""
    return [name for name in os.listdir(SHARED) if name.startswith(f"pym-{pid}-")]


def read_until_the_writer_ends(connection: Connection, _: Connection, ring: PlanRing) -> None:
    """Body of a process."""
    reader = RingReader(ring, 0, connection)
    with suppress(EOFError):
        while True:
            reader.receive()


def be_killed() -> None:
    """Body of a process: kills itself while a reader sleeps."""
    ring = PlanRing(1)
    end = spawn(read_until_the_writer_ends, (ring,))
    while not words(ring)[SLEEPS]:
        time.sleep(1e-3)
    print(f"{files_of(os.getpid())}", flush=True)
    RingWriter(ring, [end[0]], no_room).send(b"message")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.exhaustive
@pytest.mark.skipif(not SHARED.exists(), reason="Linux")
def test_nothing_is_left_of_a_writer_that_is_killed() -> None:
    """No file, no warning, and the reader ends too."""
    code = f"from {__name__} import be_killed; be_killed()"
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        said, errors = process.communicate(timeout=60)  # until the reader has closed both too
    assert said.decode().strip() == "[]"
    assert process.returncode == -signal.SIGKILL
    assert errors == b""
    assert files_of(process.pid) == []


@pytest.mark.skipif(not SHARED.exists(), reason="Linux")
def test_nothing_is_left_after_close(
    idle: tuple[LocalRanks, SimpleQueue[Exception]],
) -> None:
    ranks, _ = idle
    assert files_of(os.getpid()) == []
    ranks.ranks[1].process.kill()
    ranks.close()
    assert files_of(os.getpid()) == []
