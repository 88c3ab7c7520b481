"""Where files are kept that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/forerun`, by default `~/.cache/forerun`.

    Raises:
        OSError: the user has no home directory.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "forerun"
    except RuntimeError:
        raise OSError("there is no home directory for the cache; set XDG_CACHE_HOME") from None
