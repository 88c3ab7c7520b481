"""What draft checkpoints have in common: parts of their own, and a pruned vocabulary.

A draft may bring its own embedding and head; else the target's serve. With a pruned vocabulary the
head has one row a draft id, and `d2t` holds offsets: target id = draft id + d2t[draft id].
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from forerun.core.errors import ConfigError
from forerun.layers.linear import Linear
from forerun.models.checkpoint import Checkpoint

OWN_EMBEDDING, OWN_HEAD, OFFSETS = "embed_tokens.weight", "lm_head.weight", "d2t"

# Stored by speculators and not needed: the target's own parts, and the inverse of d2t.
UNUSED = ("verifier_norm.weight", "verifier_lm_head.weight", "t2d")


def own_parts(checkpoint: Checkpoint, draft_vocab: int, vocab: int) -> frozenset[str]:
    """Which of embedding, head and offsets the checkpoint brings.

    Raises:
        ConfigError: a pruned vocabulary without head or offsets.
    """
    own = frozenset(n for n in (OWN_EMBEDDING, OWN_HEAD, OFFSETS) if n in checkpoint)
    if draft_vocab < vocab and not {OWN_HEAD, OFFSETS} <= own:
        raise ConfigError(
            f"{checkpoint.folder}: a draft vocabulary of {draft_vocab} out of {vocab}"
            " needs lm_head.weight and d2t; the checkpoint is incomplete."
        )
    return own


class OwnParts:
    """Room for what a checkpoint brings, uninitialised; None: it does not bring that."""

    embedding: Tensor | None  # [V, H]
    head: Linear | None  # [V_d, H]
    d2t: Tensor | None  # [V_d] int64

    def __init__(
        self,
        names: frozenset[str],
        vocab: int,
        draft_vocab: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`names`: of `own_parts`."""

        def place(name: str, shape: tuple[int, ...], kind: torch.dtype) -> Tensor | None:
            return torch.empty(shape, dtype=kind, device=device) if name in names else None

        self.embedding = place(OWN_EMBEDDING, (vocab, hidden), dtype)
        head = place(OWN_HEAD, (draft_vocab, hidden), dtype)
        self.head = None if head is None else Linear.of(head)
        self.d2t = place(OFFSETS, (draft_vocab,), torch.int64)

    def weights(self) -> dict[str, Tensor]:
        """Checkpoint name -> the tensor it is copied into."""
        head = None if self.head is None else self.head.weight
        slots = {OWN_EMBEDDING: self.embedding, OWN_HEAD: head, OFFSETS: self.d2t}
        return {name: slot for name, slot in slots.items() if slot is not None}


def check_offsets(folder: Path, d2t: Tensor | None, vocab: int) -> None:
    """Raises ConfigError where `d2t` [V_d] leads outside the target's vocabulary."""
    if d2t is None:
        return
    ids = torch.arange(d2t.shape[0], device=d2t.device) + d2t
    if ids.min() < 0 or ids.max() >= vocab:
        raise ConfigError(
            f"{folder}: d2t leads outside the vocabulary of {vocab}; it must hold"
            " offsets (target id = draft id + offset)."
        )
