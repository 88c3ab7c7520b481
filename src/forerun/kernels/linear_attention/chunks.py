"""How prefill chunks are cut for linear attention: which tokens a CTA takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64  # tokens whose outputs are computed at once (Gated DeltaNet's chunks)


@dataclass(frozen=True)
class PromptChunks:
    """Tokens of B requests, one after another.

    `requests` [B, 2] int32: first token in the batch, number of tokens. `chunks` [n, 4] int32: the
    request, its first token in the batch, its number of tokens, the chunk's first token among them.
    """

    num_tokens: tuple[int, ...]  # host
    requests: Tensor
    chunks: Tensor

    @classmethod
    def of(cls, num_tokens: Sequence[int], upload: Callable[[Tensor], Tensor]) -> PromptChunks:
        """`upload`: host tensor to device."""
        count = torch.tensor(num_tokens, dtype=torch.int64)
        begin = count.cumsum(0) - count
        pieces = (count + CHUNK - 1) // CHUNK
        request = torch.arange(len(count)).repeat_interleave(pieces)
        first = (torch.arange(len(request)) - (pieces.cumsum(0) - pieces)[request]) * CHUNK
        entries = torch.stack((request, begin[request], count[request], first), 1)
        flat = torch.cat((torch.stack((begin, count), 1).flatten(), entries.flatten())).int()
        requests, chunks = upload(flat).split_with_sizes((2 * len(count), entries.numel()))
        return cls(tuple(num_tokens), requests.view(-1, 2), chunks.view(-1, 4))
