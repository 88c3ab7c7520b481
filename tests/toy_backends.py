"""An attention backend that plans on the host, as FlashInfer's wrappers do.

Its decode forward sees neither the device's lengths nor its page table: only page lists in CSR
form, which `prepare` builds on the host from exact lengths. A run without `prepare` after lengths
changed therefore computes something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.attention.base import AttentionBatch, Buffers, DecodeShape, HostBatch
from forerun.attention.capabilities import Capabilities, HostLengths, Mask
from forerun.attention.select import BACKENDS
from forerun.attention.torch_native import NativePlan, TorchNative

NAME = "toy_host_planned"


@dataclass
class CsrPages(Buffers):
    """Page lists of B requests, at fixed addresses."""

    shape: DecodeShape
    indptr: Tensor  # [B + 1] int32
    indices: Tensor  # [B * most pages] int32
    last_page_len: Tensor  # [B] int32: tokens in the last page


class HostPlanned(TorchNative):
    name = NAME
    capabilities = Capabilities(
        masks=frozenset({Mask.CAUSAL, Mask.CUSTOM}),
        page_sizes=(1, 16, 256),
        graph=False,
        host_lengths=HostLengths.EXACT,
        host_page_table=True,
    )

    def allocate(self, shape: DecodeShape) -> CsrPages:
        most = -(-shape.kv_len_ub // self.pools.page_size)
        return CsrPages(
            shape,
            torch.zeros(shape.batch_size + 1, dtype=torch.int32, device=shape.device),
            torch.zeros(shape.batch_size * most, dtype=torch.int32, device=shape.device),
            torch.ones(shape.batch_size, dtype=torch.int32, device=shape.device),
        )

    def prepare(self, buffers: Buffers, host: HostBatch) -> None:
        assert isinstance(buffers, CsrPages) and host.pages is not None
        page, ends, indices, last = self.pools.page_size, [0], [], []
        for length, pages in zip(host.kv_lens, host.pages, strict=True):
            total = length + buffers.shape.q_len
            used = -(-total // page)
            own = [*pages[:used], *[0] * (used - len(pages))]  # a padding slot has the null page
            indices += own
            ends.append(ends[-1] + used)
            last.append(total - (used - 1) * page)
        buffers.indptr.copy_(torch.tensor(ends))
        buffers.indices[: len(indices)].copy_(torch.tensor(indices))
        buffers.last_page_len.copy_(torch.tensor(last))

    def plan(self, batch: AttentionBatch, buffers: Buffers | None = None) -> NativePlan:
        if batch.q_len is None:
            assert batch.host_pages is not None
            used = max(map(len, batch.host_pages))
            table = [[*pages, *[0] * (used - len(pages))] for pages in batch.host_pages]
            return super().plan(replace(batch, page_table=torch.tensor(table).int()))
        assert isinstance(buffers, CsrPages)
        counts = buffers.indptr.diff()
        lengths = (counts - 1) * self.pools.page_size + buffers.last_page_len
        most = int(counts.max())
        column = torch.arange(most)
        at = (buffers.indptr[:-1, None] + column).clamp_max(len(buffers.indices) - 1)
        table = buffers.indices[at].masked_fill(column >= counts[:, None], 0)
        found = replace(
            batch,
            page_table=table.int(),
            start=(lengths - batch.q_len).int(),
            kv_len_ub=most * self.pools.page_size,
            kv_slots=None,
        )
        return super().plan(found)


@contextmanager
def registered() -> Iterator[None]:
    """Registers the backend within the block."""
    BACKENDS[NAME] = lambda: HostPlanned
    try:
        yield
    finally:
        del BACKENDS[NAME]
