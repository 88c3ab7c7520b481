"""Which settings and models can be divided among tensor-parallel ranks, and where a rank runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import load_model_config
from forerun.core.errors import ConfigError
from forerun.layers.communication import UnreducedRank
from forerun.layers.sharding import share_of
from forerun.models.registry import TRANSFORMERS
from forerun.platform.device import resolve_device


def rank_device(config: EngineConfig, rank: int) -> torch.device:
    """The device of this rank: GPUs of its node one after the other, from the one that `device`
    names.

    Raises:
        ConfigError: there are fewer GPUs.
    """
    first = resolve_device(config.device)
    if first.type == "cpu" or config.tp_size == 1:
        return first
    gpus, begin, ranks = torch.cuda.device_count(), first.index, config.nodes.ranks
    needed = begin + len(ranks)
    if needed > gpus:
        per_node = f" on nnodes {config.nnodes}" if config.nnodes > 1 else ""
        fix = "lower tp_size, or check CUDA_VISIBLE_DEVICES."
        if " MIG " in torch.cuda.get_device_name(first):
            fix = "a process sees one MIG instance only. Set tp_size to 1, or use whole GPUs."
        raise ConfigError(
            f"tp_size {config.tp_size}{per_node} from {first} on needs {needed} GPUs, and this"
            f" machine shows {gpus}; {fix}"
        )
    return torch.device("cuda", begin + rank - ranks.start)


def check_heads(config: EngineConfig, model_path: Path) -> None:
    """Checks them before processes are started, of which a typing error may ask for thousands.

    Raises:
        ConfigError: `tp_size` does not divide the target's attention heads, or there is no model.
    """
    heads = load_model_config(model_path).num_heads
    share_of(heads, UnreducedRank(0, config.tp_size), "attention heads")


def check_ranks(config: EngineConfig) -> None:
    """Checks them before the ranks meet.

    Raises:
        ConfigError: a setting that runs on one rank only.
    """
    where = f"with tp_size {config.tp_size}"
    if config.model_impl == TRANSFORMERS:
        raise ConfigError(f"model_impl transformers is not available {where}; drop one of them.")
    if asked := config.asks_for_pieces:
        raise ConfigError(f"{asked} is not available {where}; drop one of them.")


def config_of_rank(config: EngineConfig, rank: int) -> EngineConfig:
    """What one rank does for all, is off on the others."""
    return config if rank == 0 else replace(config, enable_trace=False)
