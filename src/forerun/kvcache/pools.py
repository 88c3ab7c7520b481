"""K/V memory: one page space, many pools.

Every pool (target, draft) is indexed by the same page ids, so a shared prefix shares the K/V of
both. Page 0 is the null page: padded rows write there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVLayout:
    """The K/V rows one model keeps per position."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def cell_bytes(self) -> int:
        """Bytes a position takes, K and V over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVPool:
    """K and V of every page: `k[layer]`, `v[layer]` are [pages, page_size, Hkv, D]."""

    def __init__(
        self, layout: KVLayout, num_pages: int, page_size: int, device: torch.device
    ) -> None:
        self.layout = layout
        self.page_size = page_size
        shape = (
            2,
            layout.num_layers,
            num_pages,
            page_size,
            layout.num_kv_heads,
            layout.head_dim,
        )
        # Zeros, not empty: masked rows are multiplied by 0, and 0 x NaN is NaN.
        self.data: Tensor = torch.zeros(shape, dtype=layout.dtype, device=device)
        self.k: tuple[Tensor, ...] = self.data[0].unbind(0)
        self.v: tuple[Tensor, ...] = self.data[1].unbind(0)


def pages_for(memory_bytes: int, layouts: list[KVLayout], page_size: int) -> int:
    """Pages that fit: memory over the *sum* of all pools' cells (drafts count too)."""
    cell = sum(layout.cell_bytes for layout in layouts)
    return memory_bytes // (cell * page_size)
