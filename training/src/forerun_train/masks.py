"""Which keys a query sees, as one function for FlexAttention on a GPU and a dense mask on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from forerun.attention.base import LayerMask, Mask

# (sequence, head, query, key) -> whether it is seen; index tensors that broadcast.
Seen = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
AttentionMask = BlockMask | Tensor  # for flex_attention; or bool [B, 1, Q, K]


BLOCK = 128  # queries, and keys, of FlexAttention's blocks
PART = 1 << 26  # pairs of a query and a key that are looked at at once


@cache
def _compiled_attention() -> Any:
    """Made when first called: a CPU need not import the compiler."""
    return torch.compile(flex_attention, dynamic=False)


@dataclass(frozen=True)
class MaskShape:
    """B sequences of Q queries and K keys, on a device."""

    batch: int
    queries: int
    keys: int
    device: torch.device


def make_mask(seen: Seen, shape: MaskShape) -> AttentionMask:
    """The mask of a function: of blocks on a GPU, dense elsewhere."""
    if shape.device.type == "cuda":
        return block_mask(seen, shape)
    return _pairs(seen, shape, 0, shape.queries)


def block_mask(seen: Seen, shape: MaskShape) -> BlockMask:
    """The mask of a function, in blocks, of which it holds as many rows at once as `PART` allows.

    PyTorch's `create_block_mask` holds all pairs, or compiles a kernel for minutes.
    """
    keys = -(-shape.keys // BLOCK)
    rows = max(1, PART // (shape.batch * keys * BLOCK * BLOCK)) * BLOCK
    some, whole = [], []
    for first in range(0, shape.queries, rows):
        pairs = _pairs(seen, shape, first, min(rows, shape.queries - first))
        missing = -pairs.shape[2] % BLOCK
        pairs = F.pad(pairs, (0, keys * BLOCK - shape.keys, 0, missing))
        blocks = pairs.unflatten(3, (keys, BLOCK)).unflatten(2, (-1, BLOCK))
        some.append(blocks.any(5).any(3))
        whole.append(blocks.all(5).all(3))
    full = torch.cat(whole, 2)
    partly, entirely = (_first_of(each) for each in (torch.cat(some, 2) & ~full, full))
    return BlockMask.from_kv_blocks(
        *partly, *entirely, BLOCK, seen, seq_lengths=(shape.queries, shape.keys)
    )


def _pairs(seen: Seen, shape: MaskShape, first: int, queries: int) -> Tensor:
    """Which keys are seen by some queries, from `first` on, bool [B, 1, queries, K]."""
    index = torch.arange(max(shape.batch, first + queries, shape.keys), device=shape.device)
    batch, key = index[: shape.batch].view(-1, 1, 1, 1), index[: shape.keys].view(1, 1, 1, -1)
    query = index[first : first + queries].view(1, 1, -1, 1)
    return seen(batch, index[:1], query, key).expand(shape.batch, 1, queries, shape.keys)


def _first_of(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys are chosen for each of queries, and all of them, the chosen first."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> Tensor:
    """q [B, Hq, Q, D] over k, v [B, Hkv, K, D] -> [B, Hq, Q, D]."""
    grouped = q.shape[1] != k.shape[1]
    out: Tensor
    if isinstance(mask, Tensor):
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped
        )
    else:
        within = torch.compiler.is_compiling()
        flex: Any = flex_attention if within else _compiled_attention()
        out = flex(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped)
    return out


def causal_in_documents(document_ids: Tensor, window: int | None = None) -> Seen:
    """Packed sequences [B, T]: a token sees those before it in its document, and itself."""

    def seen(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        visible = (kv <= q) & (document_ids[b, kv] == document_ids[b, q])
        return visible if window is None else visible & (kv > q - window)

    return seen


@dataclass(frozen=True)
class BlockPlaces:
    """N blocks in each of B sequences.

    A block has `rows` rows and stands at its anchor; the context of the anchor's document begins at
    `first`. Both are int64 [B, N] places in a sequence of `length` tokens.
    """

    first: Tensor
    anchors: Tensor
    rows: int
    length: int


def blocks_after_context(places: BlockPlaces, layer: LayerMask) -> Seen:
    """Queries: the rows of all blocks [N · R]; keys: T context tokens, then these rows.

    A row sees its document strictly before its anchor, and its block: of that, what is not after
    it, where the layer is causal. Windows are those of serving (`attention/torch_native.py`).
    """
    first, anchors, rows, length = places.first, places.anchors, places.rows, places.length
    causal, window = layer.mask is Mask.CAUSAL, layer.window

    def seen(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        block, row = q // rows, q % rows
        anchor = anchors[b, block]
        context = (kv < anchor) & (kv >= first[b, block])
        own = (kv >= length) & ((kv - length) // rows == block)
        if causal:
            own = own & ((kv - length) % rows <= row)
        if window is not None:
            oldest = anchor - window if layer.mask is Mask.BLOCK else anchor + row - window + 1
            context = context & (kv >= oldest)
            if layer.mask is not Mask.BLOCK:
                own = own & (((kv - length) % rows - row).abs() < window)
        return context | own

    return seen
