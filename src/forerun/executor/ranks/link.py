"""Messages between two nodes: bytes over TCP, each with its length before it. No pickle.

The kernel probes an idle connection every second, whatever the process does, and gives up a peer
that has not answered for `LOST_SECONDS`: its machine or the network has failed. A process that
ends closes its connections, which the peer sees at once.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time

from forerun.core.errors import ConfigError

LOST_SECONDS = 4
RETRY_SECONDS = 0.2  # between two attempts to connect
MAX_BYTES = 1 << 30  # of a message
MAX_GREETING = 1 << 20  # of one from a peer that is not known yet
_LENGTH = struct.Struct("!I")


class Link:
    """One end of a connection. Any thread may send; one at a time receives.

    Methods raise EOFError or OSError once the connection is closed or lost.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _probe(connected)
        self._socket = connected
        self._sending = threading.Lock()
        self.peer = str(connected.getpeername()[0])

    def send_bytes(self, message: bytes) -> None:
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(message)) + message)

    def recv_bytes(self, limit: int = MAX_BYTES) -> bytes:
        """
        Raises:
            OSError: also if the message has more than `limit` bytes.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > limit:
            raise OSError(f"a message of {length} bytes")
        return self._read(length)

    def greeting(self, seconds: float) -> bytes:
        """The first message, of a peer that is not verified yet.

        Raises:
            OSError: also if it does not come in time.
        """
        self._socket.settimeout(seconds)
        message = self.recv_bytes(MAX_GREETING)
        self._socket.settimeout(None)
        return message

    def close(self) -> None:
        """Also for a thread that waits in `recv_bytes`. Repeated calls do nothing."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # closed, or lost
        finally:
            self._socket.close()

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = self._socket.recv(count - len(data))
            if not part:
                raise EOFError("the peer has closed the connection")
            data += part
        return bytes(data)


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
