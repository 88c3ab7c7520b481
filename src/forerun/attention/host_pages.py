"""Page lists in CSR form, built on the host: what FlashInfer's wrappers plan with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from forerun.attention.base import AttentionBatch, DecodeShape, HostBatch
from forerun.kvcache.pages import NULL_PAGE
from forerun.platform.device import upload


@dataclass(frozen=True)
class PageLists:
    """Queries and pages of B requests. On the host, but for `indices`; all int32."""

    qo_indptr: Tensor  # [B + 1]: first token of each request
    kv_indptr: Tensor  # [B + 1]: first page of each request in `indices`
    indices: Tensor  # [n] page ids, on the device
    kv_lens: Tensor  # [B]: K/V of each request, its own tokens included
    last_page_len: Tensor  # [B]: tokens in the last page

    @classmethod
    def of(
        cls,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        pages: Sequence[Sequence[int]],
        page_size: int,
        device: torch.device,
    ) -> PageLists:
        """`pages` of a request may be fewer than its length needs: null pages follow (padding)."""
        used = [-(-length // page_size) for length in kv_lens]
        indices: list[int] = []
        for count, own in zip(used, pages, strict=True):
            indices += own[:count]
            indices += [NULL_PAGE] * (count - len(own))
        last = [n - (count - 1) * page_size for n, count in zip(kv_lens, used, strict=True)]
        return cls(
            _int32([0, *accumulate(q_lens)]),
            _int32([0, *accumulate(used)]),
            upload(_int32(indices), device),
            _int32(kv_lens),
            _int32(last),
        )

    @classmethod
    def of_step(cls, shape: DecodeShape, host: HostBatch, page_size: int) -> PageLists:
        """Returns the pages of a decode shape; `host` has exact lengths and page ids."""
        assert host.pages is not None
        lengths = [length + shape.q_len for length in host.kv_lens]
        q_lens = [shape.q_len] * shape.batch_size
        return cls.of(q_lens, lengths, host.pages, page_size, shape.device)

    @classmethod
    def of_chunks(cls, batch: AttentionBatch, page_size: int) -> PageLists:
        """Returns the pages of prompt chunks."""
        assert batch.ragged is not None and batch.host_pages is not None
        q_lens = [count for _, count in batch.ragged]
        lengths = [start + count for start, count in batch.ragged]
        return cls.of(q_lens, lengths, batch.host_pages, page_size, batch.start.device)


def _int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
