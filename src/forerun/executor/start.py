"""Starts the executor that the settings ask for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from forerun.config.engine_config import EngineConfig
from forerun.executor.build import build_executor
from forerun.executor.device_executor import DeviceExecutor

if TYPE_CHECKING:
    from forerun.executor.ranks.executor import RanksExecutor


def start_executor(
    config: EngineConfig, model_path: Path, overlap_depth: int | None = None
) -> DeviceExecutor | RanksExecutor:
    """Starts it in this process or, with `tp_size`, in a process per rank.

    Raises:
        ConfigError: invalid settings or checkpoint, or not enough memory.
    """
    if config.tp_size == 1:
        return build_executor(config, model_path, overlap_depth)
    from forerun.executor.ranks.executor import RanksExecutor

    return RanksExecutor.start(config, model_path, overlap_depth)
