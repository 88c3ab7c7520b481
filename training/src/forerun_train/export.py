"""Writes a draft in z-lab's layout: config.json and model.safetensors, which `forerun` serves."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def export_draft(
    folder: Path,
    raw: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Writes a draft; a reader sees the old folder or the new one, whole.

    Args:
        raw: config.json.
        tensors: names of the checkpoint -> weights; floats are stored as `dtype`.
    """
    made = folder.with_name(f".making-{folder.name}")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    stored = {
        name: (t.to(dtype) if t.is_floating_point() else t).detach().cpu().contiguous()
        for name, t in tensors.items()
    }
    save_file(stored, made / "model.safetensors", metadata={"format": "pt"})
    name = str(dtype).removeprefix("torch.")
    config = {**raw, "dtype": name, "torch_dtype": name}
    (made / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    replace_folder(made, folder)


def replace_folder(made: Path, folder: Path) -> None:
    """Puts `made` in the place of `folder`, whose files reach the disk before."""
    for file in made.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    old = folder.with_name(f".old-{folder.name}")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    made.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
