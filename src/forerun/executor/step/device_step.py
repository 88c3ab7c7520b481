"""The device side of a step: decode steps with W tokens per request, and prompt chunks.

    propose  →  verify  →  commit  →  observe

Nothing here reads device values on the host, and the shapes of a decode step depend on (B, W) only,
and in a ragged one on the number of all tokens it verifies, so that a whole step can be captured as
one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from forerun.attention.base import AttentionContext
from forerun.attention.model_attention import ModelAttention, StepBuffers
from forerun.core.plan import PrefillChunk, SnapshotCopy, TrackedState
from forerun.executor.step.deferred_observe import DeferredObserve
from forerun.executor.step.grammar_masks import DraftCopy
from forerun.executor.step.inputs import (
    DecodeInput,
    DecodeOutput,
    DecodeTokens,
    PageTables,
    PlannedAttention,
    PrefillBatch,
    PrefillOutput,
    PrefillTokens,
    SampledTokens,
    SampleInput,
    StepShape,
    StepTokens,
    TargetOutput,
    VerifyPass,
    slots_and_positions,
)
from forerun.executor.step.reliability import ReliabilityTable
from forerun.executor.step.safe_algorithm import SafeAlgorithm
from forerun.executor.step.slot_tables import SlotTables
from forerun.executor.step.timing import PhaseBoundary, StepTimer
from forerun.executor.step.token_sampler import TokenSampler
from forerun.kernels.speculation.decode_inputs import build_decode_inputs
from forerun.kernels.speculation.ragged import pack_tokens
from forerun.kernels.speculation.tree import Tree
from forerun.kernels.speculation.verify_inputs import build_verify_inputs
from forerun.kvcache.pools import TrackedLengths
from forerun.layers.attention import KVLayer
from forerun.models.base import CausalLM
from forerun.platform.device import upload
from forerun.sampling.noise import gumbel_argmax
from forerun.sampling.sampler import SamplingFlags, sample
from forerun.speculative.base import (
    Draft,
    HostTokens,
    ObserveInput,
    Phase,
    ProposeInput,
    SpecCaps,
    SpeculativeAlgorithm,
)
from forerun.speculative.ragged.allocate import allocate
from forerun.speculative.ragged.estimator import Estimator, StepOutcome
from forerun.speculative.simulate import SimulatedAcceptance

# (token ids [T], positions [T], attention) -> hidden states [T, H], aux hidden states [T, n * H]
TargetForward = Callable[[Tensor, Tensor, AttentionContext], tuple[Tensor, Tensor | None]]


class DeviceStep:
    """Target, algorithm, their attention and the slot tables."""

    def __init__(
        self,
        model: CausalLM,
        algorithm: SpeculativeAlgorithm,
        caps: SpecCaps,
        tables: SlotTables,
        attention: ModelAttention,
        draft_attention: ModelAttention | None,
    ) -> None:
        self.model = model
        self.algorithm = SafeAlgorithm(algorithm, trees=caps.makes_trees)
        self.caps = caps
        self.tables = tables
        self.attention = attention
        self.draft_attention = draft_attention
        self.sampler = TokenSampler(model, tables)
        # Set by `executor/build.py` if enabled.
        self.simulate: SimulatedAcceptance | None = None
        self.timer: StepTimer | None = None
        self.deferred: DeferredObserve | None = None
        self.estimator: Estimator | None = None  # of what chains survive, for ragged passes
        self.reliability = ReliabilityTable(tables)
        self._dummy = False  # see `dummy_steps`
        if any(each.needs_host_pages for each in self._attentions):
            tables.mirror_pages()

    @property
    def captures_drafts(self) -> bool:
        """Whether `propose` and `observe` may be captured together with the verify pass."""
        return self.algorithm.fixed_shape and not self.caps.needs_host_tokens

    @property
    def captures_prefill(self) -> bool:
        """Whether a short prompt may run as a captured pass, padded to a bucket of tokens.

        Padding would advance a recurrent state past the end of the prompt. Drafts that look further
        ahead than a token observe tokens before it, if they are not those of a cached prefix.
        """
        able = all(each.short_prefill is not None for each in self._attentions)
        return able and not self.keeps_recurrent_state and self.caps.prefix_lookahead <= 1

    @property
    def captures_pieces(self) -> bool:
        """Whether the target's forward may be captured in pieces around its attention.

        Its attention must be known as such. Padding would advance a recurrent state.
        """
        layout = self.attention.pools.layout
        attending = len(list(self.model.modules(KVLayer)))
        return attending == len(layout.layers) and not layout.has_recurrent_state

    @property
    def records_on_cpu(self) -> bool:
        """Whether decode steps on a CPU may be recorded: its backends' kernels can be."""
        return all(each.records_on_cpu for each in self._attentions)

    def clear_pages(self, pages: Sequence[int], windowed: bool = False) -> None:
        """Zeroes the K/V of these pages (or window pages) in the pools of target and draft."""
        index = self.tables.upload(pages, torch.int64)
        for attention in self._attentions:
            if attention.pools.windowed is windowed:
                attention.pools.clear_pages(index)

    @contextmanager
    def dummy_steps(self) -> Iterator[None]:
        """Steps in the block are dummy steps: profiling, capture or measurement, no requests."""
        before, self._dummy = self._dummy, True
        try:
            yield
        finally:
            self._dummy = before

    @property
    def _shows_dummy(self) -> bool:
        """Whether algorithms see a dummy step; not if the value would be captured."""
        return self._dummy and not self.captures_drafts

    @property
    def keeps_recurrent_state(self) -> bool:
        return any(each.pools.layout.has_recurrent_state for each in self._attentions)

    def plan_buffers(self, batch_size: int) -> StepBuffers | None:
        """Buffers for decode steps of this batch size; None if no backend plans on the host."""
        if not any(each.plans_on_host for each in self._attentions):
            return None
        return StepBuffers(batch_size, self.tables.history.shape[1])

    @property
    def _attentions(self) -> list[ModelAttention]:
        return [each for each in (self.attention, self.draft_attention) if each is not None]

    # --- recurrent state between steps ----------------------------------------------------------

    def reset_states(self, slots: Sequence[int], snapshots: Sequence[SnapshotCopy]) -> None:
        """Sets states of admitted requests: zeros, or the snapshot of a cached prefix."""
        pools, upload = self.attention.pools, self.tables.upload
        if pools.states:
            pools.reset_slots(upload(slots, torch.int64))
        if snapshots:
            pools.load_snapshots(*upload(_slots_and_rows(snapshots), torch.int64))

    def save_states(self, snapshots: Sequence[SnapshotCopy]) -> None:
        """Saves states of requests whose prefill reached the length that their snapshot is for."""
        if snapshots:
            rows = self.tables.upload(_slots_and_rows(snapshots), torch.int64)
            self.attention.pools.save_snapshots(*rows)

    def track_states(self, tracked: Sequence[TrackedState]) -> None:
        """Tracks, after a decode step, the states at lengths that it may have gone past."""
        if tracked:
            upload = self.tables.upload
            slots, rows = upload([[t.slot for t in tracked], [t.row for t in tracked]], torch.int64)
            lengths = upload([t.length for t in tracked], torch.int32)
            targets = TrackedLengths(slots, rows, lengths)
            self.attention.pools.track_snapshots(targets, self.tables.kv_len)

    # --- decode ---------------------------------------------------------------------------------

    def decode(
        self,
        slots: Tensor,
        shape: StepShape,
        draft: Draft | None = None,
        buffers: StepBuffers | None = None,
    ) -> DecodeOutput:
        """Runs one whole decode step: propose → verify → commit → observe.

        Args:
            slots: [B] int64.
            draft: what an algorithm proposed in a call of `propose` before; None: this step
                proposes.
            buffers: of `plan_buffers`, prepared for this step.
        """
        given = self.begin(slots, shape, buffers, proposed=draft is not None)
        verified = self.verify(given, self.propose(given) if draft is None else draft)
        out = self.commit(verified, self.sample(verified.to_sample, shape))
        self.observe(out)
        return replace(out, observe=None)

    def begin(
        self,
        slots: Tensor,
        shape: StepShape,
        buffers: StepBuffers | None = None,
        proposed: bool = False,
    ) -> DecodeInput:
        """Prepares a decode step for the four verbs.

        `proposed`: its drafts have been proposed already, and the step began with that.
        """
        if not proposed:
            self._mark(PhaseBoundary.BEGIN)
        tokens = self._decode_tokens(slots, shape)
        return DecodeInput(tokens, shape, buffers, self._draft_attention(tokens, buffers))

    def propose(self, given: DecodeInput, host: HostTokens | None = None) -> Draft:
        """Lets the algorithm propose W - 1 tokens per request; none if W is 1."""
        if given.shape.num_verify_tokens == 1:
            return self.empty_draft(given.tokens.slots, 1)
        if given.shape.num_drafting:
            return self._propose_for_some(given)
        return self.algorithm.propose(self._propose_input(given, host))

    def _propose_for_some(self, given: DecodeInput) -> Draft:
        """Drafts of the first requests; the rows of the others are placeholders."""
        slots, shape = given.tokens.slots, given.shape
        few = self.begin(slots[: shape.num_drafting], shape, proposed=True)
        draft = self.algorithm.propose(self._propose_input(few))
        more = (0, 0, 0, len(slots) - shape.num_drafting)
        confidence = draft.confidence
        if confidence is not None:
            confidence = pad(confidence, more)
        return Draft(pad(draft.tokens, more), confidence=confidence)

    def propose_row_layouts(self, given: DecodeInput) -> Tensor | None:
        """Drafts in both row layouts, [2, B, D] int64; None: the algorithm has failed."""
        return self.algorithm.propose_row_layouts(self._propose_input(given))

    def _propose_input(self, given: DecodeInput, host: HostTokens | None = None) -> ProposeInput:
        tokens, shape = given.tokens, given.shape
        return ProposeInput(
            slots=tokens.slots,
            start=tokens.start,
            positions=tokens.positions,
            num_verify_tokens=shape.num_verify_tokens,
            last_token=tokens.last_token,
            history=self.tables.history,
            tenants=self.tables.tenants,
            sample=partial(self._sample_draft, tokens.slots, shape.flags),
            attention=given.attention,
            host=host,
            dummy=self._shows_dummy,
            greedy=not shape.flags.sampled,
        )

    def verify(self, given: DecodeInput, draft: Draft) -> VerifyPass:
        """Runs the target over last tokens and drafts, up to its hidden states."""
        self._mark(PhaseBoundary.PROPOSED)
        tokens, shape = given.tokens, given.shape
        tree = None if draft.parents is None else Tree.from_parents(draft.parents)
        draft_depth = None if tree is None else tree.depth[:, 1:]
        vocab, limits = self.model.config.vocab_size, self.tables.max_drafts
        ids, candidates = build_verify_inputs(
            tokens.last_token, draft.tokens, tokens.slots, limits, draft_depth, vocab
        )
        positions, next_positions = tokens.positions, tokens.next_positions
        if tree is not None:
            positions = (tokens.start.unsqueeze(1) + tree.depth).flatten()
            next_positions = positions + 1
        row_ids, packed = ids.flatten(), None
        if shape.num_rows:
            widths = self._divide(draft, tokens.slots, shape)
            places = candidates, positions, tokens.kv_slots
            packed = pack_tokens(widths, shape.num_rows, ids, *places)
            tokens, row_ids, positions = tokens.packed(packed), packed.ids, packed.positions
        batch = tokens.attention(tokens.q_len)
        if tree is not None:
            batch = replace(batch, tree=tree.ancestors)
            if self.attention.pools.states:
                batch = replace(batch, parents=tree.above)
        context = self.attention.context(batch, given.buffers)
        if shape.drafts is not None:
            shape.drafts.start(candidates, tree)
        hidden_states, aux = self.forward(row_ids, positions, context)
        return VerifyPass(
            given=given,
            tree=tree,
            ids=ids,
            candidates=candidates,
            positions=next_positions.view(-1, shape.num_verify_tokens),
            hidden_states=hidden_states,
            aux_hidden_states=aux,
            confidence=draft.confidence,
            packed=packed,
        )

    def _divide(self, draft: Draft, slots: Tensor, shape: StepShape) -> Tensor:
        """[B] int32: how many of the N tokens of a ragged pass each request gets.

        By what their drafts are expected to survive. Of trees, whose nodes come best first, that is
        not known: all that take drafts get as many.
        """
        limits = self.tables.max_drafts
        if self.estimator is not None:
            survival = self.estimator.survival(slots, limits, draft.confidence)
            survival = survival[:, : shape.num_verify_tokens - 1]
        else:
            takes = (limits[slots] > 0).float().unsqueeze(1)
            survival = takes.expand(draft.tokens.shape).contiguous()
        if shape.num_drafting:
            survival[shape.num_drafting :] = 0.0
        return allocate(survival, shape.num_rows)

    def _learn(self, verified: VerifyPass, num_committed: Tensor) -> None:
        """Tells the estimator how many of the drafts were accepted."""
        if self.estimator is None:
            return
        tokens, rows = verified.given.tokens, verified.rows
        step = StepOutcome(
            slots=tokens.slots,
            widths=tokens.q_len if rows is None else rows.widths,
            num_committed=num_committed,
            confidence=verified.confidence,
            limits=self.tables.max_drafts,  # drafts beyond were not compared
            num_drafting=verified.given.shape.num_drafting or None,
        )
        self.estimator.update(step)

    def sample(self, tokens: SampleInput, shape: StepShape) -> SampledTokens:
        """Samples a token at every position of a verify pass."""
        sampled = self._sample(tokens, shape)
        self._mark(PhaseBoundary.VERIFIED)
        return sampled

    def commit(self, verified: VerifyPass, sampled: SampledTokens) -> DecodeOutput:
        """Accepts drafts, advances the slots, and prepares `observe`."""
        tokens, tree, ids = verified.given.tokens, verified.tree, verified.ids
        hidden_states, aux = verified.hidden_states, verified.aux_hidden_states
        candidates, slots, width = verified.candidates, tokens.slots, tokens.q_len
        rows = verified.rows
        num_committed = path = None
        own = sampled.ids
        packed = verified.packed if tree is None and self.caps.observes_packed else None
        if rows is not None and packed is None:
            hidden_states = rows.unpack(hidden_states)
            aux = None if aux is None else rows.unpack(aux)
        if tree is not None:
            path, num_committed = tree.accept(candidates, own)
            index = self._compact_tree(path, tokens)
            ids, own = ids.gather(1, path), own.gather(1, path)
            hidden_states, aux = hidden_states[index], None if aux is None else aux[index]
        elif self.simulate is not None:
            num_committed = self.simulate.num_committed(slots, width)
            if rows is not None:
                num_committed = torch.minimum(num_committed, rows.widths)
        num_committed, committed = self.tables.commit(
            candidates, own, slots, tokens.start, num_committed
        )
        self.attention.pools.commit(slots, num_committed, path)
        self._learn(verified, num_committed)
        widths = None if rows is None else rows.widths
        if verified.confidence is not None and self.simulate is None:
            self.reliability.add(verified.confidence, num_committed, slots, widths)
        out = DecodeOutput(own, num_committed, None, path, sampled.logprobs_along(path), widths)
        if width == 1 and self.deferred is not None:
            self.deferred.keep(slots, tokens.positions, hidden_states, aux)
            return out
        if not self.algorithm.observes:
            return out
        if packed is not None:
            following = packed.rows.pack(committed.flatten())
            seen = TargetOutput(packed.ids, hidden_states, aux, following, num_committed)
            tokens = tokens.packed(packed)
        else:
            seen = TargetOutput(
                ids.flatten(), hidden_states, aux, committed.flatten(), num_committed
            )

        def observe() -> ObserveInput:
            given = verified.given
            planned = given.attention if packed is None else None
            attention = planned or self._draft_attention(tokens, given.buffers)
            return self._observe_input(Phase.VERIFY, tokens, seen, attention)

        return replace(out, observe=observe)

    def observe(self, out: DecodeOutput) -> None:
        """Lets the algorithm observe what was committed, where `commit` left that to do."""
        if out.observe is not None:
            self.algorithm.observe(out.observe())
        self._mark(PhaseBoundary.COMMITTED)

    def _sample(self, tokens: SampleInput, shape: StepShape) -> SampledTokens:
        if shape.grammars is not None:
            masks = shape.grammars.masks(shape.drafts, tokens.positions)
            tokens = replace(tokens, masks=masks)
        return self.sampler.sample(tokens, shape)

    def observe_deferred(
        self, slots: Tensor, counts: Tensor, kv_len_ub: int, buffers: StepBuffers | None = None
    ) -> None:
        """The algorithm observes the last `counts` [B] int32 tokens of slots [B]."""
        assert self.deferred is not None
        tables, width = self.tables, self.deferred.capacity
        before = tables.kv_len.index_add(0, slots, counts, alpha=-1)
        shape = StepShape(width, kv_len_ub, SamplingFlags())
        tokens = self._decode_tokens(slots, shape, before)
        at = tokens.positions.view(-1, width).long()
        empty = torch.arange(width, device=slots.device) >= counts.unsqueeze(1)
        history = (tables.history[slots.unsqueeze(1), at + i].long() for i in (0, 1))
        ids, next_ids = (each.masked_fill(empty, 0) for each in history)
        hidden_states, aux_hidden_states = self.deferred.take(slots, at, empty)
        out = TargetOutput(
            ids.flatten(), hidden_states, aux_hidden_states, next_ids.flatten(), counts
        )
        attention = self._draft_attention(tokens, buffers)
        self.algorithm.observe(self._observe_input(Phase.DEFERRED, tokens, out, attention))

    def new_draft_copy(self, slots: Tensor, num_verify_tokens: int) -> DraftCopy | None:
        """`StepShape.drafts` of steps of this size."""
        return DraftCopy.new(slots, num_verify_tokens - 1, self.caps.makes_trees)

    def empty_draft(self, slots: Tensor, num_verify_tokens: int) -> Draft:
        """A placeholder draft."""
        tokens = slots.new_zeros(slots.shape[0], num_verify_tokens - 1)
        tree = self.caps.makes_trees and num_verify_tokens > 1
        return Draft(tokens, torch.zeros_like(tokens) if tree else None)

    def _mark(self, boundary: PhaseBoundary) -> None:
        if self.timer is not None:
            self.timer.mark(boundary)

    def _decode_tokens(
        self, slots: Tensor, shape: StepShape, kv_len: Tensor | None = None
    ) -> DecodeTokens:
        """`kv_len` [slots + 1]: lengths to start from, instead of those of the tables."""
        tables, pools, width = self.tables, self.attention.pools, shape.num_verify_tokens
        lengths = tables.kv_len if kv_len is None else kv_len
        page_table, page, bound = tables.pages_of(pools.windowed), pools.page_size, shape.kv_len_ub
        inputs = build_decode_inputs(
            slots, lengths, tables.last_token, page_table, width, page, bound
        )
        return DecodeTokens(
            slots=slots,
            page_table=inputs.page_table,
            start=inputs.start,
            kv_len_ub=shape.kv_len_ub,
            q_len=width,
            kv_slots=inputs.kv_slots,
            last_token=inputs.last_token,
            positions=inputs.positions,
            next_positions=inputs.next_positions,
        )

    def _sample_draft(
        self,
        slots: Tensor,
        flags: SamplingFlags,
        logits: Tensor,
        positions: Tensor,
        token_ids: Tensor | None = None,
    ) -> Tensor:
        params = self.tables.sampling.gather(slots)
        if token_ids is None or not flags.sampled:
            return sample(logits, positions, params, replace(flags, min_tokens=False), invalid=0)
        # Filters would select other tokens in a pruned vocabulary, so only apply temperature.
        temperature = params.temperature.clamp_min(1e-6)[:, None, None]
        sampled = gumbel_argmax(
            logits.float() / temperature, params.key[:, None], positions, token_ids
        )
        return torch.where(params.temperature[:, None] > 0, sampled, logits.argmax(-1))

    def _compact_tree(self, path: Tensor, tokens: DecodeTokens) -> Tensor:
        """Moves K/V of a tree's accepted path to the KV slots that a chain would have used.

        Returns the path as indices [B * W] int64 into the tokens of the verify pass.
        """
        batch, width = path.shape
        first = torch.arange(0, batch * width, width, device=path.device).unsqueeze(1)
        self.attention.pools.move_tokens(tokens.kv_slots.view(batch, width), path)
        return (path + first).flatten()

    # --- prefill --------------------------------------------------------------------------------

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        context: AttentionContext,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The target's hidden states [T, H], and those of the layers that the algorithm observes.

        ids [T] int64, positions [T] int32. `rows` [n] int64: hidden states of these tokens only.
        """
        return self.model.forward(ids, positions, context, self.caps.target_layers, rows)

    def _needs_all_rows(self, batch: PrefillBatch) -> bool:
        """Whether final hidden states are read besides those of the chunks' last tokens."""
        if not batch.reads_ends_only:
            return True
        last_layer = self.model.config.num_layers - 1
        reads = self.caps.reads_hidden_states or last_layer in self.caps.target_layers
        return self.algorithm.observes and reads

    def prefill(self, batch: PrefillBatch, forward: TargetForward | None = None) -> PrefillTokens:
        """Runs prompt chunks; samples the first token after each last chunk of a prompt.

        `forward`: a captured one, instead of the step's own.
        """
        tables, chunks, logprobs = self.tables, batch.chunks, batch.logprobs
        slots = tables.upload([c.slot for c in chunks], torch.int64)
        start = tables.upload([c.start for c in chunks], torch.int32)
        spans = tuple((c.start, c.num_tokens) for c in chunks)
        owner, positions = (upload(each, slots.device) for each in slots_and_positions(chunks))
        ids = tables.history[owner, positions].long()
        windowed = self.attention.pools.windowed
        longest = max(c.end for c in chunks)
        tokens = StepTokens(
            slots,
            tables.pages_of(windowed)[slots],
            start,
            positions,
            longest,
            ragged=spans,
            host_pages=tables.host_pages_of([c.slot for c in chunks], windowed),
            cached=tuple(c.cached for c in chunks),
        )
        context = self.attention.context(tokens.attention(tokens.q_len))
        last_index = [end - 1 for end in accumulate(c.num_tokens for c in chunks)]
        if forward is not None:
            hidden_states, aux = forward(ids, positions, context)
        elif self._needs_all_rows(batch):
            hidden_states, aux = self.forward(ids, positions, context)
        else:
            rows = tables.upload(last_index, torch.int64)
            hidden_states, aux = self.forward(ids, positions, context, rows)
            last_index = list(range(len(chunks)))
        pooled = None if batch.pooled is None else batch.pooled.sums(hidden_states, last_index)
        tables.kv_len[slots] = tables.upload([c.end for c in chunks], torch.int32)
        of_first = None if logprobs is None else logprobs.first
        shape = StepShape(1, longest + 1, batch.flags, of_first, batch.grammars)
        first = self._first_tokens(chunks, last_index, hidden_states, shape)
        of_prompt = None
        if logprobs is not None and logprobs.prompt is not None:
            following = tables.history[owner, positions + 1].long()
            of_prompt = self.sampler.prompt_logprobs(hidden_states, following, logprobs.prompt)
        if self.algorithm.observes:
            counts = tables.upload(tokens.q_lens, torch.int32)
            # After the last prompt token comes the one just sampled.
            next_ids = tables.history[owner, positions + 1].long()
            out = TargetOutput(ids, hidden_states, aux, next_ids, counts)
            draft = self.draft_attention
            host_slots = [c.slot for c in chunks]
            own = None if draft is None else self._planned(draft, tokens, host_slots=host_slots)
            self.algorithm.observe(self._observe_input(Phase.PREFILL, tokens, out, own))
        if first is None:
            return PrefillTokens(None, None, of_prompt, pooled)
        return PrefillTokens(first.ids.squeeze(1), first.logprobs, of_prompt, pooled)

    def prefill_padded(self, slots: Tensor, counts: Tensor, shape: StepShape) -> PrefillOutput:
        """Prefill of the rest of short prompts, padded to W tokens: shapes depend on (B, W) only.

        Causal attention of the prompt does not see the padding after it. The padding's K/V goes to
        the null page or to KV slots that the next step overwrites.

        Args:
            slots: [B] int64.
            counts: [B] int32: prompt tokens after the committed ones, 1 to W.
        """
        tables, width = self.tables, shape.num_verify_tokens
        tokens = self._decode_tokens(slots, shape)
        at = tokens.positions.view(-1, width).long()
        # After the prompt, the history holds arbitrary values of the slot's last request: id 0.
        padding = torch.arange(width, device=slots.device) >= counts.unsqueeze(1)
        ids = tables.history[slots.unsqueeze(1), at].long().masked_fill(padding, 0).flatten()
        context = self.attention.for_short_prefill.context(tokens.attention(tokens.q_len))
        hidden_states, aux = self.forward(ids, tokens.positions, context)
        first = torch.arange(0, ids.numel(), width, device=slots.device)
        end = tokens.start + counts
        last = hidden_states[first + counts - 1]
        last_tokens = SampleInput(last, end.unsqueeze(1), slots)
        sampled = self.sampler.sample(last_tokens, shape).ids.squeeze(1)
        tables.kv_len[slots] = end
        tables.kv_len[-1:].zero_()  # as every step expects it of the padding
        tables.set_first_tokens(slots, end.long(), sampled)
        if not self.algorithm.observes:
            return PrefillOutput(sampled, last)
        following = tables.history[slots.unsqueeze(1), at + 1].long()
        next_ids = following.masked_fill(padding, 0).flatten()

        out = TargetOutput(ids, hidden_states, aux, next_ids, counts)

        def observe() -> ObserveInput:
            draft = self.draft_attention
            own = None if draft is None else self._planned(draft.for_short_prefill, tokens)
            return self._observe_input(Phase.PREFILL, tokens, out, own)

        return PrefillOutput(sampled, last, observe)

    def observe_prefill(self, out: PrefillOutput) -> None:
        """The last part of a padded prefill."""
        if out.observe is not None:
            self.algorithm.observe(out.observe())

    def _first_tokens(
        self,
        chunks: Sequence[PrefillChunk],
        last_index: Sequence[int],
        hidden_states: Tensor,
        shape: StepShape,
    ) -> SampledTokens | None:
        tables = self.tables
        ends = [(chunk, at) for chunk, at in zip(chunks, last_index, strict=True) if chunk.last]
        if not ends:
            return None
        index = tables.upload([at for _, at in ends], torch.int64)
        slots = tables.upload([chunk.slot for chunk, _ in ends], torch.int64)
        positions = tables.upload([chunk.end for chunk, _ in ends], torch.int64)
        last_tokens = SampleInput(hidden_states[index], positions.unsqueeze(1), slots)
        sampled = self._sample(last_tokens, shape)
        tables.set_first_tokens(slots, positions, sampled.ids.squeeze(1))
        return sampled

    def _draft_attention(
        self, tokens: StepTokens, buffers: StepBuffers | None
    ) -> PlannedAttention | None:
        attention = self.draft_attention
        return None if attention is None else self._planned(attention, tokens, buffers)

    def _planned(
        self,
        attention: ModelAttention,
        tokens: StepTokens,
        buffers: StepBuffers | None = None,
        host_slots: Sequence[int] | None = None,
    ) -> PlannedAttention:
        """`attention`: over the draft's pool. `host_slots`: the slots of a prefill."""
        tables, windowed = self.tables, attention.pools.windowed
        if windowed is self.attention.pools.windowed:
            return PlannedAttention(attention, tokens, buffers)

        def page_tables() -> PageTables:
            pages = tables.pages_of(windowed)[tokens.slots, : tokens.page_table.shape[1]]
            host = None if host_slots is None else tables.host_pages_of(host_slots, windowed)
            return PageTables(pages, host)

        return PlannedAttention(attention, tokens, buffers, page_tables)

    def _observe_input(
        self,
        phase: Phase,
        tokens: StepTokens,
        out: TargetOutput,
        attention: PlannedAttention | None,
    ) -> ObserveInput:
        """`tokens`: packed, if the algorithm observes a ragged pass as it is."""
        return ObserveInput(
            phase=phase,
            slots=tokens.slots,
            start=tokens.start,
            positions=tokens.positions,
            q_lens=tokens.q_lens,
            input_ids=out.input_ids,
            hidden_states=out.hidden_states,
            aux_hidden_states=out.aux_hidden_states,
            next_ids=out.next_ids,
            num_committed=out.num_committed,
            history=self.tables.history,
            tenants=self.tables.tenants,
            make_attention=None if attention is None else attention.of_observe,
            dummy=self._shows_dummy,
            rows=tokens.rows,
        )


def _slots_and_rows(copies: Sequence[SnapshotCopy]) -> list[list[int]]:
    return [[copy.slot for copy in copies], [copy.row for copy in copies]]
