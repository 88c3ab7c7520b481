"""Device tables with one row per slot: step n + 1 gathers what step n has written.

The last row is the padding slot, which fills up batch buckets.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.attention.base import HostBatch
from forerun.core.plan import Admission, Failure, Limits, PageWrite, SlotSampling
from forerun.kernels.speculation.accept import SlotState, accept_commit
from forerun.kvcache.pages import NULL_PAGE
from forerun.platform.device import upload
from forerun.sampling.penalties import PackedPenalties, PenaltyTable
from forerun.sampling.table import PackedSampling, SamplingTable

log = logging.getLogger("forerun")
ANY_SAMPLING = SlotSampling(temperature=0.0)


class SlotTables:
    """The device state of running requests."""

    def __init__(self, limits: Limits, device: torch.device) -> None:
        self.limits = limits
        rows, positions = limits.slots + 1, limits.max_positions
        pages = limits.pages(positions)
        self.padding_slot = limits.slots
        self.device = device
        self.kv_len = torch.zeros(rows, dtype=torch.int32, device=device)  # committed KV slots
        # The newest sampled token, at position kv_len.
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.page_table = torch.zeros(rows, pages, dtype=torch.int32, device=device)
        # Of windowed pools; entries behind a request's window are stale.
        self._has_windows = limits.window > 0
        self.window_table = torch.zeros(
            rows, pages if self._has_windows else 0, dtype=torch.int32, device=device
        )
        # Tokens by position, valid up to kv_len; after it, rejected tokens of the last step.
        self.history = torch.zeros(rows, positions, dtype=torch.int32, device=device)
        self.max_drafts = torch.zeros(rows, dtype=torch.int32, device=device)  # per step
        self.tenants = torch.zeros(rows, dtype=torch.int32, device=device)
        self.sampling = SamplingTable(rows, device)
        self.penalties = PenaltyTable(rows, device)
        self.states: list[Tensor] = []  # of the algorithm
        # Page ids by slot, of both tables; None: no backend reads them on the host.
        self._host_pages: tuple[dict[int, list[int]], dict[int, list[int]]] | None = None

    def mirror_pages(self) -> None:
        """Keeps a host copy of the page tables, for attention backends that plan on the host."""
        self._host_pages = {}, {}

    def host_pages_of(self, slots: Sequence[int], windowed: bool) -> list[list[int]] | None:
        """Page ids of slots in one of the tables; None without a host copy."""
        if self._host_pages is None:
            return None
        return [self._host_pages[windowed].get(slot) or [NULL_PAGE] for slot in slots]

    def host_batch(self, slots: Sequence[int], kv_lens: Sequence[int]) -> HostBatch:
        """What the host knows of a decode batch."""
        window_pages = self.host_pages_of(slots, True) if self._has_windows else None
        return HostBatch(kv_lens, self.host_pages_of(slots, False), window_pages)

    def pages_of(self, windowed: bool) -> Tensor:
        """[slots + 1, pages] int32: the page table of windowed or of all other pools."""
        return self.window_table if windowed else self.page_table

    def upload(self, values: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype) -> Tensor:
        """Copies host integers to the device asynchronously."""
        return upload(torch.tensor(values, dtype=dtype), self.device)

    def admit(self, admissions: Sequence[Admission]) -> list[Failure]:
        """Initialises the rows of slots for new requests.

        Returns (slot, reason) of admissions whose values do not fit the tables. Only these fail:
        their slots get valid rows, and their results of the step are dropped.
        """
        for mirror in self._host_pages or ():
            mirror.update({a.slot: [] for a in admissions})
        rows, failed = [], []
        for admission in admissions:
            try:
                rows.append(_HostRow.of(admission))
            except Exception as error:  # the rest of the step goes on
                log.error("a request could not be admitted", exc_info=error)
                failed.append(Failure(admission.slot, f"{type(error).__name__}: {error}"))
                blank = (0,) * len(admission.tokens)
                rows.append(_HostRow.of(Admission(admission.slot, "", blank, 0, 0, ANY_SAMPLING)))
        self._set(rows)
        return failed

    def _set(self, rows: Sequence[_HostRow]) -> None:
        slots = self.upload([row.slot for row in rows], torch.int64)
        numbers = upload(torch.stack([row.numbers for row in rows]), self.device)
        self.kv_len[slots], self.max_drafts[slots], self.tenants[slots] = numbers.unbind(1)
        self.page_table.index_fill_(0, slots, 0)  # masked reads may go past the request's pages
        if self._has_windows:
            self.window_table.index_fill_(0, slots, 0)
        for state in self.states:  # of the slot's last request
            state.index_fill_(0, slots, 0)
        for row in rows:
            self.history[row.slot, : row.tokens.shape[0]] = upload(row.tokens, self.device)
        self.sampling.set_packed(slots, [row.sampling for row in rows])
        self.penalties.set([row.penalties for row in rows])

    def reset_padding_slot(self) -> None:
        """Makes it as it was at first, as dummy steps expect it and what algorithms keep of it."""
        for tensor in (self.kv_len, self.last_token, *self.states):
            tensor[-1:].zero_()

    def write_pages(self, writes: Sequence[PageWrite], windowed: bool = False) -> None:
        """Writes entries of a page table, on the device and to its host copy."""
        rows: list[int] = []
        columns: list[int] = []
        values: list[int] = []
        for write in writes:
            rows += [write.slot] * len(write.pages)
            columns += range(write.first, write.first + len(write.pages))
            values += write.pages
            if self._host_pages is not None:
                pages = self._host_pages[windowed].setdefault(write.slot, [])
                pages += [NULL_PAGE] * (write.first - len(pages))  # behind the window
                pages[write.first : write.first + len(write.pages)] = write.pages
        index = self.upload([rows, columns], torch.int64)
        self.pages_of(windowed)[index[0], index[1]] = self.upload(values, torch.int32)

    def set_first_tokens(self, slots: Tensor, positions: Tensor, sampled: Tensor) -> None:
        """Stores the first sampled tokens [n] of slots [n], at positions [n] int64."""
        ids = sampled.clamp_min(0)  # INVALID_TOKEN becomes token 0 on the device
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


@dataclass(frozen=True)
class _HostRow:
    """What a slot's rows are set to, on the host and in their dtypes."""

    slot: int
    numbers: Tensor  # [3] int32: kv_len, max_drafts, tenant
    tokens: Tensor  # [n] int32
    sampling: PackedSampling
    penalties: PackedPenalties

    @classmethod
    def of(cls, admission: Admission) -> _HostRow:
        """Raises whatever a value that does not fit makes torch raise."""
        numbers = admission.cached_len, admission.max_drafts, admission.tenant
        return cls(
            slot=admission.slot,
            numbers=torch.tensor(numbers, dtype=torch.int32),
            tokens=torch.tensor(admission.tokens, dtype=torch.int32),
            sampling=PackedSampling.of(admission.sampling),
            penalties=PackedPenalties.of(
                admission.slot,
                admission.sampling,
                len(admission.tokens) - admission.num_output_tokens,
            ),
        )
