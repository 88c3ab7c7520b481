"""Chain drafts: their settings, the sampling loop, and drafts that read the target's hidden states.

A chain is sampled token by token, each from the hidden state of the token before it. At position p,
a draft model that reads the target's hidden states gets the hidden state of p and the token at
p + 1, and predicts the token at p + 2. Its phases are SGLang's (draft, verify, draft extend):

    observe   draft extend: the draft model runs over all verified tokens, with the target's hidden
              states. Its output at the last committed token is kept: the logits of the next step's
              first draft, and the hidden state to continue from
    propose   samples the first draft, then runs the draft model once per further draft, each time
              on the hidden state that it returned before

The next `observe` overwrites K/V that `propose` wrote, and K/V of rejected tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
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

NUM_STEPS = Option(
    "speculative_num_steps",
    int,
    None,
    "Drafts per step of a chain; default: the draft's own number",
)


def resolve_num_drafts(config: EngineConfig, default: int) -> int:
    """K of a chain, from the settings.

    Raises:
        ConfigError: it is not positive, two settings disagree, or a setting does not apply to
            chains.
    """
    steps, tokens = config.algorithm_options[NUM_STEPS.name], config.speculative_num_draft_tokens
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
    for name, value in config.algorithm_options.items():
        if name.endswith("_topk") and value not in (None, 1):
            raise ConfigError(
                f"{name} must be 1 (a chain), got {value}; for trees choose another"
                " speculative_algorithm."
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


class HiddenStateDraft(Protocol):
    """A draft model whose input at each position is a hidden state and a token."""

    def forward(
        self, input_ids: Tensor, hidden_states: Tensor, positions: Tensor, ctx: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        """Writes K/V of T tokens.

        Args:
            input_ids: [T] int64, the tokens at `positions` + 1.
            hidden_states: [T, H], at `positions`.
            positions: [T] int32.

        Returns:
            [T, H] for `compute_logits`; [T, H], the hidden states at `positions` + 1.
        """

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[T, H] -> [T, V]."""


class HiddenStateChain(SpeculativeAlgorithm):
    """A chain of a `HiddenStateDraft`.

    A subclass loads the model (`load` calls `set_draft`) and chooses the target's hidden states
    that it reads.
    """

    def set_draft(
        self,
        draft: HiddenStateDraft,
        hidden_size: int,
        dtype: torch.dtype,
        token_ids: Tensor | None = None,
    ) -> None:
        """`hidden_size`: H of the draft; `token_ids`: as in `sample_chain`."""
        self._model, self._hidden_size, self._dtype = draft, hidden_size, dtype
        self._token_ids = token_ids

    @abstractmethod
    def target_hidden_states(self, step: ObserveInput) -> Tensor:
        """[T, H]: the draft model's input for tokens that the target has run on."""

    def create_future_map(self, ctx: SlotContext) -> SlotState:
        """Both results of `forward` at the last committed token."""
        shape = (ctx.slots, self._hidden_size)
        self._logits_hidden = torch.zeros(shape, dtype=self._dtype, device=ctx.device)
        self._next_hidden = torch.zeros_like(self._logits_hidden)
        return SlotState({"logits_hidden": self._logits_hidden, "next_hidden": self._next_hidden})

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def propose(self, step: ProposeInput) -> Draft:
        hidden = self._next_hidden[step.slots]

        def next_logits(i: int, token: Tensor) -> Tensor:
            """Runs at position `start` + i - 1, with token i - 1 (at the position after it)."""
            nonlocal hidden
            assert step.attention is not None
            context = step.attention(1, i - 1)
            out, hidden = self._model.forward(token, hidden, step.start + (i - 1), context)
            return self._model.compute_logits(out)

        first = self._model.compute_logits(self._logits_hidden[step.slots])
        return sample_chain(step, first, next_logits, self._token_ids)

    def observe(self, step: ObserveInput) -> None:
        out, following = self._model.forward(
            step.next_ids, self.target_hidden_states(step), step.positions, step.attention
        )
        last = step.last_index
        self._logits_hidden[step.slots] = out[last]
        self._next_hidden[step.slots] = following[last]
