"""The extension point: what a drafting algorithm is.

    propose  →  verify  →  commit  →  observe

The engine runs this loop for every algorithm; plain decoding is the one that proposes nothing.
An algorithm states its needs as values (`SpecCaps`), keeps its per-request state in slot rows,
and never reads a device value on the host inside a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from forerun.attention.base import AttentionContext, LayerMask, Mask
from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import ModelConfig
from forerun.kvcache.pools import KVLayout
from forerun.layers.linear import Product


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

    draft_tokens: int = 0  # K; a step verifies K + 1 rows a request
    kv_reserve: int = 1  # rows past the committed length a step may write
    target_layers: tuple[int, ...] = ()  # outputs of these decoder layers are captured
    draft_kv: KVLayout | None = None
    draft_heads: int = 0  # query heads of the draft's attention, where it has any
    draft_attention: tuple[LayerMask, ...] = ()  # one a draft layer
    verify_mask: Mask = Mask.CAUSAL
    prefix_lookahead: int = 0  # 1 where draft K/V at i depends on token i + 1
    target_verify_for_draft: bool = False  # the draft's forward has the fixed verify shape

    @property
    def width(self) -> int:
        """W: rows verified a request and step."""
        return self.draft_tokens + 1


@dataclass(frozen=True)
class TargetHandle:
    """The parts of the target that drafts share."""

    config: ModelConfig
    embed: Callable[[Tensor], Tensor]  # ids [T] -> [T, H]
    lm_head: Callable[[Tensor], Tensor]  # [T, H] -> logits [T, V]


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


@dataclass(frozen=True)
class Step:
    """The rows of one forward, as an algorithm sees them. All tensors on the device.

    In a decode step there are W rows for each of B requests, T = B * W; in a prefill step the
    rows are ragged (`width` is None).
    """

    slots: Tensor  # [B] int64
    start: Tensor  # [B] int32: position of the first row; in a decode step the committed length
    positions: Tensor  # [T] int32
    input_ids: Tensor  # [T] int64; in `propose` only the first of each W is known
    width: int | None
    history: Tensor  # [slots, positions] int32: the token table; row s, known up to start[s]
    # Over the draft's pool: the first `width` rows of every request (None: the ragged rows).
    attention: Callable[[int | None], AttentionContext] | None


@dataclass(frozen=True)
class Draft:
    """Proposed tokens [B, K] int64."""

    tokens: Tensor


@dataclass(frozen=True)
class TargetOutput:
    """What the target computed for the rows of a step."""

    hidden: Tensor  # [T, H], after the final norm
    features: Tensor | None  # [T, n * H]: outputs of `target_layers`, concatenated


@dataclass(frozen=True)
class Commit:
    """What the verify pass decided. In a prefill step there is no decision: `None` is passed."""

    tokens: Tensor  # [B, W] int64: drawn at every row; the first `new` are committed
    new: Tensor  # [B] int32: accepted drafts + 1


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
        """Pure. Raises ConfigError that says the mend where the settings cannot work."""

    @abstractmethod
    def load(self, ctx: DraftContext) -> None:
        """Weights and buffers, once."""

    def create_future_map(self, slots: int, device: torch.device) -> SlotState:
        """The rows kept per request."""
        return SlotState()

    def supports_target_verify_for_draft(self) -> bool:
        """Whether the draft's forward has the fixed-width verify shape."""
        return False

    def products(self, batch: int) -> list[Product]:
        """What `propose` and `observe` multiply in a decode step, for benchmarks to count."""
        return []

    @abstractmethod
    def propose(self, step: Step) -> Draft:
        """K tokens for every request; no host reads."""

    def observe(self, step: Step, target: TargetOutput, commit: Commit | None) -> None:
        """Learn from the target's pass over the rows of `step`; `None`: these were prompt rows."""
        return None
