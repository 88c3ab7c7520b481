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
from forerun.executor.ranks.link import Link, connect, listen, shown_address
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
            log.warning(
                "The peer that connected to %s is not a Forerun node: %s.",
                shown_address(self._address),
                error,
            )
            connected.close()
            return
        name = f"node {hello.node_rank} ({hello.host})"
        differ = differences((f"node 0 ({socket.gethostname()})", self._facts), (name, hello.facts))
        if differ:
            _refuse(link, differ)
            raise ConfigError(differ)
        other = self.joined.get(hello.node_rank)
        if other is not None or not 0 < hello.node_rank < self._nodes.count:
            where = "this one" if other is None else other.host
            _refuse(link, f"node_rank {hello.node_rank} is {where}; give each node its own number.")
            return
        ranks = self._nodes.ranks_of(hello.node_rank)
        self.joined[hello.node_rank] = RemoteRanks(hello.node_rank, hello.host, ranks, link)
        log.info("%s has joined.", name)

    def _not_joined(self, missing: list[int]) -> str:
        several = len(missing) > 1
        which = ", ".join(map(str, missing))
        return (
            f"Node{'s' * several} {which} of nnodes {self._nodes.count}"
            f" {'have' if several else 'has'} not joined at dist_init_addr"
            f" {shown_address(self._address)} within dist_timeout {self._config.dist_timeout} s;"
            f" start the same command there with node_rank {' and '.join(map(str, missing))}, see"
            " that it reaches this address (firewall), or raise dist_timeout."
        )


def _refuse(link: Link, reason: str) -> None:
    try:
        link.send_bytes(REFUSED + reason.encode())
    except OSError as error:
        log.warning("A node is refused, and has gone: %s", error)
    link.close()


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
