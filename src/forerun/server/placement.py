"""Where replicas run: one GPU each, or a share of the CPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.platform.cpu_threads import cpu_shares
from forerun.platform.device import resolve_device


@dataclass(frozen=True)
class Placement:
    """Of one replica."""

    config: EngineConfig
    cpus: tuple[int, ...] = ()  # that its process may use; empty: all


def place_replicas(config: EngineConfig, count: int) -> list[Placement]:
    """
    Raises:
        ConfigError: there are fewer GPUs than replicas.
    """
    if count == 1:
        return [Placement(config)]
    device = resolve_device(config.device)
    if device.type == "cpu":
        return [Placement(config, cpus) for cpus in cpu_shares(count)]
    if ":" in config.device:
        raise ConfigError(
            f"device {config.device!r} is one GPU, and dp_size {count} needs {count}; set device to"
            " cuda."
        )
    gpus = torch.cuda.device_count()
    if gpus < count:
        raise ConfigError(
            f"dp_size {count} needs {count} GPUs, and this machine shows {gpus}; lower dp_size, or"
            " check CUDA_VISIBLE_DEVICES."
        )
    return [Placement(replace(config, device=f"cuda:{index}")) for index in range(count)]
