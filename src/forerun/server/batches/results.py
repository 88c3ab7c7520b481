"""Reads what a batch has written already, so that it can go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import BinaryIO

from forerun.core.errors import ConfigError, shown
from forerun.server.batches.lines import PREFIX

_BEGIN = f'{{"id":"{PREFIX}'.encode()  # of every line
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
            if not raw.startswith(_BEGIN) and not _BEGIN.startswith(raw):
                raise _no_results(path)
            break
        end += len(raw)
        try:
            value = json.loads(raw)
            number = int(value["id"].rpartition("_")[2])
            response = value["response"]
            completed = response is not None and response["status_code"] < 400
            results[number] = value["custom_id"], completed
        except (ValueError, KeyError, TypeError, AttributeError):
            raise _no_results(path) from None
    output.seek(end)
    output.truncate()
    return results


def _no_results(path: Path) -> ConfigError:
    return ConfigError(
        f"output {shown(str(path))} is there and has a line that is no result of a batch;"
        " name another file."
    )
