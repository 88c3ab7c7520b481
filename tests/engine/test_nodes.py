"""Ranks of several nodes, which are threads or processes of this machine here."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError, ExecutorError
from forerun.core.sampling_params import SamplingParams
from forerun.engine.engine import Engine
from forerun.executor.build import build_executor
from forerun.executor.ranks import join as join_module
from forerun.executor.ranks.executor import RanksExecutor
from forerun.executor.ranks.host import host_ranks
from forerun.executor.ranks.join import gather_nodes, join
from forerun.executor.ranks.link import LOST_SECONDS, Link, connect, listen
from forerun.executor.ranks.local import RankGone
from forerun.executor.ranks.remote import RemoteRanks, Start
from forerun.models.safetensors_files import fingerprint
from forerun.speculative.registry import all_options
from tests.engine_runs import run_together
from tests.golden_engine import CASES, GOLDEN
from tests.tp_models import with_a_sixth_head

PROMPT = CASES[0]["prompt"][:60]


@pytest.fixture
def address() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        host, port = free.getsockname()
    return host, port


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_a_sixth_head(tmp_path_factory.mktemp("target"))


@pytest.fixture
def threads() -> Any:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def node(address: tuple[str, int], node_rank: int, **settings: Any) -> EngineConfig:
    common = {"dtype": "float32", "device": "cpu", "max_running_requests": 2, "nnodes": 2,
              "tp_size": 2, "dist_timeout": 30, "speculative_algorithm": "DFLASH",
              "speculative_draft_model_path": str(GOLDEN / "draft")}  # fmt: skip
    host, port = address
    where = {"node_rank": node_rank, "dist_init_addr": f"{host}:{port}"}
    options = {option.name: option.default for option in all_options()}
    return EngineConfig.of({**common, **where, **settings}, options)


def texts(engine: Engine) -> list[list[int]]:
    asked: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.9, "sampling_seed": 5}]
    params = [SamplingParams(max_new_tokens=12, ignore_eos=True, **each) for each in asked]
    requests = [engine.make_request(list(PROMPT), each) for each in params]
    run_together(engine, requests)
    return [request.output for request in requests]


def fails_within(seconds: float, engine: Engine) -> str:
    """The error of a request that is sent now."""
    engine.submit(engine.make_request(list(PROMPT), SamplingParams(max_new_tokens=400)))
    begin = time.monotonic()
    with pytest.raises(ExecutorError) as raised:
        while engine.has_work:
            engine.step()
    assert time.monotonic() - begin < seconds
    return str(raised.value)


@pytest.mark.exhaustive
@pytest.mark.parametrize("deaths", [(1,), (0, 1)])
def test_text_of_two_nodes_and_ranks_that_die(
    deaths: tuple[int, ...], target: Path, address: tuple[str, int], threads: ThreadPoolExecutor
) -> None:
    """After each death the nodes join again, with the same address."""
    alone = EngineConfig(dtype="float32", device="cpu", max_running_requests=2)
    engine = Engine(alone, build_executor(alone, target))
    want = texts(engine)
    engine.close()
    for dies in (*deaths, None):
        other = threads.submit(host_ranks, node(address, 1), target)
        executor = RanksExecutor.start(node(address, 0), target)
        engine = Engine(node(address, 0), executor)
        try:
            assert texts(engine) == want
            if dies is None:
                break
            kill_rank(dies)
            reason = fails_within(5, engine)
        finally:
            engine.close()
        if dies == 1:
            where = rf"Node 1 \({socket.gethostname()}, 127.0.0.1\): "
            assert reason == f"{where}Rank 1 ended unexpectedly (exit code -9).".replace("\\", "")
            said = r"^Rank 1 ended unexpectedly"
        else:
            assert reason == "Rank 0 ended unexpectedly (exit code -9)."
            said = "The engine on node 0 has ended: Rank 0 ended unexpectedly"
        with pytest.raises(ExecutorError, match=said):
            other.result(5)
    other.result(10)  # ends with the engine
    assert not ranks_alive()


def ranks_alive() -> dict[int, Any]:
    from multiprocessing import active_children

    named = [each for each in active_children() if each.name.startswith("forerun-rank-")]
    return {int(each.name.removeprefix("forerun-rank-")): each for each in named}


def kill_rank(number: int) -> None:
    ranks_alive()[number].kill()


# --- joining: no ranks are started --------------------------------------------------------------


def joining(config: EngineConfig, target: Path) -> Callable[[], Any]:
    return lambda: join(config, target)


def error_of(future: Future[Any]) -> str:
    error = future.exception(10)
    assert isinstance(error, ConfigError), error
    return str(error)


def test_nodes_that_differ_are_told_how(
    target: Path,
    address: tuple[str, int],
    threads: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other node, node 0, and one that had joined before."""
    facts = join_module.node_facts
    monkeypatch.setattr(
        join_module,
        "node_facts",
        lambda config, path: facts(config, path) | {"torch": VERSIONS[config.node_rank]},
    )
    settings = {"nnodes": 3, "tp_size": 3}
    configs = [node(address, i, **settings, page_size=(None, None, 16)[i]) for i in range(3)]
    gathering = threads.submit(gather_nodes, configs[0], target)
    first = threads.submit(join, configs[1], target)
    time.sleep(0.3)
    second = threads.submit(join, configs[2], target)
    name = socket.gethostname()
    for each in (gathering, first, second):
        assert error_of(each) == (
            f"Nodes differ: torch is 2.9.0 on node 0 ({name}) and 2.10.1 on node 2 ({name});"
            f" page_size is None on node 0 ({name}) and 16 on node 2 ({name}). Run the same"
            " versions and settings, with the same models, on machines of one kind."
        )


VERSIONS = ("2.9.0", "2.9.0", "2.10.1")


@pytest.mark.exhaustive
def test_a_node_that_does_not_join_in_time(
    target: Path, address: tuple[str, int], threads: ThreadPoolExecutor
) -> None:
    configs = [node(address, i, nnodes=4, tp_size=4, dist_timeout=1) for i in range(4)]
    gathering = threads.submit(gather_nodes, configs[0], target)
    other = threads.submit(join, configs[2], target)
    for each in (gathering, other):
        assert (
            f"Nodes 1, 3 of nnodes 4 have not joined at dist_init_addr 127.0.0.1:{address[1]}"
            " within dist_timeout 1 s; start the same command there with node_rank 1 and 3"
        ) in error_of(each)
    with pytest.raises(ConfigError, match=r"Node 0 has not answered at .* within dist_timeout 1 s"):
        join(configs[1], target)


def test_strangers_doubles_and_nodes_that_leave_do_not_disturb_the_others(
    target: Path, address: tuple[str, int], threads: ThreadPoolExecutor
) -> None:
    configs = [node(address, i, nnodes=3, tp_size=3) for i in range(3)]
    gathering = threads.submit(gather_nodes, configs[0], target)
    for greeting in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\3abc", b""):
        stranger = connect(address, 5)
        stranger._socket.sendall(greeting)
        stranger.close()
    # One that has joined, and leaves.
    hello = join_module.Hello(1, "left", join_module.node_facts(configs[1], target))
    leaving = connect(address, 5)
    leaving.send_bytes(join_module.msgspec.msgpack.encode(hello))
    double = threads.submit(join, configs[1], target)
    assert "node_rank 1 is left; give each node its own number" in error_of(double)
    leaving.close()
    time.sleep(0.6)
    others = [threads.submit(join, configs[i], target) for i in (1, 2)]
    nodes = gathering.result(10)
    for each in nodes:
        each.start(Start(4321, 1), lambda cause: None)
    for other in others:
        link, start = other.result(10)
        assert start == Start(4321, 1)
        link.close()
    for each in nodes:
        each.close()


@pytest.mark.parametrize(
    ("greeting", "says_more"),
    [(b"", False), (b"\0\0\0\x63abc", True), (struct.pack("!I", (1 << 20) + 1), False)],
)
def test_a_stranger_that_says_little_or_too_much_is_dropped(
    greeting: bytes,
    says_more: bool,
    target: Path,
    address: tuple[str, int],
    threads: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A byte at a time does not hold node 0 up, nor does a length over 1 MiB."""
    monkeypatch.setattr(join_module, "GREETING_SECONDS", 0.5)
    gathering = threads.submit(gather_nodes, node(address, 0), target)
    stranger = connect(address, 5)
    begin = time.monotonic()
    stranger._socket.sendall(greeting)
    stranger._socket.settimeout(0.1)
    while time.monotonic() < begin + 5:
        try:
            if stranger._socket.recv(1) == b"":
                break
        except TimeoutError:
            if says_more:
                stranger._socket.send(b"x")
        except ConnectionError:
            break
    took = time.monotonic() - begin
    assert took < 0.4 if len(greeting) == 4 else 0.4 < took < 2
    stranger.close()
    other = threads.submit(join, node(address, 1), target)
    (joined,) = gathering.result(10)
    assert "is not a Forerun node" in caplog.text
    joined.kill(ExecutorError("enough"))
    with pytest.raises(ExecutorError, match="enough"):
        other.result(10)


def test_an_address_that_cannot_be_used(target: Path) -> None:
    with pytest.raises(ConfigError, match=r"192.0.2.1:5 cannot be listened on .* of node 0, which"):
        gather_nodes(node(("192.0.2.1", 5), 0), target)


def test_fingerprints_tell_checkpoints_apart(target: Path, tmp_path: Path) -> None:
    """Of another fine-tune as well, whose tensors have the same names and shapes."""
    for file in target.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert fingerprint(tmp_path) == fingerprint(target)
    data = bytearray((tmp_path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(data)
    assert fingerprint(tmp_path) != fingerprint(target)
    assert fingerprint(tmp_path, weights=False) == fingerprint(target, weights=False)


# --- links ----------------------------------------------------------------------------------------


def linked(address: tuple[str, int]) -> tuple[Link, Link]:
    with listen(address) as server:
        one = connect(address, 5)
        return one, Link(server.accept()[0])


def test_a_node_that_is_gone_is_named(address: tuple[str, int]) -> None:
    near, far = linked(address)
    remote = RemoteRanks(3, "tpn", range(24, 26), near)
    causes: list[Exception] = []
    ended = threading.Event()
    remote.start(Start(1, None), lambda cause: (causes.append(cause), ended.set())[0])
    assert far.recv_bytes()[:1] == b"s"
    far.send_bytes(b"i")
    remote.wait_ready()
    far.close()
    assert ended.wait(5)
    (cause,) = causes
    assert isinstance(cause, RankGone)
    assert str(cause).startswith("Node 3 (tpn, 127.0.0.1), ranks 24, 25: the connection is")
    with pytest.raises(EOFError):
        remote.receive_grammar()
    with pytest.raises(EOFError, match="the connection is lost"):
        remote.send(b"p")
    remote.kill(cause)
    remote.close()


def test_messages_over_tcp(address: tuple[str, int], threads: ThreadPoolExecutor) -> None:
    near, far = linked(address)
    sent = [b"", b"p" + bytes(range(256)) * 4000, b"c"]
    for message in sent:
        near.send_bytes(message)
    assert [far.recv_bytes() for _ in sent] == sent
    near.send_bytes(b"x" * 9)
    with pytest.raises(OSError, match="bad message length"):
        far.recv_bytes(limit=8)
    # A peer whose machine or network has failed is given up by the kernel after 4 s.
    option = near._socket.getsockopt
    assert option(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        assert option(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 4000
        assert option(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1
    waiting = threads.submit(near.recv_bytes)
    near.close()
    assert isinstance(waiting.exception(5), EOFError | OSError)
    far.close()


ECHO = """
import sys
from forerun.executor.ranks.link import connect
link = connect(("127.0.0.1", int(sys.argv[1])), 5)
while True:
    link.send_bytes(link.recv_bytes())
"""


@pytest.mark.exhaustive
def test_a_stopped_process_is_not_lost_and_a_killed_one_is_at_once(
    address: tuple[str, int],
) -> None:
    with listen(address) as server:
        other = subprocess.Popen([sys.executable, "-c", ECHO, str(address[1])])
        link = Link(server.accept()[0])
    try:
        other.send_signal(signal.SIGSTOP)
        link.send_bytes(b"still there?")
        time.sleep(LOST_SECONDS + 2)
        other.send_signal(signal.SIGCONT)
        assert link.recv_bytes() == b"still there?"
        other.kill()
        begin = time.monotonic()
        with pytest.raises((EOFError, OSError)):
            link.recv_bytes()
        assert time.monotonic() - begin < 1
    finally:
        other.kill()
        other.wait()
        link.close()
