"""Checkpoints from which a run goes on as if it had never ended: safetensors and JSON.

A checkpoint is a folder that is complete once it has its name. Random numbers need no state: those
of a step are a function of the seed and the step.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from forerun.core.errors import ConfigError, shown
from forerun_train.files import (
    disk_errors,
    read_object,
    replace_folder,
    write_tensors,
    write_text,
)
from forerun_train.trainer.distributed import Ranks, divided_as, whole, whole_parameters
from forerun_train.trainer.optimizer import Optimizers
from forerun_train.trainer.options import BY_CONTENTS

KEPT = 2  # the newest checkpoints
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
KEPT_STATE = {  # of a run
    "settings": dict, "contents": dict, "data": dict, "progress": dict, "best": float,
}  # fmt: skip
MAKING = ".making"  # has no name yet
FALL_BACK = "Remove {}, and --resume goes on from the checkpoint before."


class Checkpoints:
    """The checkpoints of a run's folder."""

    def __init__(self, output: Path, ranks: Ranks) -> None:
        self.folder, self._ranks = output / "checkpoints", ranks

    def newest(self) -> Path | None:
        """The last complete checkpoint."""
        return next(reversed(self._complete()), None)

    def _complete(self) -> list[Path]:
        """Checkpoints from the oldest to the newest."""
        return sorted(each.parent for each in self.folder.glob(f"step-{8 * '[0-9]'}*/{STATE}"))

    def save(
        self, step: int, model: nn.Module, optimizers: Optimizers, state: Mapping[str, Any]
    ) -> None:
        """Writes a checkpoint and removes old ones; every rank must call it.

        `state`: what JSON can hold, by `KEPT_STATE`.
        """
        parameters, moments = whole_parameters(model), optimizer_tensors(optimizers)
        if not self._ranks.first:
            return
        made = self.folder / MAKING
        shutil.rmtree(made, ignore_errors=True)  # of a process that was killed
        made.mkdir(parents=True)
        write_tensors(made / MODEL, parameters)
        write_tensors(made / OPTIMIZER, moments)
        write_text(made / STATE, json.dumps({"step": step, **state}, indent=1))
        replace_folder(made, self.folder / f"step-{step:08d}")
        for old in self._complete()[:-KEPT]:
            shutil.rmtree(old)

    def load(self, folder: Path, model: nn.Module, optimizers: Optimizers) -> None:
        """Fills model and optimizers from a checkpoint.

        Raises:
            ConfigError: a file is damaged.
        """
        with disk_errors(folder, FALL_BACK.format(folder)):
            parameters, moments = load_file(folder / MODEL), load_file(folder / OPTIMIZER)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(divided_as(parameters[name], parameter))
        load_optimizer_tensors(optimizers, moments)


def read_state(folder: Path) -> dict[str, Any]:
    """What was given to `Checkpoints.save`, and the step.

    Raises:
        ConfigError: the file is damaged.
    """
    return read_object(folder / STATE, {"step": int} | KEPT_STATE, FALL_BACK.format(folder))


def check_same_settings(stored: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compares settings, but for `BY_CONTENTS` and what an older version did not have.

    Raises:
        ConfigError: the run that is resumed had other settings.
    """
    compared = [name for name in now if name not in BY_CONTENTS]
    differing = [name for name in compared if stored.get(name, now[name]) != now[name]]
    if differing:
        changes = ", ".join(
            f"{name} was {shown(stored.get(name))} and is {shown(now[name])}" for name in differing
        )
        raise ConfigError(
            f"A resumed run keeps its settings, but {changes}. Restore them, or start anew in"
            " another output folder."
        )


def check_same_contents(stored: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compares fingerprints of what the settings name, wherever that is now.

    Raises:
        ConfigError: the run that is resumed read something else.
    """
    differing = [name for name in now if stored.get(name) != now[name]]
    if differing:
        raise ConfigError(
            f"A resumed run goes on with what it began with, but {' and '.join(differing)} changed"
            " since. Put back what was there, or start anew in another output folder."
        )


def optimizer_tensors(optimizers: Optimizers) -> dict[str, Tensor]:
    """The state of all optimizers: {index}.{key}.{parameter}; every rank must ask."""
    names = {id(p): name for name, p in optimizers.parameters.items()}
    return {
        f"{i}.{key}.{names[id(parameter)]}": whole(value)
        for i, optimizer in enumerate(optimizers.all)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def load_optimizer_tensors(optimizers: Optimizers, tensors: Mapping[str, Tensor]) -> None:
    """Puts back what `optimizer_tensors` gave."""
    for name, value in tensors.items():
        index, key, parameter_name = name.split(".", 2)
        optimizer, parameter = optimizers.all[int(index)], optimizers.parameters[parameter_name]
        if value.ndim == 0:  # a counter
            fused = optimizer.defaults.get("fused", False)
            kept = value.to(parameter.device) if fused else value
        else:
            kept = divided_as(value, parameter)
        optimizer.state[parameter][key] = kept
