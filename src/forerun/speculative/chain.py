"""What chain drafts share: the settings, the loop, and drafts that read the target's hidden states.

A chain is drawn token by token, each from the row before it, with the noise that the target draws
with. Where the draft reads hidden states, its row at position p holds that of p and the token at
p + 1, and predicts the token at p + 2. Then

    observe   runs the draft over all W rows at once, on the target's own hidden states. The last
              committed row is kept: what it predicts is the next step's first draft
    propose   draws that, then runs a row a draft, each on the hidden state that the last one gave

and what `propose` wrote, like what `observe` wrote past the committed rows, is overwritten by the
next `observe`. (Draft, verify, extend: the phases of speculation in SGLang's second version.)
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
    "speculative_num_steps", int, None, "Drafts of a chain, a step; none: the draft's own number"
)


def chain_length(config: EngineConfig, default: int) -> int:
    """K, from the settings that can say it.

    Raises:
        ConfigError: it is not positive, two settings disagree, or something is asked of the draft
            that chains do not do.
    """
    steps, rows = config.algorithm_options[NUM_STEPS.name], config.speculative_num_draft_tokens
    if steps is not None and steps < 1:
        raise ConfigError(f"{NUM_STEPS.name} must be >= 1, got {steps}.")
    if rows is not None and rows < 2:
        raise ConfigError(
            f"speculative_num_draft_tokens must be >= 2 (a draft and the newest token), got {rows}."
        )
    if steps is not None and rows is not None and rows != steps + 1:
        raise ConfigError(
            f"{NUM_STEPS.name} {steps} and speculative_num_draft_tokens {rows} disagree: a chain of"
            f" {steps} drafts verifies {steps + 1} rows; set one of them."
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
    return default if rows is None else rows - 1


def refuse_misfit(folder: Path, what: str, of_draft: object, of_target: object) -> None:
    """Raises ConfigError where the two differ."""
    if of_draft != of_target:
        raise ConfigError(
            f"The draft {folder} does not fit the target: its {what} is {of_draft}, the target's"
            f" {of_target}. Use the draft that was trained for this target."
        )


def draw_chain(
    step: ProposeInput,
    logits: Tensor,
    run: Callable[[int, Tensor], Tensor],
    columns: Tensor | None = None,
) -> Draft:
    """W - 1 tokens, one after another.

    Args:
        logits: [B, V], for the first.
        run: (i, token i - 1 [B]) -> logits [B, V] for token i.
        columns: [V] int64, the target's ids of the logits' columns where these are not 0 … V - 1.
    """
    tokens: list[Tensor] = []
    for i in range(step.num_verify_tokens - 1):
        if i:
            logits = run(i, tokens[-1])
        at = (step.start + (i + 1)).unsqueeze(1)
        drawn = step.sample(logits.unsqueeze(1), at, columns).squeeze(1)
        tokens.append(drawn if columns is None else columns[drawn])
    return Draft(torch.stack(tokens, 1))


class HiddenDraft(Protocol):
    """A draft model that reads a hidden state and a token a row."""

    def forward(
        self, input_ids: Tensor, hidden_states: Tensor, positions: Tensor, ctx: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        """Writes K/V of T tokens.

        Args:
            input_ids: [T], the tokens at `positions` + 1.
            hidden_states: [T, H], at `positions`.

        Returns:
            [T, H] for `compute_logits`, and [T, H], the hidden states for one position further.
        """

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[T, H] -> [T, V]."""


class HiddenChain(SpeculativeAlgorithm):
    """A chain over a `HiddenDraft`; a subclass says which, and what it reads of the target."""

    def use(
        self, draft: HiddenDraft, hidden: int, dtype: torch.dtype, columns: Tensor | None
    ) -> None:
        """For `load`. `hidden`: H of the draft; `columns` as in `draw_chain`."""
        self._model, self._size, self._dtype, self._columns = draft, hidden, dtype, columns

    @abstractmethod
    def hidden(self, step: ObserveInput) -> Tensor:
        """[T, H], what the draft's rows read where the target has run."""

    def create_future_map(self, ctx: SlotContext) -> SlotState:
        """Both results of `forward` at the last committed row."""
        shape, device = (ctx.slots, self._size), ctx.device
        self._normed = torch.zeros(shape, dtype=self._dtype, device=device)
        self._further = torch.zeros(shape, dtype=self._dtype, device=device)
        return SlotState({"normed": self._normed, "further": self._further})

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def propose(self, step: ProposeInput) -> Draft:
        h = self._further[step.slots]

        def run(i: int, token: Tensor) -> Tensor:
            """The row at `start` + i - 1 holds token i - 1, which stands one further."""
            nonlocal h
            assert step.attention is not None
            context = step.attention(1, i - 1)
            normed, h = self._model.forward(token, h, step.start + (i - 1), context)
            return self._model.compute_logits(normed)

        first = self._model.compute_logits(self._normed[step.slots])
        return draw_chain(step, first, run, self._columns)

    def observe(self, step: ObserveInput) -> None:
        normed, further = self._model.forward(
            step.next_ids, self.hidden(step), step.positions, step.attention
        )
        last = step.last_index
        self._normed[step.slots] = normed[last]
        self._further[step.slots] = further[last]
