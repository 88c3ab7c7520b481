"""MLA in prefill: K and V expanded per head from latent rows, and when that is the cheaper way.

A latent row [c | k_rope] holds Dl + Dr values. K of a head is [W_UK c | k_rope] (Dn + Dr values),
V is W_UV c (Dv values); see DeepSeek-V2, arXiv 2405.04434, section 2.1.

    absorbed   W_UK goes into q and W_UV behind the softmax: one K/V head of Dl + Dr and Dl values
    expanded   K and V of every head are computed from the rows of the whole context

Tokens of decode steps read long contexts: they use the absorbed form. Prefill chunks use either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.runtime.fp8 import as_bits

# K and V of as many heads as fit are expanded at once: what a long context needs at most.
EXPANDED_BYTES = 256 << 20


@dataclass(frozen=True)
class LatentDims:
    """Sizes of one head of an MLA layer."""

    latent: int  # Dl, kv_lora_rank
    rope: int  # Dr, qk_rope_head_dim
    nope: int  # Dn, qk_nope_head_dim
    v: int  # Dv, v_head_dim

    @property
    def qk(self) -> int:
        """Dn + Dr: of q and expanded K."""
        return self.nope + self.rope

    def expanding_is_cheaper(
        self, chunks: Sequence[tuple[int, int]], absorbed_speedup: float = 1.0
    ) -> bool:
        """Whether a prefill takes less time with expanded K and V; by host values alone.

        Per head, a chunk of n tokens after `start` others has P = n · start + n (n + 1) / 2 pairs
        of a token and a position it sees. The multiply-adds are

            absorbed   P · (2 Dl + Dr)      + n · Dl · (Dn + Dv)            (W_UK q, W_UV o)
            expanded   P · (Dn + Dr + Dv)   + (start + n) · Dl · (Dn + Dv)  (K, V of the context)

        and absorbed attention does `absorbed_speedup` (s) times as many per second, so expanding
        pays where P · ((2 Dl + Dr) / s - Dn - Dr - Dv) > start · Dl · (Dn + Dv). With DeepSeek's
        sizes it does for a prompt that starts at 0, and over a context of 32,768 positions from
        n = 171 on (s = 1) or n = 581 on (s = 2).

        Args:
            chunks: (start, n) of each request, as `AttentionBatch.ragged`.
            absorbed_speedup: from the backend.
        """
        pairs = sum(n * start + n * (n + 1) // 2 for start, n in chunks)
        context = sum(start for start, _ in chunks)
        saved = (2 * self.latent + self.rope) / absorbed_speedup - self.qk - self.v
        return pairs * saved > context * self.latent * (self.nope + self.v)


class LatentExpand(ABC):
    """W_UK and W_UV of one layer."""

    num_heads: int  # Hq
    dims: LatentDims

    @abstractmethod
    def __call__(self, rows: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """Latent rows [S, Dl + Dr] -> k [S, h, Dn + Dr], v [S, h, Dv] of h = len(heads) heads.

        `heads` has start and stop, and no step. Rows may be of any requests, in any order.
        """

    def head_groups(self, num_rows: int, itemsize: int) -> Iterator[slice]:
        """All heads, in groups whose K and V of `num_rows` rows fit in `EXPANDED_BYTES`."""
        per_head = num_rows * (self.dims.qk + self.dims.v) * itemsize
        count = max(1, min(self.num_heads, EXPANDED_BYTES // max(1, per_head)))
        for first in range(0, self.num_heads, count):
            yield slice(first, min(first + count, self.num_heads))


class LatentProjection(LatentExpand):
    """The same matrices for both forms."""

    @abstractmethod
    def absorb(self, q_nope: Tensor, out: Tensor) -> None:
        """[T, Hq, Dn] -> out [T, Hq, Dl] (any strides), to be multiplied with latent rows."""

    @abstractmethod
    def project_v(self, latent: Tensor) -> Tensor:
        """Sums of latent rows [T, Hq, Dl] -> sums of V, [T, Hq, Dv]."""


def attend_expanded_ref(
    q: Tensor,
    pool: Tensor,
    page_table: Tensor,
    chunks: Sequence[tuple[int, int]],
    expand: LatentExpand,
    scale: float,
    window: int | None,
) -> Tensor:
    """Causal attention of prefill chunks with expanded K and V.

    Args:
        q: [T, Hq, Dn + Dr], the chunks one after another.
        pool: [pages, P, Dl + Dr]; holds the rows of the chunks too.
        page_table: [B, pages] int32.
        chunks: (start, tokens) of each request.
        expand: of the layer.
        scale: scores are scale · q·k.
        window: of `LayerMask`.

    Returns:
        [T, Hq, Dv].
    """
    out = q.new_empty(q.shape[0], expand.num_heads, expand.dims.v)
    page, first = pool.shape[1], 0
    for request, (start, count) in enumerate(chunks):
        used = -(-(start + count) // page)
        pages = page_table[request, :used].long()
        rows = as_bits(pool).index_select(0, pages).view(pool.dtype)
        rows = rows.flatten(0, 1)[: start + count].to(q.dtype)
        mask = _seen(start, count, window, q.device)
        own = slice(first, first + count)
        for heads in expand.head_groups(start + count, q.element_size()):
            k, v = (x.transpose(0, 1).unsqueeze(0) for x in expand(rows, heads))
            tile = q[own, heads].transpose(0, 1).unsqueeze(0)
            got = F.scaled_dot_product_attention(tile, k, v, attn_mask=mask, scale=scale)
            out[own, heads] = got[0].transpose(0, 1)
        first += count
    return out


def _seen(start: int, count: int, window: int | None, device: torch.device) -> Tensor:
    """[n, start + n] bool: whether a token of the chunk sees a position."""
    kv = torch.arange(start + count, device=device)
    last = torch.arange(start, start + count, device=device).unsqueeze(1)
    seen = kv <= last
    return seen if window is None else seen & (kv > last - window)
