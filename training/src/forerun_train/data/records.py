"""Lines of JSON: what a line may be, an index of files, and the split for validation.

A line is a conversation (`messages` as OpenAI's, `conversations` as ShareGPT's, or `prompt` and
`response`) or a `text`; each line may be of another kind. Files are read once when they are opened,
to check every line and note where it begins; a record is then read from its place.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.core.checks import half_character
from forerun.core.errors import ConfigError, first_line, shown

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES: Mapping[str, str] = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant",
    "assistant": "assistant", "chatgpt": "assistant", "model": "assistant", "bing": "assistant",
    "tool": "tool",
}  # fmt: skip
FORMS = "'messages', 'conversations', 'prompt' and 'response', or 'text'"
MAX_LINE = 8 << 20  # bytes; some two million tokens
PROMPT_FORMS = "'messages', 'conversations' or 'prompt'"

Message = dict[str, Any]  # role, content, and what else a chat template reads


class DataError(ConfigError):
    """A line that cannot be used; the message begins with its file and number."""


@dataclass(frozen=True)
class Record:
    """A line of data: a conversation, or a text."""

    where: str  # file:line
    messages: tuple[Message, ...] = ()
    text: str | None = None
    tools: Sequence[Mapping[str, Any]] | None = None  # in OpenAI's form, for the template
    truncated: bool = False  # the last answer has no end
    given_id: str | None = None
    topic: str | None = None


def parse_record(line: bytes, where: str) -> Record:
    """A line to train on.

    Raises:
        DataError: it is not JSON, of no known form, or nothing in it is the assistant's.
    """
    fields = _fields(line, where)
    if "messages" not in fields and "conversations" not in fields and "text" in fields:
        return Record(where, text=_text(fields["text"], "text", where))
    messages = _conversation(fields, where, FORMS)
    if messages is None:
        raise DataError(f"{where}: unknown form: needs {FORMS}, has {_keys(fields)}.")
    answers = [each for each in messages if each["role"] == "assistant"]
    if not answers:
        raise DataError(
            f"{where}: no turn is the assistant's, so there is nothing to learn; `forerun"
            " train regenerate` answers prompts."
        )
    if messages[0]["role"] == "assistant" and len(messages) == 1:
        raise DataError(f"{where}: the assistant's turn answers nothing; a user's turn is missing.")
    if not any(each.get("content") or each.get("tool_calls") for each in answers):
        raise DataError(f"{where}: the assistant's turns are empty.")
    return _record(fields, messages, where)


def parse_prompt(line: bytes, where: str) -> Record:
    """A line to answer: a conversation, whose answers are dropped.

    Raises:
        DataError: it is not JSON, of no known form, or has no user's turn.
    """
    fields = _fields(line, where)
    messages = _conversation({"response": None, **fields}, where, PROMPT_FORMS)
    if messages is None:
        raise DataError(f"{where}: unknown form: needs {PROMPT_FORMS}, has {_keys(fields)}.")
    kept = tuple(each for each in messages if each["role"] != "assistant")
    if not any(each["role"] == "user" for each in kept):
        raise DataError(f"{where}: no turn is a user's, so there is nothing to answer.")
    return _record(fields, kept, where)


def _record(fields: Mapping[str, Any], messages: tuple[Message, ...], where: str) -> Record:
    given = fields.get("id")
    return Record(
        where,
        messages=messages,
        tools=_tools(fields.get("tools"), where),
        truncated=bool(fields.get("truncated", False)),
        given_id=None if given is None else str(given),
        topic=fields["topic"] if isinstance(fields.get("topic"), str) else None,
    )


def _tools(given: Any, where: str) -> list[dict[str, Any]] | None:
    if given in (None, []):
        return None
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise DataError(f"{where}: tools must be a list of objects, got {shown(given)}.")
    return given


def _fields(line: bytes, where: str) -> dict[str, Any]:
    if not line.strip():
        raise DataError(f"{where}: an empty line.")
    try:
        value = json.loads(line.decode("utf-8-sig"))
        half = half_character(value) if b"\\u" in line else None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {first_line(error)}.") from None
    if half is not None:
        raise DataError(f"{where}: {half} is half a character, which no text can have.")
    if not isinstance(value, dict):
        raise DataError(f"{where}: a line must be an object, got {shown(value)}.")
    return value


def _keys(fields: Mapping[str, Any]) -> str:
    return ", ".join(map(shown, list(fields)[:8])) if fields else "nothing"


def _conversation(fields: Mapping[str, Any], where: str, forms: str) -> tuple[Message, ...] | None:
    """The messages of a line; None: it has none in a form that is known."""
    if "messages" in fields:
        return tuple(_message(each, where) for each in _turns(fields["messages"], where))
    if "conversations" in fields:
        turns = _turns(fields["conversations"], where)
        system = fields.get("system")
        first = [{"role": "system", "content": system}] if isinstance(system, str) else []
        return (*first, *(_sharegpt(each, where) for each in turns))
    if "prompt" in fields and "response" in fields:
        messages = [{"role": "user", "content": _text(fields["prompt"], "prompt", where)}]
        if fields["response"] is not None:
            answer = _text(fields["response"], "response", where)
            messages.append({"role": "assistant", "content": answer})
        return tuple(messages)
    return None


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} must be text, got {shown(value)}.")
    if not value.strip():
        raise DataError(f"{where}: {name} is empty.")
    return value


def _turns(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise DataError(f"{where}: the turns must be a list, got {shown(value)}.")
    if not value:
        raise DataError(f"{where}: the list of turns is empty.")
    return value


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict) or "role" not in turn:
        raise DataError(f"{where}: a message needs 'role' and 'content', got {shown(turn)}.")
    if turn["role"] not in ROLES:
        raise DataError(f"{where}: unknown role {shown(turn['role'])}; one of: {', '.join(ROLES)}.")
    content = turn.get("content")
    if isinstance(content, list):
        content = "\n".join(_part(part, where) for part in content)
    if not isinstance(content, str) and not (content is None and turn.get("tool_calls")):
        raise DataError(f"{where}: the content of a message must be text, got {shown(content)}.")
    return {**turn, "content": content}


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("text"), str):
        raise DataError(f"{where}: only text parts can be used, got {shown(part)}.")
    text: str = part["text"]
    return text


def _sharegpt(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict) or not {"from", "value"} <= turn.keys():
        raise DataError(f"{where}: a turn needs 'from' and 'value', got {shown(turn)}.")
    role = SHAREGPT_ROLES.get(turn["from"]) if isinstance(turn["from"], str) else None
    if role is None:
        known = ", ".join(SHAREGPT_ROLES)
        raise DataError(f"{where}: unknown role {shown(turn['from'])}; one of: {known}.")
    if not isinstance(turn["value"], str):
        raise DataError(f"{where}: a turn's value must be text, got {shown(turn['value'])}.")
    return {"role": role, "content": turn["value"]}


# --- files ----------------------------------------------------------------------------------------


@dataclass
class Skipped:
    """Lines that are left out, up to a number that the user allows."""

    allowed: int
    first: DataError | None = None
    count: int = 0

    def add(self, error: DataError) -> None:
        """Counts a line that is left out."""
        self.first = self.first or error
        self.count += 1

    def check(self) -> None:
        """
        Raises:
            DataError: there are too many; the message has the first one, and what to do.
        """
        if self.count > self.allowed:
            many = f" It is the first of {self.count} bad lines." if self.count > 1 else ""
            raise DataError(
                f"{self.first}{many} Repair or remove them, or skip up to N with --max-errors N."
            )

    def __str__(self) -> str:
        return f"{self.count} lines were skipped. The first one: {self.first}"


@dataclass(frozen=True)
class Lines:
    """Where the lines of some files begin and end: N of them."""

    files: tuple[Path, ...]
    file: NDArray[np.int32]  # [N], index into `files`
    number: NDArray[np.int64]  # [N], from 1
    start: NDArray[np.int64]  # [N], byte offsets
    size: NDArray[np.int64]  # [N], bytes
    key: NDArray[np.uint64]  # [N], hash of the line

    def __len__(self) -> int:
        return len(self.file)

    def where(self, index: int) -> str:
        """file:line."""
        return f"{self.files[int(self.file[index])]}:{int(self.number[index])}"

    @property
    def fingerprint(self) -> str:
        """Of what the lines say, in their order."""
        return hashlib.blake2b(self.key.tobytes(), digest_size=8).hexdigest()

    def take(self, chosen: NDArray[Any]) -> Lines:
        """Some of them: an index or a mask."""
        columns = (self.file, self.number, self.start, self.size, self.key)
        return Lines(self.files, *(each[chosen] for each in columns))


@dataclass
class Records:
    """Records of some lines, read from the files when they are asked for."""

    lines: Lines
    skipped: Skipped
    _handles: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> Record:
        """
        Raises:
            DataError: the line is not what it was when the file was opened.
        """
        return parse_record(self.line(index), self.lines.where(index))

    def line(self, index: int) -> bytes:
        """The bytes of a line."""
        file = int(self.lines.file[index])
        if file not in self._handles:
            self._handles[file] = os.open(self.lines.files[file], os.O_RDONLY)
        return os.pread(
            self._handles[file], int(self.lines.size[index]), int(self.lines.start[index])
        )

    def __del__(self) -> None:
        for handle in self._handles.values():
            os.close(handle)


def open_records(
    path: str | Path, validation_share: float, seed: int, max_errors: int = 0
) -> tuple[Records, Records]:
    """Records to train on, and records for validation.

    A line is for validation if a hash of its bytes and the seed falls below the share, so lines
    that are added or moved leave the others where they are, and equal lines stay together.

    Args:
        path: a JSONL file, or a folder of them.
        validation_share: above 0, below 1; at least one line is for validation.
        max_errors: so many lines that cannot be used are left out.

    Raises:
        ConfigError: there is no such file, it has too few lines, or too many that are bad.
    """
    skipped = Skipped(max_errors)
    lines = index_lines(data_files(path), seed, skipped)
    if len(lines) < 2:
        raise ConfigError(
            f"{path} has {len(lines)} usable lines; two are needed, one of them for validation."
        )
    held = lines.key < np.uint64(min(validation_share, 1.0) * (2**64 - 1))
    if not held.any():
        held[np.argmin(lines.key)] = True
    if held.all():
        held[np.argmax(lines.key)] = False
    return Records(lines.take(~held), skipped), Records(lines.take(held), skipped)


def data_files(path: str | Path) -> tuple[Path, ...]:
    """A JSONL file, or the files of a folder that end in .jsonl, by name.

    Raises:
        ConfigError: there is none.
    """
    path = Path(path).expanduser()
    files = tuple(sorted(path.glob("*.jsonl"))) if path.is_dir() else (path,)
    if not files:
        raise ConfigError(f"{path} has no file that ends in .jsonl.")
    for each in files:
        if not each.exists():
            raise ConfigError(f"{each}: there is no such file.")
        if not each.is_file():  # a pipe or a device may never end
            raise ConfigError(f"{each} is not a regular file.")
    return files


def raw_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Lines of a file as (number from 1, byte offset, bytes), without blank ones at its end.

    Raises:
        ConfigError: it cannot be read.
    """
    start = 0
    blank: list[tuple[int, int, bytes]] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(partial(file.readline, MAX_LINE + 1), b""), 1):
                if len(line) > MAX_LINE:
                    raise DataError(f"{path}:{number}: a line of more than {MAX_LINE >> 20} MiB.")
                if line.strip():
                    yield from blank
                    blank = []
                    yield number, start, line
                else:
                    blank.append((number, start, line))
                start += len(line)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None


def index_lines(files: Sequence[Path], seed: int, skipped: Skipped) -> Lines:
    """Reads files once: checks every line, and notes where it is.

    Raises:
        DataError: more lines are bad than `skipped` allows.
    """
    salt = str(seed).encode()
    rows: list[tuple[int, int, int, int]] = []
    keys: list[int] = []
    for index, path in enumerate(files):
        for number, start, line in raw_lines(path):
            try:
                parse_record(line, f"{path}:{number}")
            except DataError as error:
                skipped.add(error)
                continue
            rows.append((index, number, start, len(line)))
            keys.append(line_key(line, salt))
    skipped.check()
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    return Lines(
        tuple(files),
        file=table[:, 0].astype(np.int32),
        number=table[:, 1].copy(),
        start=table[:, 2].copy(),
        size=table[:, 3].copy(),
        key=np.array(keys, dtype=np.uint64),
    )


def line_key(line: bytes, salt: bytes = b"") -> int:
    """A hash of a line, without white space around it: 64 bits."""
    return int.from_bytes(hashlib.blake2b(line.strip(), digest_size=8, key=salt).digest(), "little")
