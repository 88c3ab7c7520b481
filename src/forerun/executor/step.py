"""The device side of a step: decode rows of fixed width, and prompt rows.

    propose  →  verify  →  commit  →  observe

Nothing here reads a device value on the host, and `decode` has the same shapes whatever is in it:
the whole of it can be captured as one graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from forerun.attention.base import AttentionBatch, AttentionContext
from forerun.attention.model_attention import ModelAttention, StepBuffers
from forerun.core.plan import PrefillChunk
from forerun.core.request import Request
from forerun.executor.deferred_observe import DeferredObserve
from forerun.executor.safe_algorithm import SafeAlgorithm
from forerun.executor.slot_tables import SlotTables
from forerun.executor.step_timing import PhaseBoundary, StepTimer
from forerun.kernels.speculation.decode_inputs import build_decode_inputs
from forerun.kernels.speculation.tree import Tree
from forerun.kernels.speculation.verify_inputs import build_verify_inputs
from forerun.models.base import CausalLM
from forerun.sampling.noise import gumbel_argmax
from forerun.sampling.sampler import SamplingFlags, sample
from forerun.speculative.base import (
    Commit,
    Draft,
    SpecCaps,
    SpeculativeAlgorithm,
    Step,
    TargetOutput,
)
from forerun.speculative.simulate import SimulatedAcceptance


@dataclass(frozen=True)
class _Rows:
    """Rows of one forward, from which each pool's attention is planned."""

    slots: Tensor  # [B] int64
    page_table: Tensor  # [B, pages] int32
    start: Tensor  # [B] int32
    kv_len_ub: int
    ragged: tuple[tuple[int, int], ...] | None = None
    host_pages: Sequence[Sequence[int]] | None = None  # of a prefill

    def attention(self, width: int | None, offset: int = 0) -> AttentionBatch:
        return AttentionBatch(
            self.page_table,
            self.start + offset if offset else self.start,
            self.kv_len_ub,
            q_len=width,
            ragged=self.ragged,
            slots=self.slots,
            host_pages=self.host_pages,
        )


@dataclass(frozen=True, kw_only=True)
class _DecodeRows(_Rows):
    """W rows a request."""

    width: int
    pool_rows: Tensor  # [B * W] int64
    newest: Tensor  # [B] int64
    positions: Tensor  # [B * W] int32
    next_positions: Tensor  # [B * W] int32, of the tokens that the rows draw

    def attention(self, width: int | None, offset: int = 0) -> AttentionBatch:
        batch = super().attention(width, offset)
        known = (width, offset) == (self.width, 0)
        return replace(batch, kv_slots=self.pool_rows) if known else batch


class _DraftRows:
    """Contexts over the draft's pool, each planned once."""

    def __init__(self, attention: ModelAttention, rows: _Rows, buffers: StepBuffers | None) -> None:
        self._attention, self._rows, self._buffers = attention, rows, buffers
        self._made: dict[tuple[int | None, int], AttentionContext] = {}

    def __call__(self, width: int | None, offset: int = 0) -> AttentionContext:
        key = (width, offset)
        if key not in self._made:
            batch = self._rows.attention(width, offset)
            self._made[key] = self._attention.context(batch, self._buffers, offset)
        return self._made[key]


class DeviceStep:
    """The target, the algorithm, their attention, and the slot tables they work on."""

    def __init__(
        self,
        model: CausalLM,
        algorithm: SpeculativeAlgorithm,
        caps: SpecCaps,
        tables: SlotTables,
        attention: ModelAttention,
        draft_attention: ModelAttention | None,
        simulate: SimulatedAcceptance | None = None,
        clock: StepTimer | None = None,
        late: DeferredObserve | None = None,
    ) -> None:
        """`late`: keeps what plain steps put out until the algorithm hears of it."""
        self.model = model
        self.algorithm = algorithm
        self.guard = SafeAlgorithm(algorithm, trees=caps.makes_trees)
        self.caps = caps
        self.tables = tables
        self.attention = attention
        self.draft_attention = draft_attention
        self.simulate = simulate
        self.clock = clock
        self.late = late
        if self.needs_host_pages:
            tables.mirror_pages()

    # --- decode ---------------------------------------------------------------------------------

    def decode(
        self,
        slots: Tensor,
        kv_len_ub: int,
        width: int,
        flags: SamplingFlags,
        draft: Draft | None = None,
        buffers: StepBuffers | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One fixed-width step.

        Args:
            slots: [B] int64.
            kv_len_ub: host bound of every committed length plus the rows a step may write.
            width: rows verified a request; 1: nothing is proposed.
            flags: which sampling operations to run.
            draft: what was proposed before the step, where it must read tokens on the host.
            buffers: of `plan_buffers`, prepared for this step.

        Returns:
            Drawn tokens [B, W] int64 and how many of each row are committed [B] int32.
        """
        if draft is None:  # else it began when that was made
            self._mark(PhaseBoundary.BEGIN)
        rows, step = self._rows(slots, kv_len_ub, width, buffers)
        if draft is None:
            draft = self._propose(step, flags)
        self._mark(PhaseBoundary.PROPOSED)
        tree = None if draft.parents is None else Tree.from_parents(draft.parents)

        depth = None if tree is None else tree.depth[:, 1:]
        vocab, limits = self.model.config.vocab_size, self.tables.draft_limit
        ids, candidates = build_verify_inputs(
            rows.newest, draft.tokens, slots, limits, depth, vocab
        )
        output, drawn = self._verify(rows, ids.flatten(), tree, flags, buffers)

        self._mark(PhaseBoundary.VERIFIED)
        new: Tensor | None = None
        if tree is not None:
            path, new = tree.accept(candidates, drawn)
            drawn, output = self._along(path, drawn, output, rows)
        elif self.simulate is not None:
            new = self.simulate.num_committed(slots, width)
        new, committed = self.tables.commit(candidates, drawn, slots, step.start, new)
        self.attention.pools.commit(slots, new)

        if width == 1 and self.late is not None:
            self.late.keep(slots, step.positions, output)
        else:
            self._observe(replace(step, input_ids=ids.flatten()), output, Commit(committed, new))
        self._mark(PhaseBoundary.COMMITTED)
        return drawn, new

    def observe_deferred(
        self, slots: Tensor, new: Tensor, kv_len_ub: int, buffers: StepBuffers | None = None
    ) -> None:
        """Tells the algorithm of the newest `new` [B] int32 rows of slots [B], which were kept."""
        assert self.late is not None
        tables, width = self.tables, self.late.rows
        before = tables.kv_len.index_add(0, slots, new, alpha=-1)
        _, step = self._rows(slots, kv_len_ub, width, buffers, before)
        at = step.positions.view(-1, width).long()
        behind = torch.arange(width, device=slots.device) >= new.unsqueeze(1)
        tokens = (tables.history[slots.unsqueeze(1), at + i].long() for i in (0, 1))
        ids, drawn = (each.masked_fill(behind, 0) for each in tokens)
        output = self.late.take(slots, at, behind)
        step = replace(step, newest=ids[:, 0], input_ids=ids.flatten(), late=True)
        self._observe(step, output, Commit(drawn, new))

    def _observe(self, step: Step, output: TargetOutput, commit: Commit) -> None:
        drawn = commit.tokens
        if self.caps.prefix_lookahead:
            begin = torch.arange(0, drawn.numel(), drawn.shape[1], device=drawn.device)
            last = begin + (commit.new - 1).clamp_min(0)
            output = replace(output, next_ids=drawn.flatten(), last_rows=last)
        self.guard.observe(step, output, commit)

    def flags(self, requests: Iterable[Request]) -> SamplingFlags:
        """What sampling has to do for these; on a GPU one of the two that are compiled at start."""
        flags = SamplingFlags.of(request.params for request in requests)
        return flags.widened() if self.tables.device.type == "cuda" else flags

    def filler(self, slots: Tensor, width: int) -> Draft:
        """Tokens that are as good as none, where a draft must be given."""
        tokens = slots.new_zeros(slots.shape[0], width - 1)
        return Draft(tokens, torch.zeros_like(tokens) if self.caps.makes_trees else None)

    def propose(
        self,
        slots: Tensor,
        kv_len_ub: int,
        width: int,
        tokens: Sequence[Sequence[int]],
        request_ids: Sequence[str],
        buffers: StepBuffers | None = None,
    ) -> Draft:
        """What an algorithm with `needs_host_tokens` proposes: the step without its graph."""
        self._mark(PhaseBoundary.BEGIN)
        step = self._rows(slots, kv_len_ub, width, buffers)[1]
        return self.guard.propose(replace(step, tokens=tokens, request_ids=request_ids))

    def _mark(self, border: PhaseBoundary) -> None:
        if self.clock is not None:
            self.clock.mark(border)

    def _rows(
        self,
        slots: Tensor,
        kv_len_ub: int,
        width: int,
        buffers: StepBuffers | None,
        kv_len: Tensor | None = None,
    ) -> tuple[_DecodeRows, Step]:
        """`kv_len` [S]: lengths to start from, instead of the tables'."""
        tables, page = self.tables, self.attention.pools.page_size
        lengths = tables.kv_len if kv_len is None else kv_len
        head = build_decode_inputs(
            slots, lengths, tables.last_token, tables.page_table, width, page, kv_len_ub
        )
        rows = _DecodeRows(
            slots=slots,
            page_table=head.page_table,
            start=head.start,
            kv_len_ub=kv_len_ub,
            width=width,
            pool_rows=head.kv_slots,
            newest=head.last_token,
            positions=head.positions,
            next_positions=head.next_positions,
        )
        step = Step(
            slots=slots,
            start=head.start,
            positions=head.positions,
            width=width,
            newest=head.last_token,
            input_ids=None,
            history=tables.history,
            attention=self._draft_rows(rows, buffers),
        )
        return rows, step

    def _propose(self, step: Step, flags: SamplingFlags) -> Draft:
        if step.width == 1:
            return Draft(step.slots.new_empty(step.slots.shape[0], 0))
        return self.guard.propose(replace(step, draw=partial(self._draw, step.slots, flags)))

    def _draw(
        self,
        slots: Tensor,
        flags: SamplingFlags,
        logits: Tensor,
        positions: Tensor,
        tokens: Tensor | None = None,
    ) -> Tensor:
        rules = self.tables.sampling.gather(slots)
        if tokens is None or not flags.sampled:
            return sample(logits, positions, rules, replace(flags, min_tokens=False))
        # Over a part of the vocabulary filters would keep other tokens: temperature alone.
        warm = rules.temperature.clamp_min(1e-6)[:, None, None]
        drawn = gumbel_argmax(logits.float() / warm, rules.key[:, None], positions, tokens)
        return torch.where(rules.temperature[:, None] > 0, drawn, logits.argmax(-1))

    def _verify(
        self,
        rows: _DecodeRows,
        ids: Tensor,
        tree: Tree | None,
        flags: SamplingFlags,
        buffers: StepBuffers | None,
    ) -> tuple[TargetOutput, Tensor]:
        """The target over ids [B * W], and a draw at every row [B, W]."""
        batch, positions, behind = rows.attention(rows.width), rows.positions, rows.next_positions
        if tree is not None:
            batch = replace(batch, tree=tree.ancestors)
            positions = (rows.start.unsqueeze(1) + tree.depth).flatten()
            behind = positions + 1
        context = self.attention.context(batch, buffers)
        hidden, features = self.model.forward(ids, positions, context, self.caps.target_layers)
        drawn = self._drawn(hidden, behind.view(-1, rows.width), rows.slots, flags)
        return TargetOutput(hidden, features), drawn

    def _drawn(
        self, hidden: Tensor, positions: Tensor, slots: Tensor, flags: SamplingFlags
    ) -> Tensor:
        """hidden [B * W, H] -> the tokens that the requests' rules draw at positions [B, W]."""
        if not (flags.sampled or flags.min_tokens):
            return self.model.lm_head_argmax(hidden).view(positions.shape)
        logits = self.model.lm_head(hidden).view(*positions.shape, -1)
        return sample(logits, positions, self.tables.sampling.gather(slots), flags)

    def _along(
        self, path: Tensor, drawn: Tensor, output: TargetOutput, rows: _DecodeRows
    ) -> tuple[Tensor, TargetOutput]:
        """Puts what the accepted path left in a tree's rows where a chain would have left it."""
        batch, width = path.shape
        index = path + torch.arange(0, batch * width, width, device=path.device).unsqueeze(1)
        index = index.flatten()
        self.attention.pools.move_tokens(rows.pool_rows.view(batch, width), path)
        features = None if output.features is None else output.features[index]
        return drawn.gather(1, path), TargetOutput(output.hidden[index], features)

    # --- prefill --------------------------------------------------------------------------------

    def prefill(self, chunks: Sequence[PrefillChunk]) -> Tensor | None:
        """Prompt rows; draws the first token of requests whose last chunk this is."""
        tables = self.tables
        slots = tables.upload([c.slot for c in chunks], torch.int64)
        start = tables.upload([c.start for c in chunks], torch.int32)
        ids = tables.upload([t for c in chunks for t in c.tokens], torch.int64)
        spans = tuple((c.start, len(c.tokens)) for c in chunks)
        positions = tables.upload([p for s, n in spans for p in range(s, s + n)], torch.int32)
        bound = max(s + n for s, n in spans)
        host_pages = tables.host_pages_of([c.slot for c in chunks])
        rows = _Rows(slots, tables.page_table[slots], start, bound, spans, host_pages)
        step = Step(
            slots=slots,
            start=start,
            positions=positions,
            width=None,
            newest=None,
            input_ids=ids,
            history=tables.history,
            attention=self._draft_rows(rows, None),
        )
        context = self.attention.context(rows.attention(None))
        hidden, features = self.model.forward(ids, positions, context, self.caps.target_layers)
        tables.kv_len[slots] = tables.upload([s + n for s, n in spans], torch.int32)
        last_rows = [end - 1 for end in accumulate(count for _, count in spans)]
        drawn = self._first_tokens(chunks, last_rows, hidden)
        output = TargetOutput(hidden, features, tables.upload(last_rows, torch.int64))
        if self.caps.prefix_lookahead:  # of the last row: the token just drawn
            owner = tables.upload([c.slot for c in chunks for _ in c.tokens], torch.int64)
            behind = tables.history[owner, positions.long() + 1].long()
            output = replace(output, next_ids=behind)
        self.guard.observe(step, output, None)
        return drawn

    def _first_tokens(
        self, chunks: Sequence[PrefillChunk], last_rows: Sequence[int], hidden: Tensor
    ) -> Tensor | None:
        tables = self.tables
        ends = [(chunk, row) for chunk, row in zip(chunks, last_rows, strict=True) if chunk.last]
        if not ends:
            return None
        rows = tables.upload([row for _, row in ends], torch.int64)
        slots = tables.upload([chunk.slot for chunk, _ in ends], torch.int64)
        # Positions of the tokens to draw.
        at = tables.upload([chunk.start + len(chunk.tokens) for chunk, _ in ends], torch.int64)
        flags = self.flags(chunk.request for chunk, _ in ends)
        drawn = self._drawn(hidden[rows], at.unsqueeze(1), slots, flags).squeeze(1)
        ids = drawn.clamp_min(0)  # INVALID_TOKEN is read as an id on the device
        tables.last_token[slots] = ids
        tables.history[slots, at] = ids.int()
        return drawn

    def _draft_rows(self, rows: _Rows, buffers: StepBuffers | None) -> _DraftRows | None:
        attention = self.draft_attention
        return None if attention is None else _DraftRows(attention, rows, buffers)

    # --- what attention plans on the host -------------------------------------------------------

    def plan_buffers(self, batch_size: int) -> StepBuffers | None:
        """For decode steps of this batch size; None where no backend plans on the host."""
        if not any(each.plans_on_host for each in self._attentions):
            return None
        return StepBuffers(batch_size, self.tables.history.shape[1])

    @property
    def needs_host_pages(self) -> bool:
        return any(each.needs_host_pages for each in self._attentions)

    @property
    def _attentions(self) -> list[ModelAttention]:
        return [each for each in (self.attention, self.draft_attention) if each is not None]
