"""What tests of drafting heads stand in for a draft model and its sampler with."""

from __future__ import annotations

from torch import Tensor


class Vocabulary:
    """An embedding [V, H], an LM head [V_d, H], and `d2t` [V_d] where they differ."""

    def __init__(self, embedding: Tensor, lm_head: Tensor, d2t: Tensor | None = None) -> None:
        self.embedding, self.lm_head, self.d2t = embedding, lm_head, d2t

    def embedding_rows(self) -> Tensor:
        return self.embedding

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.embedding[input_ids]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return hidden_states @ self.lm_head.T

    def compute_argmax(self, hidden_states: Tensor) -> Tensor:
        return self.compute_logits(hidden_states).argmax(-1)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]


def best(scores: Tensor, first: int, columns: Tensor | None = None) -> Tensor:
    """`Draw` of greedy requests."""
    chosen = scores.argmax(-1)
    return chosen if columns is None else columns.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
