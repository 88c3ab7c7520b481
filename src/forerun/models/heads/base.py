"""Heads over a DFlash body: what chooses the drafts of a block from its hidden states.

A body gives every row of a block hidden states. A head turns those of the rows that predict into
tokens: it corrects the logits with what it has chosen before, or chooses among the best of them. A
head is a class in one file, with a config class that recognises its checkpoints; `registry.py`
lists them.

Shapes: B requests, R rows of a block, D drafts of each, hidden size H, V columns of draft logits.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec
import torch.nn.functional as F
from torch import Tensor

from forerun.config.schema import checked
from forerun.core.errors import ConfigError
from forerun.layers.communication import SINGLE_RANK, WeightPlacement
from forerun.layers.module import Module
from forerun.models.block_convolution import ConvolutionConfig
from forerun.models.formats.base import Headers


@dataclass(frozen=True)
class Block:
    """What a body has computed for the block of each of B requests."""

    hidden: Tensor  # [B, R, H], after the final norm
    first: int  # the first row that predicts
    depth: int  # D: drafts that are wanted, of rows `first` … `first` + D - 1
    anchor: Tensor  # [B] int64: the last known token, row 0 of the block
    before: Tensor | None  # [B] int64: the token before it, with `HeadConfig.reads_before`
    greedy: bool  # every request takes the most likely token
    context: Tensor | None  # [B, H]: C of the last committed token, with `HeadConfig.reads_context`

    @property
    def predicting(self) -> Tensor:
        """Hidden states of the rows that predict, [B, D, H]."""
        return self.hidden[:, self.first : self.first + self.depth]


@dataclass(frozen=True)
class Proposal:
    """The drafts of a block."""

    tokens: Tensor  # [B, D] int64, ids of the target
    # [B, D] float32: the probability that each is accepted, given that those before it are.
    confidence: Tensor | None = None


class DraftVocabulary(Protocol):
    """What a head uses of the draft model that it belongs to."""

    d2t: Tensor | None  # [V_d] int64, the id of a column less the column; None: columns are ids

    def embedding_rows(self) -> Tensor | None:
        """[V, H], what `embed` looks up; None: it does more."""

    def embed(self, input_ids: Tensor) -> Tensor:
        """input_ids [T] -> [T, H]."""

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[T, H] -> [T, V]."""

    def compute_argmax(self, hidden_states: Tensor) -> Tensor:
        """[T, H] -> [T] int64, columns."""

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Columns -> the target's ids, int64, any shape."""


class Draw(Protocol):
    """Draws drafts from scores, with the sampling parameters and the noise of the target."""

    def __call__(self, scores: Tensor, first: int, columns: Tensor | None = None) -> Tensor:
        """Returns [B, n] int64, ids of the target.

        Args:
            scores: [B, n, C], of drafts `first` … `first` + n - 1.
            columns: [B, n, C] int64, the draft vocabulary's column of each score; default: 0 … V-1.
        """


class DraftHead(Module, ABC):
    """Weights and one step of a head; parts carry the names of its checkpoints."""

    @abstractmethod
    def propose(self, block: Block, vocabulary: DraftVocabulary, draw: Draw) -> Proposal:
        """Chooses the drafts of a block. Shapes depend on (B, R, D) only; nothing is read on the
        host.
        """


class Branches(Protocol):
    """The logits after paths of drafts, row after row, for trees."""

    def after(self, tokens: Tensor, row: int, follow: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns [B, n, V] of draft `row` after the paths that end with these tokens.

        Args:
            tokens: [B, n] int64, ids of the target; for row 0 the anchors.
            follow: what belongs to the paths of the last call, for those that follow them now:
                [B, m, ...] -> [B, n, ...].
        """


class BranchingHead(DraftHead):
    """A head whose drafts may go on after any draft of the row before."""

    @abstractmethod
    def branch(self, block: Block, vocabulary: DraftVocabulary) -> Branches:
        """Begins the trees of a block."""


@dataclass(frozen=True)
class HeadFiles:
    """How the files of a head are recognised, whoever wrote them."""

    name: str
    # Architectures, projector and speculators types, in lower case; speculators' type first.
    names: tuple[str, ...]
    keys: str  # pattern of keys that only such a head has, at the top of config.json or inside
    tensors: str  # pattern of names
    switches: tuple[str, ...] = ()  # keys that can say that the head is not there
    aliases: Mapping[str, str] = field(default_factory=dict)

    def is_off(self, keys: Mapping[str, Any]) -> bool:
        """Whether the config says that only the body is there (`markov_rank: 0`)."""
        stated = [keys[name] for name in self.switches if keys.get(name) is not None]
        return bool(stated) and not any(stated)

    def is_key(self, key: str) -> bool:
        return re.fullmatch(self.keys, key) is not None

    def name_in(self, keys: Mapping[str, Any]) -> str | None:
        """Which name of a config is one of this head, whether it is off or not; None: none."""
        found = (f"{key} {name!r}" for key, name in names_of(keys) if name in self.names)
        return next(found, None)

    def sign(self, keys: Mapping[str, Any]) -> str | None:
        """What shows that a config is that of a body with this head; None: nothing."""
        if self.is_off(keys):
            return None
        own = (key for key, value in keys.items() if value and self.is_key(key))
        return self.name_in(keys) or next(own, None)


def names_of(keys: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a config calls its model: keys and names, in lower case."""
    for architecture in keys.get("architectures") or ():
        yield "architectures", str(architecture).lower()
    for key in ("projector_type", "speculators_model_type"):
        if keys.get(key) is not None:
            yield key, str(keys[key]).lower()


@dataclass(frozen=True)
class BodySizes:
    """What a head is built for."""

    hidden_size: int
    vocab_size: int  # the target's
    draft_vocab_size: int
    block_size: int  # rows that it was trained with
    eps: float  # of the body's norms


class HeadOption(msgspec.Struct, frozen=True):
    """A setting of a head: a keyword of `LLM` and a command-line flag."""

    name: str
    type: type
    default: Any
    help: str


class HeadConfig(ABC):
    """A head as `config.json` describes it."""

    files: ClassVar[HeadFiles]
    keys_read: ClassVar[type[msgspec.Struct]]
    options: ClassVar[tuple[HeadOption, ...]] = ()
    reads_before: ClassVar[bool] = False  # `Block.before`
    reads_context: ClassVar[bool] = False  # `Block.context`
    honours: ClassVar[tuple[str, ...]] = ()  # keys of the body that it reads, too
    fill_in_only: ClassVar[bool] = False  # no row layout but fill-in
    fixed_block: ClassVar[bool] = False  # weights are of one block size, and no smaller one works
    branches: ClassVar[bool] = False  # it builds a `BranchingHead`
    last_row_predicts: ClassVar[bool] = True  # False: drafts are one fewer than rows that could
    # Of the body, where none of its keys states it.
    anchor_first: ClassVar[bool] = False  # the row layout, also of files whose head is off
    causal_windows: ClassVar[bool] = True  # a block is causal in layers that slide

    @classmethod
    def convolution(cls, keys: Mapping[str, Any]) -> ConvolutionConfig | None:
        """The convolutions of the body, where none of its keys states them."""
        return None

    @classmethod
    @abstractmethod
    def read(cls, keys: Mapping[str, Any], where: str) -> HeadConfig:
        """Parses the merged keys of `config.json`.

        Raises:
            ConfigError: a key is missing, of the wrong type, or not supported.
        """

    def check(self, sizes: BodySizes, where: str) -> None:
        """Raises ConfigError where the head cannot be one of such a body."""
        return None

    def with_tensors(self, headers: Headers, sizes: BodySizes) -> HeadConfig:
        """The head with what its checkpoint's tensors say and its config leaves open."""
        return self

    @abstractmethod
    def build(
        self, sizes: BodySizes, place: WeightPlacement, options: Mapping[str, Any]
    ) -> DraftHead:
        """The head with uninitialised weights. `options`: values of `HeadConfig.options`."""

    @abstractmethod
    def describe(self) -> str:
        """The head in a few words, for the log and `forerun doctor`."""


T = TypeVar("T")
Keys = TypeVar("Keys", bound=msgspec.Struct)


def checked_keys(kind: type[Keys], keys: Mapping[str, Any], where: str) -> Keys:
    """The keys of a head, checked.

    Raises:
        ConfigError: one is missing or has the wrong type or range.
    """
    own = {key: keys[key] for key in kind.__struct_fields__ if keys.get(key) is not None}
    missing = [
        field.name
        for field in msgspec.structs.fields(kind)
        if field.required and field.name not in own
    ]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}, which the head needs. Add it.")
    return checked(kind, own, where)


def check_choice(key: str, count: int, sizes: BodySizes, where: str) -> None:
    """Raises ConfigError where `key` asks for more tokens than the draft can choose among."""
    if count > sizes.draft_vocab_size:
        raise ConfigError(
            f"{where}: {key} {count} is over the draft's vocabulary of {sizes.draft_vocab_size}."
            " Correct it."
        )


def agreed(keys: Mapping[str, T | None], where: str) -> T | None:
    """The value of keys that mean the same; None: none is given.

    Raises:
        ConfigError: two differ.
    """
    given = {key: value for key, value in keys.items() if value is not None}
    if len(set(given.values())) > 1:
        said = " and ".join(f"{key} {value}" for key, value in given.items())
        raise ConfigError(f"{where}: {said} say the same and disagree. Remove the wrong one.")
    return next(iter(given.values()), None)


def whole(place: WeightPlacement) -> WeightPlacement:
    """Where weights go that every rank keeps whole."""
    return replace(place, comm=SINGLE_RANK)


class Parameters(Module):
    """Tensors under their own names, with parts beside them."""

    def __init__(self, place: WeightPlacement, **shapes: tuple[int, ...]) -> None:
        self._own = {name: place.empty(*shape) for name, shape in shapes.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._own[name]

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        own = {f"{prefix}{name}": tensor for name, tensor in self._own.items()}
        return own | super().weights(prefix)


class Affine(Parameters):
    """y = x Wᵀ + b, small and in plain PyTorch: `weight` [out, in], `bias` [out] or none."""

    def __init__(self, inputs: int, outputs: int, place: WeightPlacement, bias: bool) -> None:
        shapes = {"weight": (outputs, inputs)} | ({"bias": (outputs,)} if bias else {})
        super().__init__(place, **shapes)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], in x's dtype."""
        bias = self._own.get("bias")
        weight = self["weight"].to(x.dtype)
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


class SiLUMLP(Module):
    """Linear, SiLU, linear; parts are numbered as those of `nn.Sequential` in checkpoints."""

    def __init__(self, first: Affine, second: Affine, norm: Module | None = None) -> None:
        """`norm`: a part before them that the caller applies."""
        self._parts = [part for part in (norm, first) if part is not None]
        self._first, self._second = first, second

    def children(self) -> Iterator[tuple[str, Module]]:
        yield from ((str(i), part) for i, part in enumerate(self._parts))
        yield str(len(self._parts) + 1), self._second

    def inner(self, x: Tensor) -> Tensor:
        """x [..., in] -> the second linear's input."""
        return F.silu(self._first(x))

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return self._second(self.inner(x))
