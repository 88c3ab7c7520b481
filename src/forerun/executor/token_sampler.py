"""From the target's hidden states to tokens: LM head, biases and penalties, sampling, logprobs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.executor.slot_tables import SlotTables
from forerun.executor.step_inputs import StepShape
from forerun.kernels.sampling.penalties import DraftPath, penalize
from forerun.models.base import CausalLM
from forerun.sampling.logprobs import LogprobQuery, LogprobRows, Logprobs
from forerun.sampling.sampler import sample

# Logits in float32 that are processed together, where more than sampling is done with them.
GROUP_BYTES = 256 << 20


@dataclass(frozen=True)
class SampledTokens:
    ids: Tensor  # [B, W] int64
    # Of the R requests of `StepShape.logprobs`: [R, W], and their indices in the batch [R] int64.
    logprobs: Logprobs | None = None
    rows: Tensor | None = None


class TokenSampler:
    """Samples from a target's hidden states with the parameters of the slots."""

    def __init__(self, model: CausalLM, tables: SlotTables) -> None:
        self.model, self.tables = model, tables

    def sample(
        self,
        hidden_states: Tensor,
        positions: Tensor,
        slots: Tensor,
        shape: StepShape,
        path: DraftPath | None = None,
    ) -> SampledTokens:
        """Samples a token after each of B * W tokens.

        Args:
            hidden_states: [B * W, H].
            positions: [B, W] int: of the tokens to be sampled.
            slots: [B] int64.
            shape: what is asked for; `kv_len_ub` exceeds positions[:, 0].
            path: the tokens that the target ran on; None: W is 1.
        """
        if shape.edits_logits:
            return self._in_groups(hidden_states, positions, slots, shape, path)
        if not (shape.flags.sampled or shape.flags.min_tokens):
            ids = self.model.compute_argmax(hidden_states).view(positions.shape)
        else:
            logits = self.model.compute_logits(hidden_states).view(*positions.shape, -1)
            ids = sample(logits, positions, self.tables.sampling.gather(slots), shape.flags)
        return SampledTokens(ids)

    def prompt_logprobs(
        self, hidden_states: Tensor, next_ids: Tensor, query: LogprobQuery
    ) -> Logprobs:
        """Of the tokens after rows of a prefill.

        hidden_states [T, H], next_ids [T] int64 -> [R, 1].
        """
        index = self.tables.upload(query.rows, torch.int64)
        token_ids = query.upload_ids(index.device)
        parts = []
        for first, last in self._groups(len(query.rows), 1):
            rows = index[first:last]
            logits = self.model.compute_logits(hidden_states[rows]).unsqueeze(1)
            kept = LogprobRows.of(logits, query.num_top, token_ids[first:last])
            parts.append(kept.logprobs(next_ids[rows].unsqueeze(1), logits))
        return Logprobs.cat(parts)

    def _in_groups(
        self,
        hidden_states: Tensor,
        positions: Tensor,
        slots: Tensor,
        shape: StepShape,
        path: DraftPath | None,
    ) -> SampledTokens:
        """Group by group, so that the memory does not grow with the batch."""
        width = positions.shape[1]
        parts = []
        for first, last in self._groups(*positions.shape):
            query = shape.logprobs
            parts.append(
                self._group(
                    hidden_states[first * width : last * width],
                    positions[first:last],
                    slots[first:last],
                    replace(shape, logprobs=query and query.between(first, last)),
                    None if path is None else path.between(first, last),
                )
            )
        ids = torch.cat([part.ids for part in parts])
        if shape.logprobs is None:
            return SampledTokens(ids)
        rows = self.tables.upload(shape.logprobs.rows, torch.int64)
        logprobs = [part.logprobs for part in parts if part.logprobs is not None]
        return SampledTokens(ids, Logprobs.cat(logprobs), rows)

    def _group(
        self,
        hidden_states: Tensor,
        positions: Tensor,
        slots: Tensor,
        shape: StepShape,
        path: DraftPath | None,
    ) -> SampledTokens:
        logits = self.model.compute_logits(hidden_states).view(*positions.shape, -1)
        params, query = self.tables.sampling.gather(slots), shape.logprobs
        kept = rows = None
        if query is not None:
            rows = self.tables.upload(query.rows, torch.int64)
            token_ids = query.upload_ids(rows.device)
            kept = LogprobRows.of(logits[rows], query.num_top, token_ids)
        edited = logits
        if shape.flags.penalties:
            penalties = self.tables.penalties.gather(slots, self.tables.history)
            edited = penalize(logits, positions, penalties, path, shape.kv_len_ub)
        ids = sample(edited, positions, params, shape.flags)
        if kept is None or rows is None:
            return SampledTokens(ids)
        return SampledTokens(ids, kept.logprobs(ids[rows], logits[rows]))

    def _groups(self, requests: int, width: int) -> Iterator[tuple[int, int]]:
        """(first, last) of requests whose logits fit GROUP_BYTES."""
        size = max(1, GROUP_BYTES // (4 * width * self.model.config.vocab_size))
        for first in range(0, requests, size):
            yield first, min(first + size, requests)
