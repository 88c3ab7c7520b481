"""What draft models share: sizes, loading, and an own or the target's vocabulary, maybe pruned.

A draft may bring its own embedding and LM head; else the target's serve. With a pruned vocabulary
the head has one row per draft id, and `d2t` holds offsets: target id = draft id + d2t[draft id].
A DFlash draft with offsets and no head has the target's rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from forerun.config.model_config import ModelConfig
from forerun.core.errors import ConfigError
from forerun.kernels.cpu.library import serves_tables
from forerun.kernels.cpu.step import take_rows
from forerun.kvcache.layouts import ModelLayout
from forerun.layers.communication import SINGLE_RANK, Communicator, WeightPlacement
from forerun.layers.embedding import LMHead, VocabEmbedding
from forerun.layers.linear import LinearBase
from forerun.layers.module import Module
from forerun.layers.sharding import even_shard, kv_head_shard
from forerun.models.checkpoint import HARMLESS, Checkpoint
from forerun.models.dummy_weights import fill_dummy
from forerun.models.formats.registry import ONLINE
from forerun.models.registry import check_layers

OWN_EMBEDDING, OWN_HEAD, OFFSETS = "embed_tokens.weight", "lm_head.weight", "d2t"

# Stored by speculators and not needed: the target's own parts, and the inverse of d2t.
UNUSED = ("verifier_norm.weight", "verifier_lm_head.weight", "t2d")

NOT_READ = (*HARMLESS, *UNUSED)
HINT = "Is config.json the one of these weights?"
UNITS = 64  # outputs of an LM head that are computed at once, to read its weight


class TargetVocab(Protocol):
    """The target's embedding and LM head, as in `CausalLM`."""

    @property
    def embedding_rows(self) -> Callable[[], Tensor | None]: ...

    @property
    def embed(self) -> Callable[[Tensor], Tensor]: ...

    @property
    def compute_logits(self) -> Callable[[Tensor], Tensor]: ...

    @property
    def compute_argmax(self) -> Callable[[Tensor], Tensor]: ...

    @property
    def lm_head(self) -> Callable[[Tensor], Tensor]: ...


@dataclass(frozen=True)
class DraftVocab:
    """Sizes, and which parts the checkpoint brings (names as in `own_parts`)."""

    vocab_size: int  # the target's
    draft_vocab_size: int
    hidden_size: int
    own: frozenset[str] = frozenset()


class DraftModel(Module):
    """`embed_tokens`, `lm_head` and `d2t` [V_d] int64 are None where the target's serve."""

    def __init__(self, vocab: DraftVocab, target: TargetVocab, place: WeightPlacement) -> None:
        size, hidden_size, own = vocab.draft_vocab_size, vocab.hidden_size, vocab.own
        self.embed_tokens: VocabEmbedding | None = None
        self.lm_head: LMHead | None = None
        self.d2t: Tensor | None = None
        if OWN_EMBEDDING in own:
            self.embed_tokens = VocabEmbedding(vocab.vocab_size, hidden_size, place)
        pruned = OFFSETS in own and size < vocab.vocab_size
        if OWN_HEAD in own or pruned:
            self.lm_head = LMHead(size, hidden_size, place, tied=None)
        if OFFSETS in own:
            self.d2t = torch.empty(size, dtype=torch.int64, device=place.device)
        self.vocab_size, self._target = vocab.vocab_size, target
        self._has_targets_rows = pruned and OWN_HEAD not in own

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        out = super().weights(prefix)
        if self._has_targets_rows:
            del out[f"{prefix}{OWN_HEAD}"]
        return out if self.d2t is None else out | {f"{prefix}{OFFSETS}": self.d2t}

    def take_targets_rows(self) -> None:
        """Fills the LM head with the target's rows, where the checkpoint has offsets and no head.

        They are the outputs for unit vectors, so the target may keep them in any form.

        Raises:
            ConfigError: the target has no such head.
        """
        if not self._has_targets_rows:
            return
        assert self.lm_head is not None and self.d2t is not None
        weight, vocab = self.lm_head.weight, self.lm_head.vocab
        ids = self.to_target_ids(torch.arange(len(self.d2t), device=weight.device))
        own = ids[vocab.first : vocab.first + vocab.count]
        units = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
        for first in range(0, len(units), UNITS):
            logits = self._target.lm_head(units[first : first + UNITS])
            weight[: vocab.count, first : first + UNITS] = logits[:, own].t()

    def embedding_rows(self) -> Tensor | None:
        """[V, H], what `embed` looks up; None: it does more."""
        own = self.embed_tokens
        return self._target.embedding_rows() if own is None else own.rows

    def embed(self, input_ids: Tensor) -> Tensor:
        """input_ids [T] -> [T, H]."""
        own = self.embed_tokens
        return self._target.embed(input_ids) if own is None else own(input_ids)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[T, H] after the final norm -> [T, V_d]."""
        own = self.lm_head
        return self._target.compute_logits(hidden_states) if own is None else own(hidden_states)

    def compute_argmax(self, hidden_states: Tensor) -> Tensor:
        """[T, H] -> [T] int64, ids of the draft's vocabulary."""
        own = self.lm_head
        if own is None:
            return self._target.compute_argmax(hidden_states)
        return own.argmax(hidden_states)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """int64, any shape."""
        if self.d2t is None:
            return draft_ids
        if not serves_tables(draft_ids):
            return draft_ids + self.d2t[draft_ids]
        offsets = take_rows(self.d2t.view(-1, 1), draft_ids.flatten())
        return draft_ids + offsets.view_as(draft_ids)


def dense_layout(
    model: ModelConfig, num_layers: int, dtype: torch.dtype, comm: Communicator
) -> ModelLayout:
    """What layers of such attention keep on a rank.

    Raises:
        ConfigError: the heads or the MLP cannot be divided.
    """
    even_shard(model.num_heads, comm, "attention heads")
    even_shard(model.intermediate_size, comm, "intermediate size")
    kv_heads = kv_head_shard(model.num_kv_heads, comm).count
    return ModelLayout.dense(num_layers, kv_heads, model.head_dim, dtype)


@dataclass(frozen=True, kw_only=True)
class DraftConfig(ABC):
    """What the configs of all drafts with layers of their own say."""

    partial_rotary: ClassVar[bool] = False  # whether part of a head may be rotated

    model: ModelConfig  # the draft's layers; its vocabulary is the target's
    target_hidden_size: int
    draft_vocab_size: int  # smaller than the target's if it is pruned

    @property
    @abstractmethod
    def num_aux_layers(self) -> int:
        """Returns how many of the target's layers it reads the outputs of."""

    @property
    def aux_hidden_size(self) -> int:
        return self.num_aux_layers * self.target_hidden_size

    @property
    def num_layers(self) -> int:
        return self.model.num_layers

    @property
    def num_heads(self) -> int:
        return self.model.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.model.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.model.head_dim

    @property
    def hidden_size(self) -> int:
        return self.model.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    def kv_layout(self, kv_dtype: torch.dtype, comm: Communicator = SINGLE_RANK) -> ModelLayout:
        """Returns what the layers keep on a rank."""
        return dense_layout(self.model, self.num_layers, kv_dtype, comm)

    def check_sizes(self, layer_ids: Sequence[int], where: str) -> None:
        """Raises ConfigError where layers, target layers or the vocabulary cannot be served."""
        try:
            check_layers(self.model, partial_rotary=self.partial_rotary)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        if min(layer_ids, default=0) < 0:
            raise ConfigError(f"{where}: target layer ids {tuple(layer_ids)} start below 0.")
        if self.draft_vocab_size > self.vocab_size:
            raise ConfigError(
                f"{where}: draft_vocab_size {self.draft_vocab_size} is over the target's"
                f" {self.vocab_size}."
            )


def draft_config_file(folder: Path) -> Path:
    """Returns the path of a draft's `config.json`.

    Raises:
        ConfigError: there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder; give the path of the draft model's folder, or org/name of"
            " one on the Hub."
        )
    return folder / "config.json"


Draft = TypeVar("Draft", bound=DraftModel)


def quantize_draft(draft: Module, quantization: str | None) -> None:
    """Quantizes the plain linears of a loaded draft, before it is prepared.

    `quantization`: `DraftContext.quantization`; nothing is done for those that are no formats.
    """
    online = ONLINE.get(quantization)
    if online is None:
        return
    for linear in draft.modules(LinearBase):
        plain = linear.weight
        if linear.quantizable and linear.quantized is None and linear.quantize(online):
            assert linear.quantized is not None
            linear.quantized.quantize_(plain)


def dummy_draft(
    draft: Draft, load_format: str, comm: Communicator, quantization: str | None = None
) -> Draft:
    """Fills a draft with random weights and prepares it.

    Args:
        load_format: of `DUMMY_FORMATS`.
        quantization: as in `quantize_draft`.
    """
    fill_dummy(draft.weights(), load_format, shards=draft.shards(), comm=comm)
    quantize_draft(draft, quantization)
    draft.prepare()
    return draft


def read_draft(
    build: Callable[[WeightPlacement, int], Draft],
    checkpoint: Checkpoint,
    place: WeightPlacement,
    max_positions: int,
    quantization: str | None = None,
) -> Draft:
    """Reads a draft's weights and prepares it.

    Args:
        build: with the length of the rotary tables. Called twice, at first on the meta device:
            what does not fit the files is refused before it is allocated.
        quantization: as in `quantize_draft`.

    Raises:
        ConfigError: names, shapes or kinds are not those of the files, or these are broken.
    """
    check_draft(build, checkpoint, place)
    draft = build(place, max_positions)
    checkpoint.read_into(draft.weights(), NOT_READ, HINT, draft.shards(), place.comm)
    _check_offsets(checkpoint.folder, draft.d2t, draft.vocab_size)
    draft.take_targets_rows()
    quantize_draft(draft, quantization)
    draft.prepare()
    return draft


def check_draft(
    build: Callable[[WeightPlacement, int], Draft], checkpoint: Checkpoint, place: WeightPlacement
) -> None:
    """Compares names, shapes and kinds with the files, and reads no weight.

    Raises:
        ConfigError: they differ.
    """
    shape = build(place.on_meta(), 1)
    checkpoint.check(shape.weights(), NOT_READ, HINT, shape.shards())


def own_parts(
    checkpoint: Checkpoint, draft_vocab: int, vocab: int, needed: Sequence[str] = (OFFSETS,)
) -> frozenset[str]:
    """Which of embedding, LM head and offsets the checkpoint brings.

    Args:
        needed: with a pruned vocabulary.

    Raises:
        ConfigError: a pruned vocabulary without them.
    """
    own = frozenset(n for n in (OWN_EMBEDDING, OWN_HEAD, OFFSETS) if n in checkpoint)
    if draft_vocab < vocab and not set(needed) <= own:
        raise ConfigError(
            f"{checkpoint.folder}: a draft vocabulary of {draft_vocab} out of {vocab}"
            f" needs {' and '.join(needed)}; the checkpoint is incomplete."
        )
    return own


def _check_offsets(folder: Path, d2t: Tensor | None, vocab: int) -> None:
    """Raises ConfigError where `d2t` [V_d] leads outside the target's vocabulary."""
    if d2t is None:
        return
    ids = torch.arange(d2t.shape[0], device=d2t.device) + d2t
    if ids.min() < 0 or ids.max() >= vocab:
        raise ConfigError(
            f"{folder}: d2t leads outside the vocabulary of {vocab}; it must hold"
            " offsets (target id = draft id + offset)."
        )
