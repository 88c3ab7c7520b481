"""Messages between two nodes: bytes over TCP, framed as in a pipe of `multiprocessing`. No pickle.

The kernel probes an idle connection every second, whatever the process does, and gives up a peer
that has not answered for `LOST_SECONDS`: its machine or the network has failed. A process that
ends closes its connections, which the peer sees at once; one that is stopped is not lost.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection

from forerun.core.errors import ConfigError

LOST_SECONDS = 4
RETRY_SECONDS = 0.2  # between two attempts to connect
MAX_BYTES = 1 << 30  # of a message
MAX_GREETING = 1 << 20  # of one from a peer that is not known yet


class Link:
    """One end of a connection. Any thread may send; one at a time receives.

    Methods raise EOFError or OSError once the connection is closed or lost.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _probe(connected)
        self.peer = str(connected.getpeername()[0])
        self._socket = connected
        # Its descriptor lives as long as this object: a thread may still read when it is closed.
        self._frames = Connection(os.dup(connected.fileno()))
        self._sending = threading.Lock()

    def send_bytes(self, message: bytes) -> None:
        with self._sending:
            self._frames.send_bytes(message)

    def recv_bytes(self, limit: int = MAX_BYTES) -> bytes:
        """
        Raises:
            OSError: also if the message has more than `limit` bytes.
        """
        try:
            return self._frames.recv_bytes(limit)
        except EOFError:
            raise EOFError("the connection has ended") from None

    def greeting(self, seconds: float) -> bytes:
        """The first message, of a peer that is not verified yet. Closes the link at the timeout."""
        timeout = threading.Timer(seconds, self.close)
        timeout.start()
        try:
            return self.recv_bytes(MAX_GREETING)
        finally:
            timeout.cancel()

    def close(self) -> None:
        """Also for a thread that waits in `recv_bytes`. Repeated calls do nothing."""
        hang_up(self._socket)


def hang_up(connected: socket.socket) -> None:
    """Closes a connection, whoever else has a descriptor of it."""
    with suppress(OSError):  # it is closed, or lost
        connected.shutdown(socket.SHUT_RDWR)
    connected.close()


def _probe(connected: socket.socket) -> None:
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform != "linux":
        return  # after the system's default time
    tcp = socket.IPPROTO_TCP
    connected.setsockopt(tcp, socket.TCP_KEEPIDLE, 1)
    connected.setsockopt(tcp, socket.TCP_KEEPINTVL, 1)
    connected.setsockopt(tcp, socket.TCP_KEEPCNT, LOST_SECONDS - 1)
    connected.setsockopt(tcp, socket.TCP_USER_TIMEOUT, 1000 * LOST_SECONDS)  # of unread data too


def listen(address: tuple[str, int]) -> socket.socket:
    """
    Raises:
        ConfigError: the address is taken, or not of this machine.
    """
    try:
        family, _, _, _, resolved = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        return socket.create_server(resolved[:2], family=family)
    except OSError as error:
        raise ConfigError(
            f"dist_init_addr {shown_address(address)} cannot be listened on"
            f" ({error.strerror or error}); give an address of node 0, which is this machine, and a"
            " free port."
        ) from None


def connect(address: tuple[str, int], seconds: int) -> Link:
    """Retries until node 0 listens there, for up to `seconds`.

    Raises:
        ConfigError: no connection before the timeout.
    """
    end = time.monotonic() + seconds
    while True:
        left = end - time.monotonic()
        try:
            connected = socket.create_connection(address, max(left, RETRY_SECONDS))
            if connected.getsockname() == connected.getpeername():  # TCP allows it on one machine
                connected.close()
                raise OSError("Connection refused")
            return Link(connected)
        except OSError as error:
            if left < 0:
                raise ConfigError(
                    f"Node 0 has not answered at dist_init_addr {shown_address(address)} within"
                    f" dist_timeout {seconds} s ({error.strerror or error}); start the same command"
                    " there with node_rank 0, check the address and firewalls, or raise"
                    " dist_timeout."
                ) from None
            time.sleep(RETRY_SECONDS)


def shown_address(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
