"""How the ranks of an engine are spread over machines ("nodes")."""

from __future__ import annotations

import re
from dataclasses import dataclass

from forerun.core.errors import ConfigError, divisors, shown


@dataclass(frozen=True)
class Nodes:
    """`tp_size` ranks on `count` nodes, as many on each; node 0 has the first ones."""

    count: int
    rank: int  # of this node
    tp_size: int
    address: tuple[str, int] | None  # host and port where node 0 waits for the others

    @classmethod
    def of(cls, nnodes: int, node_rank: int, tp_size: int, dist_init_addr: str | None) -> Nodes:
        """
        Raises:
            ConfigError: the settings contradict each other.
        """
        if not 0 <= node_rank < nnodes:
            raise ConfigError(
                f"node_rank {node_rank} is not a node of nnodes {nnodes}; number the nodes from 0"
                f" to {nnodes - 1}, and give all of them the same nnodes."
            )
        if tp_size % nnodes:
            raise ConfigError(
                f"nnodes {nnodes} does not divide tp_size {tp_size}, the ranks of all nodes"
                f" together; take nnodes {divisors(tp_size)}, or change tp_size."
            )
        if nnodes > 1 and dist_init_addr is None:
            raise ConfigError(
                f"nnodes {nnodes} needs dist_init_addr: HOST:PORT of node 0, the same on all nodes."
            )
        if nnodes == 1 and dist_init_addr is not None:
            raise ConfigError("dist_init_addr is set without nnodes; set that too, or drop it.")
        address = None if dist_init_addr is None else parse_address(dist_init_addr)
        return cls(nnodes, node_rank, tp_size, address)

    @property
    def ranks(self) -> range:
        """Numbers of this node's ranks."""
        return self.ranks_of(self.rank)

    def ranks_of(self, node: int) -> range:
        each = self.tp_size // self.count
        return range(node * each, (node + 1) * each)


def parse_address(text: str) -> tuple[str, int]:
    """`HOST:PORT`, or `[HOST]:PORT` of an IPv6 address.

    Raises:
        ConfigError: it is something else.
    """
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:\[\]/]+)):(\d{1,5})", text)
    if match is None or not 0 < int(match[3]) <= 65535:
        raise ConfigError(
            f"dist_init_addr must be HOST:PORT of node 0, such as 10.0.0.1:5000, got {shown(text)}."
        )
    return match[1] or match[2], int(match[3])
