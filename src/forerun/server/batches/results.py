"""Reads what a batch has written already, so that it can go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import BinaryIO

from forerun.core.errors import ConfigError, shown

Results = dict[int, tuple[str | None, bool]]  # line → custom id, and whether it was answered


def read_results(output: BinaryIO, path: Path) -> Results:
    """The results in a file, which is at its end afterwards; what a kill has cut off is removed.

    Raises:
        ConfigError: the file has something else.
    """
    results: Results = {}
    end = 0
    for raw in output:
        if not raw.endswith(b"\n"):
            break
        end += len(raw)
        try:
            value = json.loads(raw)
            number = int(value["id"].rpartition("_")[2])
            response = value["response"]
            completed = response is not None and response["status_code"] < 400
            results[number] = value["custom_id"], completed
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(
                f"output {shown(str(path))} is there and has a line that is no result of a batch;"
                " name another file."
            ) from None
    output.seek(end)
    output.truncate()
    return results
