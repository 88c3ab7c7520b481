"""`run`: trains a draft as the options say and exports it."""

from __future__ import annotations

from pathlib import Path

from forerun_train.trainer.options import TrainOptions


def run(options: TrainOptions) -> Path:
    """Trains, and returns the folder of the exported draft."""
    raise NotImplementedError(f"training of {options.kind}")
