"""The device side of a step: decode rows of fixed width, and prompt rows.

    propose  →  verify  →  commit  →  observe

Nothing here reads a device value on the host, and `decode` has the same shapes whatever is in it:
the whole of it can be captured as one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.attention.base import AttentionBackend, AttentionBatch, AttentionContext
from forerun.core.plan import PrefillChunk
from forerun.engine.tables import SlotTables
from forerun.models.base import CausalLM
from forerun.sampling.sampler import SamplingFlags, sample
from forerun.speculative.base import (
    Commit,
    SpecCaps,
    SpeculativeAlgorithm,
    Step,
    TargetOutput,
)
from forerun.speculative.simulate import SimulatedAccept


@dataclass(frozen=True)
class _Rows:
    """Rows of one forward, from which each pool's attention is planned."""

    page_table: Tensor  # [B, pages] int32
    start: Tensor  # [B] int32
    kv_len_ub: int
    ragged: tuple[tuple[int, int], ...] | None = None

    def attention(self, width: int | None) -> AttentionBatch:
        return AttentionBatch(
            self.page_table, self.start, self.kv_len_ub, width=width, ragged=self.ragged
        )


class DeviceStep:
    """The target, the algorithm, their attention, and the slot tables they work on."""

    def __init__(
        self,
        model: CausalLM,
        algorithm: SpeculativeAlgorithm,
        caps: SpecCaps,
        tables: SlotTables,
        attention: AttentionBackend,
        draft_attention: AttentionBackend | None,
        simulate: SimulatedAccept | None = None,
    ) -> None:
        self.model = model
        self.algorithm = algorithm
        self.caps = caps
        self.tables = tables
        self.attention = attention
        self.draft_attention = draft_attention
        self.simulate = simulate
        self._row_offsets = torch.arange(caps.width, dtype=torch.int32, device=tables.device)

    def decode(self, slots: Tensor, kv_len_ub: int, flags: SamplingFlags) -> tuple[Tensor, Tensor]:
        """One fixed-width step.

        Args:
            slots: [B] int64.
            kv_len_ub: host bound of every row's committed length plus the width.
            flags: which sampling operations to run.

        Returns:
            Drawn tokens [B, W] int64 and how many of each row are committed [B] int32.
        """
        tables, width = self.tables, self.caps.width
        start = tables.kv_len[slots]  # [B]
        last = tables.last_token[slots].unsqueeze(1)  # [B, 1]
        positions = start.unsqueeze(1) + self._row_offsets  # [B, W]
        rows = _Rows(tables.page_table[slots], start, kv_len_ub)
        step = Step(
            slots=slots,
            start=start,
            positions=positions.flatten(),
            input_ids=last.expand(-1, width).flatten(),
            width=width,
            history=tables.history,
            attention=self._draft_contexts(rows),
        )

        draft = self.algorithm.propose(step)

        ids = torch.cat([last, draft.tokens], dim=1).flatten()  # [B * W]
        context = AttentionContext(self.attention, self.attention.plan(rows.attention(width)))
        hidden, features = self.model.forward(ids, step.positions, context, self.caps.target_layers)
        logits = self.model.lm_head(hidden).view(slots.shape[0], width, -1)
        drawn = sample(logits, positions + 1, tables.sampling.gather(slots), flags)  # [B, W]
        forced = None if self.simulate is None else self.simulate(slots)
        new = tables.commit(draft.tokens, drawn, slots, start, forced)  # [B]

        step = Step(slots, start, step.positions, ids, width, tables.history, step.attention)
        self.algorithm.observe(step, TargetOutput(hidden, features), Commit(drawn, new))
        return drawn, new

    def prefill(self, chunks: Sequence[PrefillChunk]) -> Tensor | None:
        """Prompt rows; draws the first token of requests whose last chunk this is."""
        tables = self.tables
        slots = tables.upload([c.slot for c in chunks], torch.int64)
        start = tables.upload([c.start for c in chunks], torch.int32)
        ids = tables.upload([t for c in chunks for t in c.tokens], torch.int64)
        spans = tuple((c.start, len(c.tokens)) for c in chunks)
        positions = tables.upload([p for s, n in spans for p in range(s, s + n)], torch.int32)
        bound = max(s + n for s, n in spans)
        rows = _Rows(tables.page_table[slots], start, bound, spans)
        step = Step(
            slots=slots,
            start=start,
            positions=positions,
            input_ids=ids,
            width=None,
            history=tables.history,
            attention=self._draft_contexts(rows),
        )
        context = AttentionContext(self.attention, self.attention.plan(rows.attention(None)))
        hidden, features = self.model.forward(ids, positions, context, self.caps.target_layers)
        self.algorithm.observe(step, TargetOutput(hidden, features), None)

        tables.kv_len[slots] = tables.upload([s + n for s, n in spans], torch.int32)
        return self._first_tokens(chunks, hidden)

    def _first_tokens(self, chunks: Sequence[PrefillChunk], hidden: Tensor) -> Tensor | None:
        tables = self.tables
        last_rows, slots_of, lengths, requests, row = [], [], [], [], 0
        for chunk in chunks:
            row += len(chunk.tokens)
            if chunk.last:
                last_rows.append(row - 1)
                slots_of.append(chunk.slot)
                lengths.append(chunk.start + len(chunk.tokens))
                requests.append(chunk.request)
        if not requests:
            return None
        rows = tables.upload(last_rows, torch.int64)
        slots = tables.upload(slots_of, torch.int64)
        at = tables.upload(lengths, torch.int64)  # position of the token to draw
        logits = self.model.lm_head(hidden[rows]).unsqueeze(1)
        flags = SamplingFlags.of(request.params for request in requests)
        drawn = sample(logits, at.unsqueeze(1), tables.sampling.gather(slots), flags).squeeze(1)
        tables.last_token[slots] = drawn
        tables.history[slots, at] = drawn.int()
        return drawn

    def _draft_contexts(self, rows: _Rows) -> Callable[[int | None], AttentionContext] | None:
        """Attention over the draft's pool for the first `width` rows, planned once a width."""
        backend = self.draft_attention
        if backend is None:
            return None
        made: dict[int | None, AttentionContext] = {}

        def context(width: int | None) -> AttentionContext:
            if width not in made:
                made[width] = AttentionContext(backend, backend.plan(rows.attention(width)))
            return made[width]

        return context
