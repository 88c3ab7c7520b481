"""Files and batches on disk: a folder for each API key, with limits for each."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

from forerun.core.errors import ConfigError, shown
from forerun.server.http.errors import ApiError

Record = dict[str, Any]  # a file or a batch, as clients get it
FILE, BATCH = "file", "batch"
ENDED = ("completed", "failed", "expired", "cancelled")  # batches
_IDENT = re.compile(r"(file-|batch_)[0-9a-f]{32}")


def new_ident(begin: str) -> str:
    """An id for a file or a batch; ids sort as they were made."""
    return f"{begin}{time.time_ns():016x}{uuid4().hex[:16]}"


@dataclass(frozen=True)
class Limits:
    """The most that each API key may have."""

    entries: int  # files, and batches
    size: int  # bytes of all files


class KeyFolder:
    """What one API key has. Records are JSON files, contents are beside them."""

    def __init__(self, path: Path, limits: Limits) -> None:
        self._path, self._limits = path, limits

    def add_file(self, name: str, purpose: str, source: BinaryIO | None = None) -> Record:
        """Keeps a file; without a source it is empty, to be written to.

        Raises:
            ApiError: there is no room.
        """
        self.check_room(1)
        ident = new_ident("file-")
        with self.content(ident).open("wb") as target:
            if source is not None:
                shutil.copyfileobj(source, target)
            size = target.tell()
        record = {
            "id": ident, "object": FILE, "bytes": size, "created_at": int(time.time()),
            "filename": name, "purpose": purpose, "status": "processed",
        }  # fmt: skip
        try:
            self.check_size()
        except ApiError:
            self.content(ident).unlink()
            raise
        self.save(record)
        return record

    def check_room(self, new: int) -> None:
        """
        Raises:
            ApiError: there is no room for so many new files, or all have too many bytes.
        """
        count = len(list(self._path.glob(f"{FILE}-*.json")))
        if count + new > self._limits.entries:
            raise _full(f"{count} of {self._limits.entries} are there")
        self.check_size()

    def check_size(self) -> None:
        """
        Raises:
            ApiError: all files together have too many bytes.
        """
        used = sum(path.stat().st_size for path in self._path.glob("*.jsonl"))
        if used > self._limits.size:
            raise _full(f"all have {used} bytes, and {self._limits.size} are allowed")

    def make_batch_room(self) -> None:
        """Forgets the oldest batch that has ended, if there are too many; its files stay.

        Raises:
            ApiError: all of them still run.
        """
        batches = self.records(BATCH)
        if len(batches) < self._limits.entries:
            return
        ended = next((batch for batch in batches if batch["status"] in ENDED), None)
        if ended is None:
            raise ApiError(400, f"{len(batches)} batches wait or run.", code="folder_full")
        (self._path / f"{ended['id']}.json").unlink()

    def records(self, kind: str) -> list[Record]:
        """All files or batches, the oldest first."""
        found = [self._read(kind, path) for path in self._path.glob(f"{kind}[-_]*.json")]
        return sorted(found, key=lambda record: (record["created_at"], record["id"]))

    def get(self, kind: str, ident: str) -> Record:
        """
        Raises:
            ApiError: 404, this key has no such file or batch.
        """
        path = self._path / f"{ident}.json"
        if not _IDENT.fullmatch(ident) or not ident.startswith(kind) or not path.is_file():
            raise ApiError(404, f"There is no {kind} {shown(ident)}.", code=f"{kind}_not_found")
        return self._read(kind, path)

    def _read(self, kind: str, path: Path) -> Record:
        """A record; results of a batch that runs have become more since it was written."""
        record: Record = json.loads(path.read_bytes())
        if kind == FILE:
            record["bytes"] = self.content(record["id"]).stat().st_size
        return record

    def save(self, record: Mapping[str, Any]) -> None:
        """Writes a record, all of it or nothing."""
        path = self._path / f"{record['id']}.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps(record))
        os.replace(new, path)

    def delete_file(self, ident: str) -> None:
        """
        Raises:
            ApiError: 404, this key has no such file.
        """
        self.get(FILE, ident)
        (self._path / f"{ident}.json").unlink()
        self.content(ident).unlink()

    def content(self, ident: str) -> Path:
        """Where the content of a file is."""
        return self._path / f"{ident}.jsonl"


def _full(why: str) -> ApiError:
    message = f"There is no room for a file: {why}. Delete files, or raise the server's"
    return ApiError(400, f"{message} --max-files or --max-files-bytes.", code="folder_full")


class BatchFolder:
    """The folders of all API keys."""

    def __init__(self, path: str, limits: Limits) -> None:
        """
        Raises:
            ConfigError: the folder cannot be made or written.
        """
        self._path, self._limits = Path(path), limits
        try:
            self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
            probe = self._path / ".probe"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"batch_folder {shown(path)} cannot be written: {error.strerror}."
            ) from None

    def of(self, key: str | None) -> KeyFolder:
        """The folder of a key by its name; None: of clients without one."""
        path = self._path / ("all" if key is None else f"key-{key}")
        path.mkdir(mode=0o700, exist_ok=True)
        return KeyFolder(path, self._limits)

    def owners(self) -> list[str | None]:
        """The names of keys that have a folder; None: clients without one do."""
        names = [path.name for path in self._path.iterdir() if path.is_dir()]
        return [None if name == "all" else name.removeprefix("key-") for name in names]
