"""The tiles of ragged prefill chunks: which tokens each CTA takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Spans = Sequence[tuple[int, int]]  # (start position, number of tokens) of each request


@dataclass(frozen=True)
class TileMap:
    """Which tokens each CTA takes.

    `entries` [tiles, 4] int32: the request, its first token in the batch, its number of tokens, the
    tile's first token among them. `next_work` [1] int32: a counter that persistent CTAs take tiles
    from (`prefill_sm90.py`); 0 before and after every launch.
    """

    entries: Tensor
    next_work: Tensor
    tokens_per_tile: int


def build_tile_map(
    spans: Spans, tokens_per_tile: int, upload: Callable[[Tensor], Tensor]
) -> TileMap:
    """Builds it on the host. `upload`: host tensor to device."""
    start, count = torch.tensor(spans, dtype=torch.int64).view(-1, 2).unbind(1)
    begin = count.cumsum(0) - count
    order = (start + count).argsort(descending=True, stable=True)
    tiles = ((count + tokens_per_tile - 1) // tokens_per_tile)[order]
    request = order.repeat_interleave(tiles)
    tile = tiles.cumsum(0).repeat_interleave(tiles) - 1 - torch.arange(request.shape[0])
    first = tile * tokens_per_tile
    entries = torch.stack((request, begin[request], count[request], first), 1)
    counter = torch.zeros(1, 4, dtype=torch.int64)  # in the same upload
    uploaded = upload(torch.cat((entries, counter)).int())
    return TileMap(uploaded[:-1], uploaded[-1, :1], tokens_per_tile)
