"""Sums of hidden states that requests return instead of text, chunk by chunk of their prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from forerun.core.plan import PrefillChunk
from forerun.core.pooling import Pooling
from forerun.platform.device import upload

GROUP_BYTES = 64 << 20  # rows that are added together, in float64
# Rows are rounded to multiples of 1 / SCALE. Sums of such numbers are exact in float64 up to
# 2^23: then a mean depends neither on the order of addition nor on how a prompt is divided.
SCALE = 2.0**30


class PooledSpan(NamedTuple):
    """Consecutive rows of one chunk that are added up."""

    chunk: int  # index in the prefill
    before_end: int  # of the first row: how far it is before the chunk's last one
    length: int


@dataclass(frozen=True)
class PoolQuery:
    """What requests of a prefill pool; known on the host."""

    spans: tuple[PooledSpan, ...]  # at most one per chunk, in their order

    @classmethod
    def of(cls, chunks: Sequence[PrefillChunk], asked: Mapping[int, Pooling | None]) -> Self | None:
        """`asked`: by slot. None: no chunk has a row that is pooled."""
        spans = []
        for index, chunk in enumerate(chunks):
            first = chunk.num_tokens - 1
            match asked[chunk.slot]:
                case "last" if chunk.last:
                    spans.append(PooledSpan(index, 0, 1))
                case "cls" if chunk.start == 0:
                    spans.append(PooledSpan(index, first, 1))
                case "mean":
                    spans.append(PooledSpan(index, first, chunk.num_tokens))
        return cls(tuple(spans)) if spans else None

    @property
    def reads_ends_only(self) -> bool:
        """Whether the chunks' last rows are enough."""
        return not any(span.before_end for span in self.spans)

    def sums(self, hidden_states: Tensor, last_index: Sequence[int]) -> Tensor:
        """Adds up the rows of each span.

        Args:
            hidden_states: [T, H]; of the chunks' last tokens alone, if `reads_ends_only`.
            last_index: of each chunk, the row of its last token.

        Returns:
            [R, H] float64, one row per span.
        """
        device, size = hidden_states.device, hidden_states.shape[1]
        owners = torch.cat([torch.full((s.length,), i) for i, s in enumerate(self.spans)])
        firsts = [last_index[span.chunk] - span.before_end for span in self.spans]
        spans = zip(firsts, self.spans, strict=True)
        rows = torch.cat([torch.arange(first, first + span.length) for first, span in spans])
        rows, owners = upload(rows, device), upload(owners, device)
        out = torch.zeros(len(self.spans), size, dtype=torch.float64, device=device)
        group = max(1, GROUP_BYTES // (8 * size))
        for some, of in zip(rows.split(group), owners.split(group), strict=True):
            out.index_add_(0, of, hidden_states[some].double().mul_(SCALE).round_())
        return out.div_(SCALE)


@dataclass(frozen=True)
class PoolCopy:
    """The sums of a query, being copied to the host."""

    query: PoolQuery
    sums: Tensor  # [R, H] float64

    def of_prefill(self, num_chunks: int) -> list[bytes]:
        """`StepResult.prefill_pooled`, once the step has completed."""
        out = [b""] * num_chunks
        for span, row in zip(self.query.spans, self.sums.numpy(), strict=True):
            out[span.chunk] = row.tobytes()
        return out
