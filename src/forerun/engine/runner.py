"""Runs a plan on the device: `launch(plan) -> StepFuture`.

    propose  →  verify  →  commit  →  observe

Nothing here reads a device value on the host; results come through the future.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.attention.base import AttentionBackend, AttentionBatch, AttentionContext
from forerun.core.plan import DecodeRow, PrefillChunk, StepPlan, StepResult
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
from forerun.speculative.verify import accept


@dataclass
class StepFuture:
    """The tokens of a launched step, on their way to the host."""

    plan: StepPlan
    drawn: Tensor | None  # [B, W] int64
    new: Tensor | None  # [B] int32
    first: Tensor | None  # [last prefill chunks] int64
    event: torch.cuda.Event | None

    def result(self) -> StepResult:
        """Waits for the device."""
        if self.event is not None:
            self.event.synchronize()
        decode: list[list[int]] = []
        if self.drawn is not None and self.new is not None:
            pairs = zip(self.drawn.tolist(), self.new.tolist(), strict=True)
            decode = [row[:count] for row, count in pairs]
        tokens = iter(self.first.tolist() if self.first is not None else [])
        return StepResult(decode, [next(tokens) if c.last else None for c in self.plan.prefill])


class Runner:
    """Owns the target, the algorithm, their pools and the slot tables."""

    def __init__(
        self,
        model: CausalLM,
        algorithm: SpeculativeAlgorithm,
        caps: SpecCaps,
        tables: SlotTables,
        attention: AttentionBackend,
        draft_attention: AttentionBackend | None,
    ) -> None:
        self.model = model
        self.algorithm = algorithm
        self.caps = caps
        self.tables = tables
        self.attention = attention
        self.draft_attention = draft_attention
        self._row_offsets = torch.arange(caps.width, dtype=torch.int32, device=tables.device)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepFuture:
        """Queues the whole step on the device and returns at once (on a CPU: computes it)."""
        self.tables.apply(plan)
        drawn, new = self._decode(plan.decode) if plan.decode else (None, None)
        first = self._prefill(plan.prefill) if plan.prefill else None
        return self._future(plan, drawn, new, first)

    # --- the step -------------------------------------------------------------------------------

    def _decode(self, rows: Sequence[DecodeRow]) -> tuple[Tensor, Tensor]:
        """One fixed-width step: drawn tokens [B, W] and how many of each row count [B]."""
        tables, width = self.tables, self.caps.width
        slots = tables.upload([row.slot for row in rows], torch.int64)
        start = tables.kv_len[slots]  # [B]
        last = tables.last_token[slots].unsqueeze(1)  # [B, 1]
        positions = start.unsqueeze(1) + self._row_offsets  # [B, W]
        bound = max(row.kv_len_ub for row in rows) + width
        batch = _Rows(tables.page_table[slots], start, bound, width)
        step = Step(
            slots=slots,
            start=start,
            positions=positions.flatten(),
            input_ids=last.expand(-1, width).flatten(),
            width=width,
            history=tables.history,
            attention=self._draft_contexts(batch),
        )

        draft = self.algorithm.propose(step)

        ids = torch.cat([last, draft.tokens], dim=1).flatten()  # [B * W]
        context = AttentionContext(self.attention, self.attention.plan(batch.attention(width)))
        hidden, features = self.model.forward(ids, step.positions, context, self.caps.target_layers)
        logits = self.model.lm_head(hidden).view(len(rows), width, -1)
        flags = SamplingFlags.of(row.request.params for row in rows)
        drawn = sample(logits, positions + 1, tables.sampling.gather(slots), flags)  # [B, W]
        new = accept(draft.tokens, drawn)  # [B]

        tables.kv_len[slots] = start + new
        tables.last_token[slots] = drawn.gather(1, (new - 1).long().unsqueeze(1)).squeeze(1)
        tables.history[slots.unsqueeze(1), (positions + 1).long()] = drawn.int()

        step = Step(slots, start, step.positions, ids, width, tables.history, step.attention)
        self.algorithm.observe(step, TargetOutput(hidden, features), Commit(drawn, new))
        return drawn, new

    def _prefill(self, chunks: Sequence[PrefillChunk]) -> Tensor | None:
        """Prompt rows; draws the first token of requests whose last chunk this is."""
        tables = self.tables
        slots = tables.upload([c.slot for c in chunks], torch.int64)
        start = tables.upload([c.start for c in chunks], torch.int32)
        ids = tables.upload([t for c in chunks for t in c.tokens], torch.int64)
        spans = tuple((c.start, len(c.tokens)) for c in chunks)
        positions = torch.cat(
            [torch.arange(s, s + n, dtype=torch.int32, device=tables.device) for s, n in spans]
        )
        bound = max(s + n for s, n in spans)
        batch = _Rows(tables.page_table[slots], start, bound, None, spans)
        step = Step(
            slots=slots,
            start=start,
            positions=positions,
            input_ids=ids,
            width=None,
            history=tables.history,
            attention=self._draft_contexts(batch),
        )
        context = AttentionContext(self.attention, self.attention.plan(batch.attention(None)))
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

    # --- helpers --------------------------------------------------------------------------------

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

    def _future(
        self, plan: StepPlan, drawn: Tensor | None, new: Tensor | None, first: Tensor | None
    ) -> StepFuture:
        if self.tables.device.type != "cuda":
            return StepFuture(plan, drawn, new, first, None)
        event = torch.cuda.Event()
        host = [None if t is None else _to_pinned(t) for t in (drawn, new, first)]
        event.record()
        return StepFuture(plan, host[0], host[1], host[2], event)


@dataclass(frozen=True)
class _Rows:
    """Rows of one forward, from which each pool's attention is planned."""

    page_table: Tensor  # [B, pages] int32
    start: Tensor  # [B] int32
    kv_len_ub: int
    width: int | None
    ragged: tuple[tuple[int, int], ...] | None = None

    def attention(self, width: int | None) -> AttentionBatch:
        return AttentionBatch(
            self.page_table, self.start, self.kv_len_ub, width=width, ragged=self.ragged
        )


def _to_pinned(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
