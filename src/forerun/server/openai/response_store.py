"""Where responses and conversations are kept: SQLite, in memory or in a file.

Each API key has entries of its own, and limits of its own; without keys, all clients share one. An
entry that was not asked for explicitly makes room for newer ones; the others stay until they are
deleted.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec

from forerun.core.errors import ConfigError, first_line, shown
from forerun.server.http.errors import ApiError

T = TypeVar("T")
Item = dict[str, Any]
RESPONSE, CONVERSATION = "response", "conversation"
OFF = "the server's --max-stored-responses is 0"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    number INTEGER PRIMARY KEY, owner TEXT NOT NULL, kind TEXT NOT NULL, id TEXT NOT NULL UNIQUE,
    stays INTEGER NOT NULL, size INTEGER NOT NULL, body BLOB NOT NULL, items BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_owner ON entries (owner, stays, size);
"""


@dataclass(frozen=True)
class Limits:
    """The most that each owner may have."""

    entries: int
    size: int  # bytes


@dataclass(frozen=True)
class Entry:
    """A response with what it answers, or a conversation with what was said in it."""

    kind: str  # RESPONSE or CONVERSATION
    id: str
    body: Mapping[str, Any]  # as clients get it
    items: Sequence[Item]
    stays: bool = True  # False: makes room for newer ones


class ResponseStore:
    """Works in a thread of its own, one operation after another.

    Its methods raise ApiError where there is no such entry, and where the file fails (503).
    """

    def __init__(self, path: str | None, limits: Limits) -> None:
        """
        Args:
            path: of the file; None: in memory.

        Raises:
            ConfigError: the file cannot be used.
        """
        self._limits = limits
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forerun-store")
        try:
            self._db = sqlite3.connect(
                path or ":memory:", check_same_thread=False, isolation_level=None
            )
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise ConfigError(
                f"response_store {shown(path)} is not a file that SQLite can use:"
                f" {first_line(error)}."
            ) from None

    def close(self) -> None:
        """Waits for the operation that runs."""
        self._thread.shutdown()
        self._db.close()

    async def has_room(self, owner: str, size: int, new_entries: int = 1) -> bool:
        """Whether `size` bytes in so many entries fit beside those that stay."""
        return await self._run(partial(self._has_room, owner, size, new_entries))

    async def put(self, owner: str, entry: Entry) -> None:
        """Adds an entry, or replaces it. The oldest ones that do not stay make room."""
        await self._run(partial(self._put, owner, entry))

    async def get(self, owner: str, kind: str, ident: str) -> Entry:
        """The entry with an id."""
        return await self._run(partial(self._get, owner, kind, ident))

    async def change(self, owner: str, ident: str, change: Callable[[Entry], Entry]) -> Entry:
        """Changes a conversation, and returns what it is now."""

        def changed() -> Entry:
            entry = change(self._get(owner, CONVERSATION, ident))
            self._put(owner, entry)
            return entry

        return await self._run(changed)

    async def delete(self, owner: str, kind: str, ident: str) -> None:
        """Deletes the entry with an id."""
        await self._run(partial(self._delete, owner, kind, ident))

    async def _run(self, operation: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, operation)
        except sqlite3.Error as error:
            raise ApiError(503, f"The store of responses failed: {first_line(error)}.") from None
        except UnicodeEncodeError:
            raise ApiError(400, "An id has a lone surrogate, which is not a character.") from None

    # --- in the thread --------------------------------------------------------------------------

    def _has_room(self, owner: str, size: int, new_entries: int) -> bool:
        count, used = self._used(owner, "AND stays")
        limits = self._limits
        return count + new_entries <= limits.entries and used + size <= limits.size

    def _put(self, owner: str, entry: Entry) -> None:
        body, items = msgspec.json.encode(entry.body), msgspec.json.encode(entry.items)
        self._db.execute(
            "INSERT OR REPLACE INTO entries (owner, kind, id, stays, size, body, items)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (owner, entry.kind, entry.id, entry.stays, len(body) + len(items), body, items),
        )
        count, used = self._used(owner)
        over = max(count - self._limits.entries, 0), max(used - self._limits.size, 0)
        if any(over):
            self._make_room(owner, *over)

    def _make_room(self, owner: str, count: int, size: int) -> None:
        """Deletes entries until so many, and so many bytes, are gone; or all that do not stay."""
        oldest = self._db.execute(
            "SELECT number, size FROM entries WHERE owner = ? AND NOT stays ORDER BY number",
            (owner,),
        ).fetchall()
        for number, freed in oldest:
            if count <= 0 and size <= 0:
                break
            self._db.execute("DELETE FROM entries WHERE number = ?", (number,))
            count, size = count - 1, size - freed

    def _used(self, owner: str, which: str = "") -> tuple[int, int]:
        """Number of the owner's entries, and their bytes."""
        asked = f"SELECT COUNT(*), COALESCE(SUM(size), 0) FROM entries WHERE owner = ? {which}"
        count, size = self._db.execute(asked, (owner,)).fetchone()
        return count, size

    def _get(self, owner: str, kind: str, ident: str) -> Entry:
        found = self._db.execute(
            "SELECT body, items, stays FROM entries WHERE owner = ? AND kind = ? AND id = ?",
            (owner, kind, ident),
        ).fetchone()
        if found is None:
            raise self._unknown(kind, ident)
        body, items, stays = found
        return Entry(
            kind, ident, msgspec.json.decode(body), msgspec.json.decode(items), bool(stays)
        )

    def _delete(self, owner: str, kind: str, ident: str) -> None:
        gone = self._db.execute(
            "DELETE FROM entries WHERE owner = ? AND kind = ? AND id = ?", (owner, kind, ident)
        )
        if not gone.rowcount:
            raise self._unknown(kind, ident)

    def _unknown(self, kind: str, ident: str) -> ApiError:
        why = (
            "it was deleted or never stored, has not ended yet, made room for newer ones, or is of"
            " another API key"
        )
        if not self._limits.entries:
            why = OFF
        return ApiError(404, f"There is no {kind} {shown(ident)}: {why}.", code=f"{kind}_not_found")


def encoded_size(what: str, value: Any) -> int:
    """Bytes of a value as JSON.

    Raises:
        ApiError: 400, it has a value that JSON should not have; `what` it is of.
    """
    try:
        return len(msgspec.json.encode(value))
    except (ValueError, OverflowError, RecursionError) as error:
        message = f"{what} has a value that JSON should not have: {error}."
        raise ApiError(400, message) from None
