"""Network interfaces of this machine."""

from __future__ import annotations

import socket
import struct
import sys

_SIOCGIFADDR = 0x8915  # Linux: IPv4 address of an interface


def interface_to(address: tuple[str, int]) -> str | None:
    """The interface through which packets go to `address`; None: IPv6, or another system."""
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)  # sends nothing
        except OSError:
            return None
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no IPv4 address
            if answer[20:24] == own:
                return name
    return None
