"""How much memory a run needs, before it starts, and what to change if that is too much."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from forerun.core.errors import ConfigError
from forerun.platform.device import memory
from forerun_train.drafts.draft import CHUNK_LOGITS, Draft
from forerun_train.hidden_states import GIB, FrozenTarget
from forerun_train.trainer.options import TrainOptions

SHARE = 0.95  # of the free memory that may be used
# Values that stay for the backward pass, for each row of a layer: of the hidden size, of the heads
# and of the MLP. Counted in `drafts/parts.py`, norms and RoPE in float32.
KEPT_HIDDEN, KEPT_HEADS, KEPT_MLP = 10, 8, 4


@dataclass(frozen=True)
class Shape:
    """What memory depends on."""

    sequences: int  # at a time on this device
    options: TrainOptions
    hidden: int
    heads: int  # q, k and v together, times their size
    inner: int
    layers: int
    rows: int  # of blocks, per sequence
    scores: int  # of a chain's steps that are kept, per sequence
    aux: int  # k · H
    element: int  # bytes of a value

    @property
    def activations(self) -> int:
        """Bytes of the draft's activations."""
        tokens = self.sequences * (self.rows + self.options.seq_len)
        each = KEPT_HIDDEN * self.hidden + KEPT_HEADS * self.heads + KEPT_MLP * self.inner
        layers = 1 if self.options.activation_checkpointing else self.layers
        residual = self.layers * self.hidden
        chains = self.sequences * self.scores * (4 + self.element)
        return tokens * (layers * each + residual) * self.element + chains

    @property
    def target_states(self) -> int:
        """Bytes of the target's hidden states, and of its widest layer while it runs."""
        tokens = self.sequences * self.options.seq_len
        return tokens * (2 * self.aux + 6 * self.hidden + 3 * self.inner) * self.element


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device, by what they are for."""

    target: int
    masters: int  # parameters, gradients and optimizer state of the draft, float32
    activations: int
    logits: int  # of a chunk

    @property
    def total(self) -> int:
        """All of it."""
        return self.target + self.masters + self.activations + self.logits

    def __str__(self) -> str:
        parts = (
            ("target", self.target),
            ("draft and optimizer", self.masters),
            ("activations", self.activations),
            ("logits", self.logits),
        )
        listed = ", ".join(f"{name} {_gib(size)}" for name, size in parts)
        return f"{_gib(self.total)} GiB ({listed})"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"


def estimate(shape: Shape, target: FrozenTarget, draft: Draft, ranks: int) -> MemoryEstimate:
    """What a run of this shape needs on each of `ranks` devices."""
    weights = sum(w.numel() * w.element_size() for w in target.weights.values())
    head = target.head.numel() * target.head.element_size()
    parameters = sum(p.numel() for p in draft.parameters())
    chunk = CHUNK_LOGITS.get(target.device.type, CHUNK_LOGITS["cpu"])
    rows = shape.sequences * shape.options.anchors * draft.num_drafts
    logits = min(chunk, rows * len(draft.vocabulary.head))
    copies = 2 if draft.head.reads_target else 1
    return MemoryEstimate(
        target=weights + head,
        masters=parameters * 16 // ranks,
        activations=shape.activations + shape.target_states,
        logits=copies * logits * (2 * shape.element + 4),
    )


def shape_of(options: TrainOptions, target: FrozenTarget, draft: Draft, ranks: int) -> Shape:
    """The shape of a run."""
    model = target.config
    own = options.batch_size // ranks
    parts = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    return Shape(
        sequences=min(options.micro_batch or own, own),
        options=options,
        hidden=model.hidden_size,
        heads=parts,
        inner=options.intermediate_size or model.intermediate_size,
        layers=max(1, len(draft.layers())),
        rows=options.anchors * options.block_size,
        scores=0 if draft.layers() else _scores(options, draft, model.num_heads),
        aux=len(draft.target_layer_ids) * model.hidden_size,
        element=torch.finfo(target.dtype).bits // 8,
    )


def _scores(options: TrainOptions, draft: Draft, heads: int) -> int:
    steps = 1 if options.activation_checkpointing else draft.num_drafts
    return steps * heads * options.anchors * options.seq_len


def check_memory(options: TrainOptions, target: FrozenTarget, draft: Draft, ranks: int) -> str:
    """One line that says what the run needs.

    Raises:
        ConfigError: there is not as much; the message says what to change.
    """
    shape = shape_of(options, target, draft, ranks)
    needed = estimate(shape, target, draft, ranks)
    held = needed.target if target.device.type == "cuda" else 0  # loaded already
    free = memory(target.device)[0] + held
    line = f"memory: about {needed} of {_gib(free)} GiB free"
    if needed.total <= SHARE * free:
        return line
    raise ConfigError(f"{line}: too little. {_advice(shape, target, draft, ranks, SHARE * free)}")


def _advice(shape: Shape, target: FrozenTarget, draft: Draft, ranks: int, limit: float) -> str:
    """The mildest change with which a run fits."""
    options = replace(shape.options, activation_checkpointing=True)
    lighter = replace(shape_of(options, target, draft, ranks), sequences=shape.sequences)
    for changed, setting in ((shape, ""), (lighter, " and --activation-checkpointing")):
        size = changed.sequences
        while size > 1:
            size //= 2
            tried = replace(changed, sequences=size)
            if estimate(tried, target, draft, ranks).total <= limit:
                return f"Set --micro-batch {size}{setting}; the result stays the same."
    return "Lower --seq-len or --anchors, take a smaller draft, or use more GPUs (torchrun)."
