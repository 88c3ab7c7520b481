"""A draft that is divided among ranks (`--speculative-draft-tp-size`): what a rank has of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import ModelConfig
from forerun.core.errors import ConfigError
from forerun.layers.communication import SINGLE_RANK, Communicator, UnreducedRank
from forerun.speculative.base import SpecCaps, SpeculativeAlgorithm
from forerun.speculative.check import resolve_caps

# Each layer of a divided draft adds two sums across ranks, about 5 us on two H200, and reads a part
# of its weights only, which saves more from this hidden size on (docs/performance.md).
MIN_DIVIDED_SIZE = 2048

Part = TypeVar("Part")


def divides_by_default(hidden_size: int) -> bool:
    """Whether ranks on GPUs divide a draft of this hidden size."""
    return hidden_size >= MIN_DIVIDED_SIZE


def resolve_draft(
    config: EngineConfig,
    algorithm: SpeculativeAlgorithm,
    target: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[EngineConfig, SpecCaps]:
    """The algorithm's needs, and `config` with `speculative_draft_tp_size` set if ranks divide the
    draft by default: a large one, or one that reads what the target's ranks divide.

    Raises:
        ConfigError: as `resolve_caps`.
    """
    # Experts that --ep-size keeps whole may be quantized in groups that cannot be divided.
    asks = config.speculative_draft_tp_size is None and config.tp_size > 1 and config.ep_size == 1
    if asks and device.type == "cuda" and algorithm.shards_draft:
        divided = replace(config, speculative_draft_tp_size=config.tp_size)
        # What else is wrong is so with a whole draft too.
        with suppress(ConfigError):
            caps = resolve_caps(algorithm, divided, target, dtype)
            if divides_by_default(caps.draft_hidden_size):
                return divided, caps
    caps = resolve_caps(algorithm, config, target, dtype)
    if not caps.reads_target_kv or config.draft_ranks == config.tp_size:
        return config, caps
    if config.speculative_draft_tp_size is not None:
        raise ConfigError(
            f"speculative_draft_tp_size {config.speculative_draft_tp_size}: the draft reads the"
            f" target's K/V, which tp_size {config.tp_size} divides; drop it."
        )
    divided = replace(config, speculative_draft_tp_size=config.tp_size)
    return divided, resolve_caps(algorithm, divided, target, dtype)


def of_rank(config: EngineConfig, folder: Path, make: Callable[[Communicator], Part]) -> Part:
    """What a rank has of the draft, such as the layout of its K/V for `SpecCaps.draft_kv`.

    Args:
        make: makes it for one of these ranks.

    Raises:
        ConfigError: the draft cannot be divided as the settings ask for.
    """
    ranks = config.draft_ranks
    comm = UnreducedRank(0, ranks) if ranks > 1 else SINGLE_RANK
    try:
        return make(comm)
    except ConfigError as error:
        if ranks == 1:
            raise
        where = f"speculative_draft_tp_size {ranks}: the draft {folder}"
        raise ConfigError(f"{where}: {error}") from None
