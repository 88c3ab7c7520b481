"""Samples from the target's hidden states: LM head, biases, penalties, logprobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from forerun.executor.step.inputs import SampledTokens, SampleInput, StepShape
from forerun.executor.step.slot_tables import SlotTables
from forerun.kernels.sampling.bitmask import mask_tokens
from forerun.kernels.sampling.penalties import penalize
from forerun.kernels.sampling.top_n_sigma import keep_top_n_sigma
from forerun.models.base import CausalLM
from forerun.sampling.across import sample_across, sample_by_rows
from forerun.sampling.logprobs import LogprobQuery, LogprobRows, Logprobs
from forerun.sampling.sampler import SamplingFlags, sample, without_stop_tokens

# Logits in float32 that are processed together, where more than sampling is done with them.
GROUP_BYTES = 256 << 20
MIN_ROWS_PER_RANK = 4  # from which dividing rows is faster than a gather, on two H100

# Edits that follow penalties and masks, in this order, by the name of their parameter: in place, on
# logits [B, W, V] float32 with the requests' values [B].
EDITS: dict[str, Callable[[Tensor, Tensor], None]] = {"top_n_sigma": keep_top_n_sigma}


class TokenSampler:
    """Samples from a target's hidden states with the parameters of the slots."""

    def __init__(self, model: CausalLM, tables: SlotTables) -> None:
        self.model, self.tables = model, tables

    def sample(self, tokens: SampleInput, shape: StepShape) -> SampledTokens:
        """Samples a token after each of B * W tokens; `shape.kv_len_ub` exceeds positions[:, 0].

        Of packed tokens each is a request of its own, unless its logits depend on more than its
        position: then all W of every request are computed.
        """
        if shape.edits_logits or tokens.masks is not None:
            return self._in_groups(tokens.by_request(), shape)
        if tokens.rows is None:
            return SampledTokens(self._sample(tokens, shape))
        ids = tokens.rows.unpack(self._sample(tokens.by_row(), shape).squeeze(1))
        return SampledTokens(ids.view(tokens.positions.shape))

    def _sample(self, tokens: SampleInput, shape: StepShape) -> Tensor:
        """[B, W], where logits are not edited."""
        positions = tokens.positions
        if not (shape.flags.sampled or shape.flags.min_tokens):
            return self.model.compute_argmax(tokens.hidden_states).view(positions.shape)
        if self.model.vocab_is_divided and not shape.flags.whole_rows:
            return self._sample_divided(tokens, shape.flags, sample_across)
        if self.model.vocab_is_divided and self._divides_rows(positions.numel()):
            return self._sample_divided(tokens, shape.flags, sample_by_rows)
        params = self.tables.sampling.gather(tokens.slots)
        return sample(self._logits(tokens), positions, params, shape.flags)

    def _divides_rows(self, rows: int) -> bool:
        """Whether each rank gets all logits of a part of the rows; else of all."""
        return rows >= MIN_ROWS_PER_RANK * self.model.lm_head.comm.size

    def _sample_divided(
        self, tokens: SampleInput, flags: SamplingFlags, run: Callable[..., Tensor]
    ) -> Tensor:
        """[B, W], from this rank's logits and some of the others'."""
        head, positions = self.model.lm_head, tokens.positions
        own = self.model.compute_own_logits(tokens.hidden_states).view(*positions.shape, -1)
        params = self.tables.sampling.gather(tokens.slots)
        return run(own, head.vocab, positions, params, flags, head.comm)

    def _logits(self, tokens: SampleInput) -> Tensor:
        """[B, W, V]."""
        logits = self.model.compute_logits(tokens.hidden_states)
        return logits.view(*tokens.positions.shape, -1)

    def prompt_logprobs(
        self, hidden_states: Tensor, next_ids: Tensor, query: LogprobQuery
    ) -> Logprobs:
        """Returns log-probabilities of the tokens after rows of a prefill.

        hidden_states [T, H], next_ids [T] int64 -> [R, 1].
        """
        index = self.tables.upload(query.rows, torch.int64)
        token_ids = query.upload_ids(index.device)
        parts = []
        for first, last in self.groups(len(query.rows), 1):
            rows = index[first:last]
            logits = self.model.compute_logits(hidden_states[rows]).unsqueeze(1)
            kept = LogprobRows.of(logits, query.num_top, token_ids[first:last])
            parts.append(kept.logprobs(next_ids[rows].unsqueeze(1), logits))
        return Logprobs.cat(parts)

    def _in_groups(self, tokens: SampleInput, shape: StepShape) -> SampledTokens:
        """Group by group, so that the memory does not grow with the batch."""
        query, parts = shape.logprobs, []
        for first, last in self.groups(*tokens.positions.shape):
            own = None if query is None else query.between(first, last)
            parts.append(self._group(tokens.between(first, last), replace(shape, logprobs=own)))
        ids = torch.cat([part.ids for part in parts])
        if query is None:
            return SampledTokens(ids)
        logprobs = Logprobs.cat([part.logprobs for part in parts if part.logprobs is not None])
        return SampledTokens(ids, logprobs, self.tables.upload(query.rows, torch.int64))

    def _group(self, tokens: SampleInput, shape: StepShape) -> SampledTokens:
        logits, positions = self._logits(tokens), tokens.positions
        params, query = self.tables.sampling.gather(tokens.slots), shape.logprobs
        kept = rows = None
        if query is not None:
            rows = self.tables.upload(query.rows, torch.int64)
            token_ids = query.upload_ids(rows.device)
            kept = LogprobRows.of(logits[rows], query.num_top, token_ids)
        edited = logits
        penalties = self.tables.penalties.gather(tokens.slots, self.tables.history)
        if shape.flags.penalties:
            edited = penalize(logits, positions, penalties, tokens.path, shape.kv_len_ub)
        if tokens.masks is not None:
            mask_tokens(edited, tokens.masks)
        if edits := [name for name in EDITS if name in shape.flags.edits]:
            if shape.flags.min_tokens:
                edited = without_stop_tokens(edited, positions, params)
            for name in edits:
                EDITS[name](edited, penalties.column(name))
        ids = sample(edited, positions, params, shape.flags)
        if kept is None or rows is None:
            return SampledTokens(ids)
        return SampledTokens(ids, kept.logprobs(ids[rows], logits[rows]))

    def groups(self, requests: int, width: int) -> Iterator[tuple[int, int]]:
        """(first, last) of requests whose logits fit GROUP_BYTES.

        Whole multiples of 4 requests, so that every group's tensors are aligned to 16 bytes:
        Triton compiles kernels for aligned pointers of their own.
        """
        size = max(1, GROUP_BYTES // (4 * width * self.model.config.vocab_size))
        size -= size % 4 if size > 4 else 0
        for first in range(0, requests, size):
            yield first, min(first + size, requests)
