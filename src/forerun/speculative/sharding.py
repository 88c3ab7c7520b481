"""A draft that is divided among ranks (`--speculative-draft-tp-size`): what a rank has of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.kvcache.layouts import ModelLayout
from forerun.layers.communication import SINGLE_RANK, Communicator, UnreducedRank


def rank_layout(
    config: EngineConfig,
    folder: Path,
    layout: Callable[[Communicator], ModelLayout],
) -> ModelLayout:
    """What the draft's layers keep on a rank, for `SpecCaps.draft_kv`.

    Args:
        layout: that of one of these ranks.

    Raises:
        ConfigError: the draft cannot be divided as the settings ask for.
    """
    ranks = config.speculative_draft_tp_size
    comm = UnreducedRank(0, ranks) if ranks > 1 else SINGLE_RANK
    try:
        return layout(comm)
    except ConfigError as error:
        if ranks == 1:
            raise
        where = f"speculative_draft_tp_size {ranks}: the draft {folder}"
        raise ConfigError(f"{where}: {error}") from None
