"""API keys: which there are, what each may do, and how much."""

from __future__ import annotations

import hmac
import logging
import math
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from forerun.core.errors import ConfigError, shown

log = logging.getLogger("forerun")

DEFAULT_NAME, ADMIN_NAME = "api-key", "admin"  # of the keys that are given as flags
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
KEY = re.compile(r"[!-~]{1,512}")  # printable ASCII without spaces
LIMITS = ("max_requests", "requests_per_minute")
MINUTE = 60.0


@dataclass(frozen=True)
class ApiKey:
    """One key. Its name is in the log; the key itself never is."""

    name: str
    secret: bytes = field(repr=False)
    is_admin: bool = False
    max_requests: int | None = None  # at once
    requests_per_minute: int | None = None
    tenant: int = 0  # from 1 on; the same as long as its name is, and of no other key


class TooMany(Exception):
    """A key's limit is reached; `seconds`: when it may ask again."""

    def __init__(self, message: str, seconds: int) -> None:
        super().__init__(f"{message}. Try again later.")
        self.seconds = seconds


class Usage:
    """What a key has asked for. It outlives a reload of the file."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running = 0
        self._starts: deque[float] = deque()  # of the last minute

    def start(self, key: ApiKey) -> None:
        """A request begins, which `end` ends.

        Raises:
            TooMany: the key has no room for it now.
        """
        self._check(key)
        self._running += 1

    def end(self) -> None:
        self._running -= 1

    def _check(self, key: ApiKey) -> None:
        if key.max_requests is not None and self._running >= key.max_requests:
            raise TooMany(f"{key.max_requests} requests of this API key are running", 1)
        if key.requests_per_minute is None:
            self._starts.clear()
            return
        now = self._clock()
        while self._starts and self._starts[0] <= now - MINUTE:
            self._starts.popleft()
        if len(self._starts) >= key.requests_per_minute:
            # When enough of them are a minute old: the limit may have been lowered.
            frees = self._starts[len(self._starts) - key.requests_per_minute] + MINUTE
            what = f"This API key may start {key.requests_per_minute} requests a minute"
            raise TooMany(what, max(1, math.ceil(frees - now)))
        self._starts.append(now)


class ApiKeys:
    """All keys of a server: those of flags, and those of a file, which can be read again."""

    def __init__(self, api_key: str | None, admin_api_key: str | None, path: str | None) -> None:
        """
        Raises:
            ConfigError: the file cannot be used.
        """
        self._path = path
        self._given = [
            *_flag_key(DEFAULT_NAME, api_key, is_admin=admin_api_key is None),
            *_flag_key(ADMIN_NAME, admin_api_key, is_admin=True),
        ]
        self.is_open = api_key is None and path is None  # keys are for control routes at most
        self._usage: dict[str, Usage] = {}
        self._tenants: dict[str, int] = {}  # by name; also of keys that are gone
        self._keys = self._read()

    def find(self, secret: bytes) -> ApiKey | None:
        """The key with this secret. It takes as long for any secret of the same length."""
        found = None
        for key in self._keys:
            # In constant time, and no way out before the end.
            if hmac.compare_digest(secret, key.secret):
                found = key
        return found

    def named(self, name: str) -> ApiKey | None:
        """The key with this name."""
        return next((key for key in self._keys if key.name == name), None)

    def usage(self, key: ApiKey) -> Usage:
        """What the key has asked for so far."""
        return self._usage.setdefault(key.name, Usage())

    def reload(self) -> None:
        """Reads the file again. What is wrong with it is logged, and the keys stay as they are."""
        if self._path is None:
            log.warning("SIGHUP: there is no --api-key-file to read again.")
            return
        try:
            self._keys = self._read()
        except ConfigError as error:
            log.error("SIGHUP: the API keys stay as they were. %s", error)
            return
        names = {key.name for key in self._keys}
        self._usage = {name: usage for name, usage in self._usage.items() if name in names}
        log.warning("SIGHUP: %d API keys are in use now.", len(self._keys))

    def _read(self) -> list[ApiKey]:
        keys = list(self._given)
        if self._path is not None:
            keys += read_keys(Path(self._path))
        names, secrets = set[str](), set[bytes]()
        for key in keys:
            if key.name in names:
                raise ConfigError(f"There are two API keys with the name {shown(key.name)}.")
            if key.secret in secrets:
                raise ConfigError(f"The API key {shown(key.name)} is there under another name too.")
            names.add(key.name)
            secrets.add(key.secret)
        for key in keys:
            self._tenants.setdefault(key.name, len(self._tenants) + 1)
        return [replace(key, tenant=self._tenants[key.name]) for key in keys]


def read_keys(path: Path) -> list[ApiKey]:
    """The keys of a file: `NAME KEY [max_requests=N] [requests_per_minute=N]`, one a line.

    Raises:
        ConfigError: it cannot be read, or a line is wrong. No part of a line is repeated.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else None
    except (OSError, UnicodeDecodeError):
        lines = None
    if lines is None:
        raise ConfigError(f"api_key_file {shown(str(path))} is not a readable text file.")
    keys = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if words and not words[0].startswith("#"):
            try:
                keys.append(_parsed(words))
            except ValueError as error:
                where = f"api_key_file {shown(str(path))}, line {number}"
                raise ConfigError(f"{where}: {error}") from None
    if not keys:
        raise ConfigError(
            f"api_key_file {shown(str(path))} has no keys; write NAME KEY, one a line."
        )
    return keys


def _parsed(words: list[str]) -> ApiKey:
    """
    Raises:
        ValueError: this is not a line of the file.
    """
    if len(words) < 2 or "=" in words[0]:
        raise ValueError("expected NAME KEY [max_requests=N] [requests_per_minute=N].")
    name, secret, *options = words
    if not NAME.fullmatch(name):
        raise ValueError("a name has 1 to 64 letters, digits, '.', '_' or '-'.")
    if not KEY.fullmatch(secret):
        raise ValueError("a key has 1 to 512 printable ASCII characters.")
    limits: dict[str, int] = {}
    for option in options:
        limit, _, value = option.partition("=")
        if limit not in LIMITS:
            raise ValueError(f"word {words.index(option) + 1} is none of {', '.join(LIMITS)}.")
        if limit in limits or not (value.isascii() and value.isdecimal() and 1 <= len(value) <= 9):
            raise ValueError(f"{limit} must be given once, as a number of at most 9 digits.")
        if int(value) < 1:
            raise ValueError(f"{limit} must be >= 1.")
        limits[limit] = int(value)
    return ApiKey(
        name,
        secret.encode(),
        max_requests=limits.get("max_requests"),
        requests_per_minute=limits.get("requests_per_minute"),
    )


def _flag_key(name: str, secret: str | None, is_admin: bool) -> list[ApiKey]:
    return [] if secret is None else [ApiKey(name, secret.encode(), is_admin)]
