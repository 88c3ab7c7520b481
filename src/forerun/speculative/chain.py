"""Chain drafts: their settings, the sampling loop, and drafts that read the target's hidden states.

Trees of these drafts are in `beam_tree.py`.

A chain is sampled token by token, each from the hidden state of the token before it. At position p,
a draft model that reads the target's hidden states gets the hidden state of p and the token at
p + 1, and predicts the token at p + 2. Its phases are SGLang's (draft, verify, draft extend):

    observe   draft extend: the draft model runs over all verified tokens, with the target's hidden
              states. Its output at the last committed token is kept: the logits of the next step's
              first draft, and the hidden state to continue from
    propose   samples the first draft, then runs the draft model once per further draft, each time
              on the hidden state that it returned before

The next `observe` overwrites K/V that `propose` wrote, and K/V of rejected tokens.

A draft of depth D has D modules (multi-token prediction; DeepSeek-V3, arXiv 2412.19437, section
2.2). Module i reads at p what module i - 1 gave at p and the token at p + 1 + i, and predicts the
token at p + 2 + i: draft i comes from module i, further drafts from the last one. Module i has K/V
of its own, complete up to i positions before the last committed token, since the tokens after that
are drafts: `observe` runs it over tokens that begin i positions earlier, and `propose` over the i
positions up to the last one. What module i - 1 gave at the first of these is kept.

A parallel draft predicts all tokens of a step in one pass: where no token is known yet, it reads a
mask. Its first draft still comes from `observe`. (P-EAGLE, arXiv 2602.01469; PARD, arXiv
2504.18583.)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from forerun.attention.base import AttentionContext
from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.speculative.base import (
    Draft,
    ObserveInput,
    Option,
    ProposeInput,
    SlotContext,
    SlotState,
    SpeculativeAlgorithm,
)
from forerun.speculative.beam_tree import TOPK, Beams, BeamTree, propose_tree

NUM_STEPS = Option(
    "speculative_num_steps",
    int,
    None,
    "Drafts per step of a chain; default: the draft's own number",
)

PARALLEL_STEPS = 8  # of parallel drafts, which P-EAGLE and PARD train for as many


def resolve_num_drafts(config: EngineConfig, default: int, trees: bool = False) -> int:
    """K of a chain, from the settings. `trees`: it may be the longest path of a tree.

    Raises:
        ConfigError: it is not positive, two settings disagree, or a setting does not apply to
            chains.
    """
    steps, tokens = config.algorithm_options[NUM_STEPS.name], config.speculative_num_draft_tokens
    if trees and config.algorithm_options[TOPK.name] != 1:
        tokens = None  # of the tree: see `resolve_tree`
    if steps is not None and steps < 1:
        raise ConfigError(f"{NUM_STEPS.name} must be >= 1, got {steps}.")
    if tokens is not None and tokens < 2:
        raise ConfigError(
            f"speculative_num_draft_tokens must be >= 2 (a draft and the last token), got {tokens}."
        )
    if steps is not None and tokens is not None and tokens != steps + 1:
        raise ConfigError(
            f"{NUM_STEPS.name} {steps} and speculative_num_draft_tokens {tokens} disagree: a chain"
            f" of {steps} drafts verifies {steps + 1} tokens; set one of them."
        )
    if config.speculative_draft_window_size is not None:
        raise ConfigError(
            "speculative_draft_window_size: this draft attends to its whole context; drop it."
        )
    if steps is not None:
        return int(steps)
    return default if tokens is None else tokens - 1


def check_match(folder: Path, what: str, draft: object, target: object) -> None:
    """
    Raises:
        ConfigError: the draft's value is not the target's.
    """
    if draft != target:
        raise ConfigError(
            f"The draft {folder} does not fit the target: its {what} is {draft}, the target's"
            f" {target}. Use the draft that was trained for this target."
        )


def sample_chain(
    step: ProposeInput,
    logits: Tensor,
    next_logits: Callable[[int, Tensor], Tensor],
    token_ids: Tensor | None = None,
) -> Draft:
    """Samples W - 1 tokens, one after another.

    Args:
        logits: [B, V], of token 0.
        next_logits: (i, token i - 1 [B] int64) -> logits [B, V] of token i.
        token_ids: [V] int64, the target's token id of each column; default: 0 … V - 1.
    """
    tokens: list[Tensor] = []
    for i in range(step.num_verify_tokens - 1):
        if i:
            logits = next_logits(i, tokens[-1])
        positions = (step.start + (i + 1)).unsqueeze(1)
        sampled = step.sample(logits.unsqueeze(1), positions, token_ids).squeeze(1)
        tokens.append(sampled if token_ids is None else token_ids[sampled])
    return Draft(torch.stack(tokens, 1))


def sample_rows(step: ProposeInput, logits: Tensor, token_ids: Tensor | None = None) -> Draft:
    """Samples W - 1 tokens, independently.

    Args:
        logits: [B, W - 1, V].
        token_ids: as in `sample_chain`.
    """
    positions = step.positions.view(-1, step.num_verify_tokens)[:, 1:]
    sampled = step.sample(logits, positions, token_ids)
    return Draft(sampled if token_ids is None else token_ids[sampled])


@dataclass(frozen=True)
class MaskInput:
    """What a parallel draft reads where no token is known yet."""

    token_id: int
    hidden_states: Tensor  # [1, H]


class HiddenStateDraft(Protocol):
    """A draft model whose input at each position is a hidden state and a token."""

    def forward(
        self, input_ids: Tensor, hidden_states: Tensor, positions: Tensor, ctx: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        """Writes K/V of T tokens.

        Args:
            input_ids: [T] int64, the tokens at `positions` + 1; + 1 + i in module i.
            hidden_states: [T, H], at `positions`.
            positions: [T] int32 or int64.

        Returns:
            [T, H] for `compute_logits`; [T, H], the hidden states for one token further.
        """

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[T, H] -> [T, V]."""


class HiddenStateChain(SpeculativeAlgorithm):
    """A chain or a tree of `HiddenStateDraft`s.

    A subclass loads the model (`load` calls `set_draft`) and chooses the target's hidden states
    that it reads.
    """

    def set_draft(
        self,
        modules: Sequence[HiddenStateDraft],
        hidden_size: int,
        dtype: torch.dtype,
        token_ids: Tensor | None = None,
        mask: MaskInput | None = None,
        tree: BeamTree | None = None,
    ) -> None:
        """`hidden_size`: H of the draft; `token_ids`: as in `sample_chain`; `mask`: of a parallel
        draft; `tree`: instead of a chain.
        """
        self._modules, self._hidden_size, self._dtype = modules, hidden_size, dtype
        self._mask, self._tree = mask, tree
        self._token_ids = token_ids

    @abstractmethod
    def target_hidden_states(self, step: ObserveInput) -> Tensor:
        """[T, H]: the draft model's input for tokens that the target has run on."""

    def create_future_map(self, ctx: SlotContext) -> SlotState:
        """Module 0's result for logits, and every module's for the next token, where complete."""
        depth, shape = len(self._modules), (ctx.slots, self._hidden_size)
        self._logits_hidden = torch.zeros(shape, dtype=self._dtype, device=ctx.device)
        self._next_hidden = self._logits_hidden.unsqueeze(1).repeat(1, depth, 1)
        return SlotState({"logits_hidden": self._logits_hidden, "next_hidden": self._next_hidden})

    def next_hidden(self, slots: Tensor) -> Tensor:
        """[B, modules, H]: what each module gave where the drafts of slots [B] begin."""
        return self._next_hidden[slots]

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def propose(self, step: ProposeInput) -> Draft:
        if self._mask is not None:
            return self._propose_at_once(step, self._mask)
        if self._tree is not None:
            model = _BeamRunner(self, step), self._modules[0].compute_logits
            first = self._logits_hidden[step.slots]
            return propose_tree(step, self._tree, first, model, self._token_ids)
        return self._propose_chain(step)

    def _propose_chain(self, step: ProposeInput) -> Draft:
        depth, kept = len(self._modules), self.next_hidden(step.slots)
        drafts: list[Tensor] = []
        hidden = kept[:, :0] if depth > 1 else kept  # [B, n, H]: of the n rows that ran last

        def next_logits(i: int, token: Tensor) -> Tensor:
            """Draft i, from module i or, once all have run, from the last one further on."""
            nonlocal hidden
            assert step.attention is not None
            drafts.append(token)
            if i < depth:
                ids = torch.stack(drafts, 1).unsqueeze(1)
                read = torch.cat((kept[:, i - 1 : i], hidden), 1).unsqueeze(1)
                rows, after = self.run_module(i, ids, read, step.start, step.attention(i, -i))
                out, hidden = rows[:, 0, -1], after[:, 0]
            else:
                at = i - depth
                context, positions = step.attention(1, at), step.start + at
                out, after = self._modules[-1].forward(token, hidden[:, -1], positions, context)
                hidden = after.unsqueeze(1)
            return self._modules[0].compute_logits(out)

        first = self._modules[0].compute_logits(self._logits_hidden[step.slots])
        return sample_chain(step, first, next_logits, self._token_ids)

    def _propose_at_once(self, step: ProposeInput, mask: MaskInput) -> Draft:
        """The first draft, and after it those of masks, at positions from `start` on."""
        batch, masks = step.slots.shape[0], step.num_verify_tokens - 2
        rows = self._logits_hidden[step.slots].unsqueeze(1)
        if masks:
            assert step.attention is not None
            context = step.attention(masks)
            ids = torch.full_like(step.slots, mask.token_id).repeat(masks)
            positions = step.positions.view(batch, -1)[:, :masks].flatten()
            hidden = mask.hidden_states.expand(len(ids), -1).contiguous()
            out, _ = self._modules[0].forward(ids, hidden, positions, context)
            rows = torch.cat((rows, out.view(batch, masks, -1)), 1)
        logits = self._modules[0].compute_logits(rows.flatten(0, 1))
        return sample_rows(step, logits.view(batch, masks + 1, -1), self._token_ids)

    def run_module(
        self, i: int, paths: Tensor, hidden: Tensor, start: Tensor, context: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        """Runs module i over drafts, from i positions before `start` [B] on.

        Args:
            paths: [B, n, d] int64, the drafts of n beams, one after another.
            hidden: [B, n, d, H], what the module reads with each.
            context: of these n · d tokens.

        Returns:
            [B, n, d, H] for logits; [B, n, d, H] for the next module, or one token further.
        """
        count, depth, size = hidden.shape[1:]
        rows = torch.arange(depth, device=paths.device)
        positions = (context.batch.start.unsqueeze(1) + rows).repeat(1, count).flatten()
        # Positions that do not exist, at the beginning of a text: then rows begin at 0.
        missing = (i - start).clamp_min(0).long().view(-1, 1, 1)
        if i:
            source = (rows + missing).clamp_max(depth - 1).expand_as(paths)
            paths, hidden = paths.gather(2, source), _rows_of(hidden, source)
        out, after = self._modules[i].forward(
            paths.flatten(), hidden.reshape(-1, size), positions, context
        )
        out, after = (each.view(-1, count, depth, size) for each in (out, after))
        if i:
            ends = (rows - missing).clamp_min(0).expand_as(paths)
            out, after = _rows_of(out, ends), _rows_of(after, ends)
        return out, after

    def observe(self, step: ObserveInput) -> None:
        out, hidden = self._modules[0].forward(
            step.next_ids, self.target_hidden_states(step), step.positions, step.attention
        )
        last = step.last_index
        self._logits_hidden[step.slots] = out[last]
        kept, start = [hidden[last]], step.start
        for i, module in enumerate(self._modules[1:], start=1):
            rows = ModuleRows(step, i, start)
            hidden = rows.shifted(hidden, self._next_hidden[step.slots, i - 1])
            _, hidden = module.forward(rows.ids, hidden, rows.positions, rows.attention)
            kept.append(hidden[rows.last_index])
            start = rows.start
        self._next_hidden[step.slots] = torch.stack(kept, 1)


def _rows_of(x: Tensor, index: Tensor) -> Tensor:
    """Rows `index` [B, n, d] of x [B, n, d, H]."""
    return x.gather(2, index.unsqueeze(3).expand_as(x))


class _BeamRunner:
    """Runs the modules on the beams of a tree, step after step: draft i comes from module i.

    A module reads along each path what the module before gave on it; the last one, further on, what
    it gave itself.
    """

    def __init__(self, chain: HiddenStateChain, step: ProposeInput) -> None:
        self._chain, self._step = chain, step
        self._kept = chain.next_hidden(step.slots)  # [B, modules, H]
        self._read: Tensor | None = None  # [B, n, d, H], for the beams of the next step

    def __call__(self, beams: Beams) -> Tensor:
        count, depth = beams.paths.shape[1:]
        last = self._kept.shape[1] - 1
        module = min(depth, last)
        read = self._first(0, count) if self._read is None else beams.follow(self._read)
        context, start = beams.attention(self._step, -module), self._step.start
        out, after = self._chain.run_module(module, beams.paths, read, start, context)
        if depth < last:
            self._read = torch.cat((self._first(depth, count), after), 2)
        else:
            self._read = torch.cat((read, after[:, :, -1:]), 2)
        return out[:, :, -1]

    def _first(self, module: int, count: int) -> Tensor:
        """[B, n, 1, H]: what `module` gave where all beams begin."""
        return self._kept[:, None, module : module + 1].expand(-1, count, -1, -1)


class ModuleRows:
    """The tokens over which `observe` runs module i: as many as the target ran on, and earlier."""

    def __init__(self, step: ObserveInput, module: int, before: Tensor) -> None:
        """`before` [B] int32: where those of module i - 1 begin, at most one position later."""
        self.attention = step.attention_before(module)
        self.start = self.attention.batch.start
        self._owner, first = step.owner, step.first_index
        self._index = torch.arange(len(self._owner), device=first.device)
        offsets = self._index - first[self._owner]
        self.positions = self.start[self._owner] + offsets
        known = (step.start + step.num_committed)[self._owner]  # position of the last token
        read = (self.positions + (1 + module)).long()
        ids = step.history[step.slots[self._owner], torch.minimum(read, known)]
        self.ids = torch.where(read <= known, ids, 0).long()
        # Where it began no i positions earlier, fewer of the tokens are complete.
        late = self.start - (step.start - module)
        self.last_index = first + (step.num_committed - 1 - late).clamp_min(0)
        moved = (before - self.start)[self._owner]
        self._source = (self._index - moved).clamp_min(0)
        self._kept = (offsets < moved).unsqueeze(1)

    def shifted(self, hidden_states: Tensor, kept: Tensor) -> Tensor:
        """Returns what module i - 1 gave at these tokens.

        Args:
            hidden_states: [T, H], at its own.
            kept: [B, H], at the token before them.
        """
        return torch.where(self._kept, kept[self._owner], hidden_states[self._source])
