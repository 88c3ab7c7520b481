"""How many K/V pages there are: memory over the sum of all pools' cells."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.kvcache.pools import KVLayout, pages_for
from forerun.platform.device import memory

CPU_BUDGET = 4 << 30  # bytes; a CPU shares its memory with everything else


@dataclass(frozen=True)
class KVBudget:
    num_pages: int  # page 0, which is nobody's, included
    cell_bytes: int  # a position, over all pools

    def describe(self, page_size: int) -> str:
        tokens = (self.num_pages - 1) * page_size
        return f"{tokens} tokens, {tokens * self.cell_bytes / 2**20:.0f} MiB"


def kv_budget(
    config: EngineConfig,
    layouts: list[KVLayout],
    device: torch.device,
    tokens_wanted: int,
    tokens_least: int,
) -> KVBudget:
    """Pages from what memory is left after the weights, never more than can be used.

    `tokens_wanted`: every slot at the full context; `tokens_least`: one request of one token.

    Raises:
        ConfigError: not even one request fits.
    """
    page = config.page_size
    cell = sum(layout.cell_bytes for layout in layouts)
    most = -(-tokens_wanted // page)
    if config.max_total_tokens is not None:
        pages = min(-(-config.max_total_tokens // page), most)
    else:
        free, total = memory(device)
        if device.type == "cpu":
            budget = min(int(free * config.mem_fraction_static), CPU_BUDGET)
        else:
            budget = free - int(total * (1 - config.mem_fraction_static))
        pages = min(pages_for(max(budget, 0), layouts, page), most)
    if pages * page < tokens_least:
        raise ConfigError(
            f"K/V memory holds {pages * page} tokens and one request needs {tokens_least};"
            " raise mem_fraction_static or max_total_tokens, or lower page_size."
        )
    return KVBudget(pages + 1, cell)
