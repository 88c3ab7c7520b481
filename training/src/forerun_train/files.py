"""What a run writes: files that a reader sees whole, the old ones or the new ones."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from forerun.core.errors import ConfigError, first_line


@contextmanager
def disk_errors(folder: Path, advice: str) -> Iterator[None]:
    """Says in one line what the disk refuses.

    Raises:
        ConfigError: in place of what files and safetensors raise.
    """
    try:
        yield
    except OSError as error:
        where, why = error.filename or folder, error.strerror or first_line(error)
        raise ConfigError(f"{where} cannot be written or read: {why}. {advice}") from error
    except SafetensorError as error:
        raise ConfigError(
            f"{folder} cannot be written or read: {first_line(error)}. {advice}"
        ) from error


def check_output(folder: Path) -> None:
    """Tries to make the folder of a run, and removes what it has made.

    Raises:
        ConfigError: the folder cannot be made, or nothing can be written in it.
    """
    missing = [each for each in (folder, *folder.parents) if not os.path.lexists(each)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        why = "it is a file" if os.path.isfile(folder) else error.strerror
        raise ConfigError(
            f"{folder} cannot be the output folder: {why}. Name another one."
        ) from None
    finally:
        for each in missing:
            with suppress(OSError):
                each.rmdir()


def read_object(path: Path, kinds: Mapping[str, type], advice: str) -> dict[str, Any]:
    """An object that was written as JSON; `kinds`: keys that it has, and of what type.

    Raises:
        ConfigError: the file is damaged.
        OSError: it cannot be read.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict) and all(isinstance(found.get(k), kinds[k]) for k in kinds):
        return found
    raise ConfigError(f"{path} is damaged. {advice}")


def write_text(path: Path, text: str) -> None:
    """Replaces a file at once."""
    made = path.with_name(f".making-{path.name}")
    made.write_text(text, encoding="utf-8")
    os.replace(made, path)


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes safetensors, which are on the disk when they have their name."""
    made = path.with_name(f".making-{path.name}")
    stored = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    made.unlink(missing_ok=True)  # of a process that was killed
    made.touch()
    mode = made.stat().st_mode
    save_file(stored, made, None if metadata is None else dict(metadata))
    made.chmod(mode)  # the library lets only the owner read it, and others may serve a draft
    with made.open("rb") as opened:
        os.fsync(opened.fileno())
    os.replace(made, path)


def export_draft(
    folder: Path,
    raw: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Writes a draft in z-lab's layout, which `forerun` serves: config.json, model.safetensors.

    Args:
        raw: config.json.
        tensors: names of the checkpoint -> weights; floats are stored as `dtype`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = str(dtype).removeprefix("torch.")
    config = {**raw, "dtype": name, "torch_dtype": name}
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    stored = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    write_tensors(folder / "model.safetensors", stored, {"format": "pt"})


def replace_folder(made: Path, folder: Path) -> None:
    """Gives a folder that is complete its name; what had it before is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    made.rename(folder)
