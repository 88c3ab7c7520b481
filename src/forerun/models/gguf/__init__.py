"""GGUF files, which are read through a model folder that is made of each (`folder.py`)."""

from __future__ import annotations

from pathlib import Path

GGUF = "model.gguf"  # the weights, in that folder: a link to the file
NO_TOKENIZER = "no-tokenizer.txt"  # why the file has none that can be used


def as_given(file: Path) -> Path:
    """A file of weights under the name that the user knows, for errors."""
    target = file.readlink() if file.name == GGUF and file.is_symlink() else file
    return target if target.is_absolute() else file
