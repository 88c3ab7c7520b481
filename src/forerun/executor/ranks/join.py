"""How nodes find each other: node 0 listens, the others connect and say who they are.

A node is refused, on both sides, if it does not run the same as node 0. The messages after `START`
are in `remote.py`.
"""

from __future__ import annotations

import logging
import socket
import time
from pathlib import Path

import msgspec

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError, ExecutorError
from forerun.executor.ranks.facts import differences, node_facts
from forerun.executor.ranks.link import Link, connect, hang_up, listen, shown_address
from forerun.executor.ranks.messages import FAILED, REFUSED
from forerun.executor.ranks.remote import START, RemoteRanks, Start
from forerun.platform.progress import progress

log = logging.getLogger("forerun")

GREETING_SECONDS = 5.0  # until who has connected says who it is
LOOK_SECONDS = 0.5  # between two looks whether nodes that have joined are still there


class Hello(msgspec.Struct):
    """The first message of a node that joins."""

    node_rank: int
    host: str
    facts: dict[str, str]


def gather_nodes(config: EngineConfig, model_path: Path) -> list[RemoteRanks]:
    """Waits until all other nodes have joined; called on node 0. They are told of errors, too.

    Raises:
        ConfigError: the address cannot be used, a node does not join in time, or nodes differ.
    """
    if config.nnodes == 1:
        return []
    gathering = _Gathering(config, node_facts(config, model_path))
    try:
        with progress("waiting for other nodes"):
            return gathering.run()
    except BaseException as error:
        for node in gathering.joined.values():
            node.kill(error if isinstance(error, ConfigError) else ExecutorError(str(error)))
        raise


class _Gathering:
    def __init__(self, config: EngineConfig, facts: dict[str, str]) -> None:
        assert config.nodes.address is not None
        self._config, self._nodes, self._facts = config, config.nodes, facts
        self._address = config.nodes.address
        self.joined: dict[int, RemoteRanks] = {}  # by number of the node

    def run(self) -> list[RemoteRanks]:
        end = time.monotonic() + self._config.dist_timeout
        with listen(self._address) as server:
            server.settimeout(LOOK_SECONDS)
            while missing := self._missing():
                if time.monotonic() > end:
                    raise ConfigError(self._not_joined(missing))
                try:
                    connected, _ = server.accept()
                except TimeoutError:
                    continue
                self._welcome(connected)
        return [self.joined[number] for number in sorted(self.joined)]

    def _missing(self) -> list[int]:
        for number, node in list(self.joined.items()):
            if node.lost is not None:
                log.warning("%s It may join again.", node.lost)
                node.close()
                del self.joined[number]
        return [number for number in range(1, self._nodes.count) if number not in self.joined]

    def _welcome(self, connected: socket.socket) -> None:
        """
        Raises:
            ConfigError: the node differs from this one.
        """
        try:
            link = Link(connected)
            hello = msgspec.msgpack.decode(link.greeting(GREETING_SECONDS), type=Hello)
        except (EOFError, OSError, msgspec.MsgspecError) as error:
            where = shown_address(self._address)
            log.warning("The peer that connected to %s is not a Forerun node: %s.", where, error)
            hang_up(connected)
            return
        number, name = hello.node_rank, f"node {hello.node_rank} ({hello.host})"
        node = RemoteRanks(number, hello.host, self._nodes.ranks_of(number), link)
        here = f"node 0 ({socket.gethostname()})"
        if differ := differences((here, self._facts), (name, hello.facts)):
            node.kill(ConfigError(differ))
            raise ConfigError(differ)
        if number in self.joined or not 0 < number < self._nodes.count:
            other = self.joined[number].host if number in self.joined else "this one"
            said = f"node_rank {number} is {other}; give each node its own number."
            node.kill(ConfigError(said))
            return
        self.joined[number] = node
        log.info("%s has joined.", name)

    def _not_joined(self, missing: list[int]) -> str:
        nodes, have = ("Nodes", "have") if len(missing) > 1 else ("Node", "has")
        return (
            f"{nodes} {', '.join(map(str, missing))} of nnodes {self._nodes.count} {have} not"
            f" joined at dist_init_addr {shown_address(self._address)} within dist_timeout"
            f" {self._config.dist_timeout} s; start the same command there with node_rank"
            f" {' and '.join(map(str, missing))}, see that it reaches this address (firewall), or"
            " raise dist_timeout."
        )


def join(config: EngineConfig, model_path: Path) -> tuple[Link, Start]:
    """Connects to node 0, and waits until all nodes have; called on the others.

    Raises:
        ConfigError: node 0 does not answer, or refuses this node.
        ExecutorError: node 0 is gone before it starts.
    """
    facts = node_facts(config, model_path)
    address = config.nodes.address
    assert address is not None
    link = connect(address, config.dist_timeout)
    hello = Hello(config.node_rank, socket.gethostname(), facts)
    try:
        with progress("waiting for other nodes"):
            link.send_bytes(msgspec.msgpack.encode(hello))
            message = link.recv_bytes()
            raise_end(message)
            if message[:1] != START:
                raise OSError("it speaks another protocol")
            return link, msgspec.msgpack.decode(message[1:], type=Start)
    except (EOFError, OSError, msgspec.MsgspecError) as error:
        link.close()
        raise lost(address, error) from error
    except BaseException:
        link.close()
        raise


def raise_end(message: bytes) -> None:
    """
    Raises:
        ConfigError, ExecutorError: node 0 says that it ends, and why.
    """
    text = message[1:].decode(errors="replace")
    if message[:1] == REFUSED:
        raise ConfigError(text)
    if message[:1] == FAILED:
        raise ExecutorError(f"The engine on node 0 has ended: {text}")


def lost(address: tuple[str, int], error: Exception) -> ExecutorError:
    return ExecutorError(f"The connection to node 0 at {shown_address(address)} is lost ({error}).")
