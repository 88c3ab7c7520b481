"""Device rows of the slots: what step n writes, step n + 1 gathers. Nothing is merged or moved.

One row more than there are slots: the last is the padding slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.core.plan import StepPlan
from forerun.kernels.speculation.accept import SlotState, accept_commit
from forerun.kvcache.pages import NULL_PAGE
from forerun.platform.device import upload
from forerun.sampling.table import SamplingTable


class SlotTables:
    """Everything the step needs to know about a running request, on the device."""

    def __init__(
        self, slots: int, positions: int, pages: int, drafts: int, device: torch.device
    ) -> None:
        """`drafts`: the most a step proposes."""
        rows = slots + 1
        self._drafts = drafts
        self.padding_slot = slots
        self.device = device
        self.kv_len = torch.zeros(rows, dtype=torch.int32, device=device)  # committed K/V rows
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=device)  # at kv_len
        self.page_table = torch.zeros(rows, pages, dtype=torch.int32, device=device)
        # Tokens by position, known up to kv_len; past it stands what a step drew and dropped.
        self.history = torch.zeros(rows, positions, dtype=torch.int32, device=device)
        self.draft_limit = torch.zeros(rows, dtype=torch.int32, device=device)  # drafts it takes
        self.sampling = SamplingTable(rows, device)
        self.states: list[Tensor] = []  # rows that the algorithm keeps
        self._host_pages: dict[int, list[int]] | None = None  # page ids by slot

    def upload(self, values: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype) -> Tensor:
        """Host integers to the device, without waiting for it."""
        return upload(torch.tensor(values, dtype=dtype), self.device)

    def mirror_pages(self) -> None:
        """Keeps page ids on the host too, for attention backends that plan there."""
        self._host_pages = {}

    def host_pages_of(self, slots: Sequence[int]) -> list[list[int]] | None:
        """Page ids of slots, where they are kept on the host."""
        if self._host_pages is None:
            return None
        return [self._host_pages.get(slot) or [NULL_PAGE] for slot in slots]

    def apply(self, plan: StepPlan) -> None:
        """Admissions and page-table writes of a plan, before its rows run."""
        if plan.admitted:
            self._admit(plan)
        if self._host_pages is not None:
            _write_host_pages(self._host_pages, plan)
        if plan.page_writes:
            self._write_pages(plan)

    def _admit(self, plan: StepPlan) -> None:
        requests = [a.request for a in plan.admitted]
        slots = self.upload([a.slot for a in plan.admitted], torch.int64)
        self.kv_len[slots] = self.upload([r.cached_len for r in requests], torch.int32)
        limits = [r.params.draft_limit(self._drafts) for r in requests]
        self.draft_limit[slots] = self.upload(limits, torch.int32)
        self.page_table.index_fill_(0, slots, 0)  # entries past its pages may be read, masked
        for state in self.states:  # a request never sees what the slot's last one left
            state.index_fill_(0, slots, 0)
        for admission, request in zip(plan.admitted, requests, strict=True):
            tokens = self.upload(request.prefill_tokens, torch.int32)
            self.history[admission.slot, : tokens.shape[0]] = tokens
        self.sampling.set([a.slot for a in plan.admitted], requests)

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

    def _write_pages(self, plan: StepPlan) -> None:
        rows: list[int] = []
        columns: list[int] = []
        values: list[int] = []
        for slot, first, pages in plan.page_writes:
            rows += [slot] * len(pages)
            columns += range(first, first + len(pages))
            values += pages
        index = self.upload([rows, columns], torch.int64)
        self.page_table[index[0], index[1]] = self.upload(values, torch.int32)


def _write_host_pages(kept: dict[int, list[int]], plan: StepPlan) -> None:
    """The page writes of a plan, in their order."""
    for admission in plan.admitted:
        kept[admission.slot] = []
    for slot, first, pages in plan.page_writes:
        kept.setdefault(slot, [])[first : first + len(pages)] = pages
