"""JSON files of checkpoints, which anybody may have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forerun.core.checks import half_character
from forerun.core.errors import ConfigError, first_line, shown

MAX_BYTES = 256 << 20  # of a JSON file; the largest are tokenizers and indexes of some 30 MB


def check_regular(path: Path) -> None:
    """Links to a file are followed. What else there is (a pipe, a device) may never end.

    Raises:
        ConfigError: not a regular file.
    """
    try:
        exists = path.exists()
    except OSError:  # a name that is too long
        exists = False
    if not exists:
        raise ConfigError(f"{path} does not exist. Is this a Hugging Face model folder?")
    if not path.is_file():
        raise ConfigError(f"{path} is not a regular file. Download it again.")


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        ConfigError: the file is missing, unreadable or not a JSON object.
    """
    check_regular(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path} is over {MAX_BYTES >> 20} MiB. Download it again.")
        text = path.read_text(encoding="utf-8")
        data = json.loads(text, object_pairs_hook=_unique)
        half = half_character(data) if "\\u" in text else None
        if half is not None:
            raise ValueError(f"{half} is half a character")
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply. Download it again.") from None
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # also: no UTF-8, numbers of thousands of digits
        raise ConfigError(
            f"{path} is not readable JSON: {first_line(error)}. Download it again."
        ) from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds {shown(data)}, expected a JSON object.")
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Readers differ in which of two values of a key they take."""
    out = dict(pairs)
    if len(out) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{shown(twice)} is there twice")
    return out
