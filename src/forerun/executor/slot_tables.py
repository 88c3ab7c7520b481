"""Device rows of the slots: what step n writes, step n + 1 gathers. Nothing is merged or moved.

There is one row more than slots: the last is the padding slot, which fills up batch buckets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.core.plan import Admission, Limits, PageWrite
from forerun.kernels.speculation.accept import SlotState, accept_commit
from forerun.kvcache.pages import NULL_PAGE
from forerun.platform.device import upload
from forerun.sampling.table import SamplingTable


class SlotTables:
    """Everything a step needs to know about running requests, on the device."""

    def __init__(self, limits: Limits, device: torch.device) -> None:
        rows, positions = limits.slots + 1, limits.max_positions
        pages = limits.pages(positions)
        self.padding_slot = limits.slots
        self.device = device
        self.kv_len = torch.zeros(rows, dtype=torch.int32, device=device)  # committed KV slots
        # The newest sampled token; it stands at position kv_len.
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.page_table = torch.zeros(rows, pages, dtype=torch.int32, device=device)
        # Tokens by position, known up to kv_len; what a step sampled and rejected stands after it.
        self.history = torch.zeros(rows, positions, dtype=torch.int32, device=device)
        self.max_drafts = torch.zeros(rows, dtype=torch.int32, device=device)  # accepted a step
        self.sampling = SamplingTable(rows, device)
        self.states: list[Tensor] = []  # rows that the algorithm keeps
        self._host_pages: dict[int, list[int]] | None = None  # page ids by slot

    def mirror_pages(self) -> None:
        """Keeps page ids on the host too, for attention backends that plan there."""
        self._host_pages = {}

    def host_pages_of(self, slots: Sequence[int]) -> list[list[int]] | None:
        """Page ids of slots, where they are kept on the host."""
        if self._host_pages is None:
            return None
        return [self._host_pages.get(slot) or [NULL_PAGE] for slot in slots]

    def upload(self, values: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype) -> Tensor:
        """Host integers to the device, without waiting for it."""
        return upload(torch.tensor(values, dtype=dtype), self.device)

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Sets the rows of slots that change hands."""
        if self._host_pages is not None:
            self._host_pages |= {a.slot: [] for a in admissions}
        slots = self.upload([a.slot for a in admissions], torch.int64)
        self.kv_len[slots] = self.upload([a.cached_len for a in admissions], torch.int32)
        self.max_drafts[slots] = self.upload([a.max_drafts for a in admissions], torch.int32)
        self.page_table.index_fill_(0, slots, 0)  # entries past its pages may be read, masked
        for state in self.states:  # a request never sees what the slot's last one left
            state.index_fill_(0, slots, 0)
        for admission in admissions:
            tokens = self.upload(admission.tokens, torch.int32)
            self.history[admission.slot, : tokens.shape[0]] = tokens
        self.sampling.set([a.slot for a in admissions], [a.sampling for a in admissions])

    def write_pages(self, writes: Sequence[PageWrite]) -> None:
        rows: list[int] = []
        columns: list[int] = []
        values: list[int] = []
        for write in writes:
            rows += [write.slot] * len(write.pages)
            columns += range(write.first, write.first + len(write.pages))
            values += write.pages
            if self._host_pages is not None:
                pages = self._host_pages.setdefault(write.slot, [])
                pages[write.first : write.first + len(write.pages)] = write.pages
        index = self.upload([rows, columns], torch.int64)
        self.page_table[index[0], index[1]] = self.upload(values, torch.int32)

    def set_first_tokens(self, slots: Tensor, positions: Tensor, sampled: Tensor) -> None:
        """The tokens [n] that were sampled after prompts, at positions [n] int64 of slots [n]."""
        ids = sampled.clamp_min(0)  # INVALID_TOKEN is read as an id on the device
        self.last_token[slots] = ids
        self.history[slots, positions] = ids.int()

    def commit(
        self,
        candidates: Tensor,
        sampled: Tensor,
        slots: Tensor,
        start: Tensor,
        num_committed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Accepts drafts and advances the slots: `accept_commit` on these tables."""
        state = SlotState(self.kv_len, self.last_token, self.history)
        return accept_commit(candidates, sampled, slots, start, state, num_committed)
