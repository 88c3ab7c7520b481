"""Where replicas run: on GPUs of their own, or on a share of the CPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.platform.cpu_threads import cpu_shares
from forerun.platform.device import resolve_device


@dataclass(frozen=True)
class Placement:
    """The devices of one replica."""

    config: EngineConfig
    cpus: tuple[int, ...] = ()  # that its process may use; empty: all


def place_replicas(config: EngineConfig, count: int) -> list[Placement]:
    """
    Raises:
        ConfigError: there are fewer GPUs than replicas, or the engine has several nodes.
    """
    if count == 1:
        return [Placement(config)]
    if config.nnodes > 1:
        raise ConfigError(
            f"dp_size {count} is not available with nnodes {config.nnodes}; drop one of them, and"
            " put a router before servers of one engine each."
        )
    ranks = config.tp_size
    device = resolve_device(config.device)
    if device.type == "cpu":
        return [Placement(config, cpus) for cpus in cpu_shares(count)]
    asked = f"dp_size {count}" if ranks == 1 else f"dp_size {count} of tp_size {ranks}"
    gpus, needed = torch.cuda.device_count(), count * ranks
    if ":" in config.device:
        raise ConfigError(
            f"device {config.device!r} is one GPU, and {asked} needs {needed}; set device to cuda."
        )
    if gpus < needed:
        raise ConfigError(
            f"{asked} needs {needed} GPUs, and this machine shows {gpus}; lower dp_size, or"
            " check CUDA_VISIBLE_DEVICES."
        )
    return [Placement(replace(config, device=f"cuda:{index * ranks}")) for index in range(count)]
