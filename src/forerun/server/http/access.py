"""Which hosts and origins are served: what keeps web pages of others away from a local server.

A page can send requests to any address, also to a server on the user's own machine (cross-site
requests), and under a name of its own that resolves to it (DNS rebinding). Browsers say truly which
name and which page a request is for and from: Host, Origin and Sec-Fetch-Site. Other programs send
no Origin; they are not concerned.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forerun.core.errors import ConfigError, shown

ANY = "*"
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
# A name, an IPv4 address, or an IPv6 address in brackets; and a port.
HOST = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9_](?:[a-z0-9._-]{0,253}))(?::([0-9]{1,5}))?")
ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(\S{1,300})")
DEFAULT_PORTS = {"http": "80", "https": "443"}


class NoAccess(Exception):
    """A request that is not served; with the HTTP status and OpenAI's code."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class Access:
    """Hosts and origins, in lower case. `ANY` among them: all."""

    hosts: tuple[str, ...]
    origins: tuple[str, ...]

    @classmethod
    def of(cls, bound: str, hosts: Sequence[str] | None, origins: Sequence[str]) -> Access:
        """
        Args:
            bound: address that the server listens on.
            hosts: None: loopback names on a loopback address, else all.

        Raises:
            ConfigError: an origin or a host is none.
        """
        if hosts is None:
            own = f"[{bound}]" if ":" in bound else bound
            hosts = (*LOOPBACK, own.lower()) if _is_loopback(bound) else (ANY,)
        for host in hosts:
            if host != ANY and _host_name(host.removeprefix("*.")) is None:
                raise ConfigError(
                    f"allowed_hosts must be names or addresses without a port, got {shown(host)}."
                )
        for origin in origins:
            if origin not in (ANY, "null") and not ORIGIN.fullmatch(origin):
                raise ConfigError(
                    "allowed_origins must be origins such as https://chat.example.com, got"
                    f" {shown(origin)}."
                )
        return cls(tuple(hosts), tuple(origin.removesuffix("/") for origin in origins))

    def check_host(self, given: Sequence[str], http_version: str) -> None:
        """
        Raises:
            NoAccess: the Host headers of a request name another server, or none.
        """
        if len(given) > 1 or (not given and http_version not in ("0.9", "1.0")):
            raise NoAccess(400, "A request has exactly one Host header.")
        if ANY in self.hosts or not given:
            return
        parsed = HOST.fullmatch(given[0].strip().lower())
        if parsed is None or int(parsed[2] or 0) > 65535:
            raise NoAccess(400, f"The Host header {shown(given[0])} is not a host.")
        name = parsed[1].removesuffix(".")
        suffixes = [host[1:] for host in self.hosts if host.startswith("*.")]
        if name not in self.hosts and not name.endswith(tuple(suffixes)):
            raise NoAccess(
                403,
                f"The host {shown(name)} is not served here; the server's --allowed-hosts can name"
                " it.",
                code="host_not_allowed",
            )

    def check_origin(self, given: Sequence[str], host: str, site: str) -> None:
        """
        Args:
            given: Origin headers.
            site: Sec-Fetch-Site; "none" without one.

        Raises:
            NoAccess: a page of another origin has sent the request.
        """
        if ANY in self.origins:
            return
        host, origins = host.strip().lower(), [origin.strip().lower() for origin in given]
        known = all(origin in self.origins or _is_own(origin, host) for origin in origins)
        if known and (origins or site in ("none", "same-origin")):
            return
        whose = shown(origins[0]) if origins else "another site"
        raise NoAccess(
            403,
            f"Pages of {whose} may not use this server; its --allowed-origins can name them.",
            code="origin_not_allowed",
        )


def names_in(setting: str, text: str) -> list[str]:
    """A list that is given as JSON, or with commas between its parts; in lower case.

    Raises:
        ConfigError: it is not such a list.
    """
    parts: Any = text.split(",")
    if re.match(r"""\s*\[\s*["\]]""", text):
        try:
            parts = json.loads(text)
        except ValueError:
            parts = None
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise ConfigError(f'{setting} must be a list such as a,b or ["a", "b"], got {shown(text)}.')
    return [part.strip().lower() for part in parts if part.strip()]


def _host_name(text: str) -> str | None:
    parsed = HOST.fullmatch(text)
    return parsed[1] if parsed is not None and parsed[2] is None else None


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _is_own(origin: str, host: str) -> bool:
    """Whether it is the origin of a server with this Host header.

    The scheme does not count: behind a proxy it is another one.
    """
    parsed = ORIGIN.fullmatch(origin)
    if parsed is None or parsed[1] not in DEFAULT_PORTS:
        return False
    port = f":{DEFAULT_PORTS[parsed[1]]}"
    return parsed[2].removesuffix(port) == host.removesuffix(port)
