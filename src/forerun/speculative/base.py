"""The extension point: what a drafting algorithm is.

    propose  →  verify  →  commit  →  observe

The engine runs this loop for every algorithm; plain decoding is the one that proposes nothing.
An algorithm states its needs as values (`SpecCaps`), keeps its per-request state in slot rows,
and never reads a device value on the host inside a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from forerun.attention.base import AttentionContext, LayerMask, Mask
from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import ModelConfig
from forerun.kvcache.layouts import ModelLayout


@dataclass(frozen=True)
class Option:
    """A setting that an algorithm declares: a keyword of `LLM` and a command-line flag."""

    name: str
    type: type
    default: Any
    help: str


@dataclass(frozen=True)
class SpecCaps:
    """What an algorithm needs; the engine branches on these values, never on a name."""

    num_drafts: int = 0  # K; a step verifies K + 1 rows a request, at most
    flexible: bool = False  # `propose` takes any `step.width` from 2 up; else K + 1 alone
    kv_reserve: int = 1  # rows past the committed length a step may write
    target_layers: tuple[int, ...] = ()  # outputs of these decoder layers are captured
    draft_kv: ModelLayout | None = None
    draft_heads: int = 0  # query heads of the draft's attention, where it has any
    draft_attention: tuple[LayerMask, ...] = ()  # one a draft layer
    verify_mask: Mask = Mask.CAUSAL  # CUSTOM: `propose` gives trees
    tree_depth: int | None = None  # drafts on their longest path, if that is known
    prefix_lookahead: int = 0  # 1 where draft K/V at i depends on token i + 1
    needs_host_tokens: bool = False  # `propose` reads `step.tokens`: no overlap, not captured
    # `observe` may hear of plain steps later: several rows of a request at once (`Step.late`)
    deferred_observe: bool = False

    @property
    def width(self) -> int:
        """W: rows verified a request and step, at most."""
        return self.num_drafts + 1

    @property
    def makes_trees(self) -> bool:
        return self.verify_mask is Mask.CUSTOM


@dataclass(frozen=True)
class TargetHandle:
    """The parts of the target that drafts share."""

    config: ModelConfig
    embed: Callable[[Tensor], Tensor]  # ids [T] -> [T, H]
    lm_head: Callable[[Tensor], Tensor]  # [T, H] -> logits [T, V]
    lm_head_argmax: Callable[[Tensor], Tensor]  # [T, H] -> [T] int64, the likeliest ids


@dataclass(frozen=True)
class DraftContext:
    """What `load` gets. Attention over the draft's own pool comes with every step."""

    config: EngineConfig
    caps: SpecCaps
    target: TargetHandle
    device: torch.device
    dtype: torch.dtype
    max_positions: int  # positions a request can reach, reserve included
    slots: int


class DraftRows(Protocol):
    """Attention over the draft's pool for rows of a step."""

    def __call__(self, width: int | None, offset: int = 0) -> AttentionContext:
        """Rows [offset, offset + width) of every request; `None`: the ragged rows of a prefill."""


class Draw(Protocol):
    """Draws tokens by the requests' own rules, with the very noise that the target draws with."""

    def __call__(self, logits: Tensor, positions: Tensor, tokens: Tensor | None = None) -> Tensor:
        """A draft that draws so agrees with the target as often as its distribution allows.

        Args:
            logits: [B, n, V].
            positions: [B, n] integers: where the drawn tokens will stand.
            tokens: [V] int64, ids of the columns where these are not 0 … V - 1.

        Returns:
            [B, n] int64 columns.
        """


@dataclass(frozen=True)
class Step:
    """The rows of one forward, as an algorithm sees them. All tensors on the device.

    In a decode step there are W rows for each of B requests, T = B * W; in a prefill step the
    rows are ragged (`width` is None). W may differ from step to step (`SpecCaps.flexible`).
    """

    slots: Tensor  # [B] int64
    start: Tensor  # [B] int32: position of the first row; in a decode step the committed length
    positions: Tensor  # [T] int32
    width: int | None
    newest: Tensor | None  # [B] int64: in a decode step the newest token, which stands at `start`
    input_ids: Tensor | None  # [T] int64: in `observe`, what the target ran on
    history: Tensor  # [slots, positions] int32: the token table; row s, known up to start[s]
    attention: DraftRows | None  # where the algorithm has a pool
    # In `observe`, with `deferred_observe`: rows of plain steps from `start` on, over which
    # nothing was
    # proposed; `commit.new` of them are there, and what stands behind these means nothing.
    late: bool = False
    draw: Draw | None = None  # in `propose`
    # Host, where `needs_host_tokens`: all tokens of each request, and its name while it runs.
    tokens: Sequence[Sequence[int]] | None = None
    request_ids: Sequence[str] | None = None


@dataclass(frozen=True)
class Draft:
    """What may come next.

    `tokens` [B, W - 1] int64: in a chain, token i stands i + 1 behind the newest. In a tree
    (`verify_mask` CUSTOM) row i + 1 of the step holds token i, row 0 the newest, and `parents`
    [B, W - 1] int64 names the row of each token's parent, which comes before its own.
    """

    tokens: Tensor
    parents: Tensor | None = None


@dataclass(frozen=True)
class TargetOutput:
    """What the target computed for the rows of a step."""

    hidden: Tensor  # [T, H], after the final norm
    features: Tensor | None  # [T, n * H]: outputs of `target_layers`, concatenated
    # [B] int64: the last row of each request that is committed. In a decode step only where
    # `prefix_lookahead` is 1; it is row `new` - 1 of the request's own W (the first if `new` is 0).
    last_rows: Tensor | None = None
    # [T] int64, where `prefix_lookahead` is 1: the token behind each row that is committed
    next_ids: Tensor | None = None


@dataclass(frozen=True)
class Commit:
    """What the verify pass decided. In a prefill step there is no decision: `None` is passed.

    Rows are in order of position, those of a tree's accepted path first.
    """

    tokens: Tensor  # [B, W] int64: drawn at every row; the first `new` are committed
    new: Tensor  # [B] int32: accepted drafts + 1; of rows heard of late, also 0: padding


@dataclass(frozen=True)
class SlotState:
    """Rows an algorithm keeps per request; the engine clears them on admission."""

    rows: Mapping[str, Tensor] = field(default_factory=dict)  # each [slots, ...]


class SpeculativeAlgorithm(ABC):
    """Subclass this, register it, and the engine runs it."""

    options: ClassVar[tuple[Option, ...]] = ()
    bundled_draft: ClassVar[str | None] = None  # folder beside the bundled target, if one ships

    @classmethod
    @abstractmethod
    def resolve(cls, config: EngineConfig, target: ModelConfig, dtype: torch.dtype) -> SpecCaps:
        """Pure. Raises ConfigError that says the fix where the settings cannot work."""

    @abstractmethod
    def load(self, ctx: DraftContext) -> None:
        """Weights and buffers, once."""

    def create_future_map(self, slots: int, device: torch.device) -> SlotState:
        """The rows kept per request."""
        return SlotState()

    def supports_target_verify_for_draft(self) -> bool:
        """Whether the draft's forward has the verify pass's shape: the same W rows a request.

        Rows that were prepared for the verify pass serve every forward that asks for the same shape
        through `step.attention(width, offset)`; others are captured with rows of their own. So this
        changes nothing here: it is for those who must know beforehand.
        """
        return False

    @abstractmethod
    def propose(self, step: Step) -> Draft:
        """W - 1 tokens for every request; no host reads. Not called for W = 1."""

    def observe(self, step: Step, target: TargetOutput, commit: Commit | None) -> None:
        """Learn from the target's pass over the rows of `step`; `None`: these were prompt rows."""
        return None
