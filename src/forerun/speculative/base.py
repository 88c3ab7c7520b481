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
from enum import Enum
from itertools import accumulate
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from forerun.attention.base import AttentionContext, LayerMask, Mask
from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import ModelConfig
from forerun.kvcache.layouts import ModelLayout
from forerun.platform.device import upload


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

    num_drafts: int = 0  # K: draft tokens a step, at most
    flexible: bool = False  # `propose` takes any W from 2 up; otherwise K + 1 only
    kv_reserve: int = 1  # KV slots past the committed length that a step may write
    target_layers: tuple[int, ...] = ()  # decoder layers whose output is captured (aux states)
    draft_kv: ModelLayout | None = None
    draft_heads: int = 0  # query heads of the draft's attention, where it has any
    draft_attention: tuple[LayerMask, ...] = ()  # one a draft layer
    verify_mask: Mask = Mask.CAUSAL  # CUSTOM: `propose` gives trees
    tree_depth: int | None = None  # drafts on the longest path of a tree, if that is known
    prefix_lookahead: int = 0  # 1 where draft K/V at position i depends on token i + 1
    needs_host_tokens: bool = False  # `propose` reads `host_tokens`: no overlap, not captured
    # `observe` may be called for several plain steps of a request at once (`Phase.DEFERRED`).
    deferred_observe: bool = False

    @property
    def num_verify_tokens(self) -> int:
        """W = K + 1: tokens verified for a request in a step, at most."""
        return self.num_drafts + 1

    @property
    def makes_trees(self) -> bool:
        return self.verify_mask is Mask.CUSTOM


@dataclass(frozen=True)
class TargetHandle:
    """The parts of the target that drafts share."""

    config: ModelConfig
    embed: Callable[[Tensor], Tensor]  # ids [T] -> [T, H]
    compute_logits: Callable[[Tensor], Tensor]  # [T, H] -> logits [T, V]
    compute_argmax: Callable[[Tensor], Tensor]  # [T, H] -> [T] int64, the most likely ids


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
class SlotContext:
    """What `create_future_map` gets."""

    slots: int  # rows to allocate: one a slot, and one for the padding slot, which is the last
    chunked_prefill_size: int  # prompt tokens that one `observe` may hold
    context_length: int  # tokens of prompt and output
    device: torch.device


class DraftAttention(Protocol):
    """Attention over the draft's pool in a decode step."""

    def __call__(self, q_len: int, offset: int = 0) -> AttentionContext:
        """For tokens [offset, offset + q_len) of every request, counted from its `start`."""


class Sample(Protocol):
    """Samples tokens with the requests' own parameters and the noise the target samples with."""

    def __call__(self, logits: Tensor, positions: Tensor, tokens: Tensor | None = None) -> Tensor:
        """A draft sampled like this agrees with the target as often as its distribution allows.

        Args:
            logits: [B, n, V].
            positions: [B, n] integers: positions of the tokens to sample.
            tokens: [V] int64, ids of the columns where these are not 0 … V - 1.

        Returns:
            [B, n] int64 columns.
        """


@dataclass(frozen=True)
class ProposeInput:
    """The decode step that drafts are proposed for. Tensors are on the device.

    Requests that fill up a batch bucket hold the padding slot, the last row of every slot table.
    """

    slots: Tensor  # [B] int64
    start: Tensor  # [B] int32: committed length, the position of `last_token`
    positions: Tensor  # [B * W] int32: start … start + W - 1 of each request
    num_verify_tokens: int  # W >= 2; may differ from step to step (`SpecCaps.flexible`)
    last_token: Tensor  # [B] int64: the newest sampled token; its K/V is not written yet
    history: Tensor  # [slots, positions] int32: tokens by position; row s is known up to start[s]
    sample: Sample
    attention: DraftAttention | None  # where the algorithm has a pool
    host: HostTokens | None  # where it declares `needs_host_tokens`
    dummy: bool = False  # a profiling run, a capture or a measurement: no request behind it


@dataclass(frozen=True)
class HostTokens:
    """What the host knows of each request of a step."""

    tokens: Sequence[Sequence[int]]  # prompt and output, `last_token` included
    request_ids: Sequence[str]


@dataclass(frozen=True)
class Draft:
    """What may come next.

    `tokens` [B, W - 1] int64: in a chain, token i stands i + 1 after `last_token`. In a tree
    (`verify_mask` CUSTOM) node 0 is `last_token`, node i + 1 is token i, and `parents` [B, W - 1]
    int64 holds the node of each token's parent, which comes before its own.
    """

    tokens: Tensor
    parents: Tensor | None = None


class Phase(Enum):
    """Which forward of the target is observed."""

    PREFILL = "prefill"  # prompt chunks: requests have different numbers of tokens
    VERIFY = "verify"  # a decode step of W tokens for each request
    DEFERRED = "deferred"  # several plain steps of each request, observed together


@dataclass(frozen=True)
class ObserveInput:
    """T tokens of B requests that the target has run on, one request after the other.

    All per-token tensors are in order of position; those of a tree's accepted path come first.
    The first `num_committed` tokens of a request are committed. What follows them is rejected: it
    may be written to the draft's pool, since the next step overwrites it, but means nothing.
    """

    phase: Phase
    slots: Tensor  # [B] int64
    start: Tensor  # [B] int32: position of the request's first token
    positions: Tensor  # [T] int32
    q_lens: tuple[int, ...]  # tokens of each request; all W in VERIFY and DEFERRED
    input_ids: Tensor  # [T] int64
    hidden_states: Tensor  # [T, H], after the final norm
    aux_hidden_states: Tensor | None  # [T, n * H]: outputs of `target_layers`, where there are any
    next_ids: Tensor  # [T] int64: the token after each; sampled in VERIFY
    num_committed: Tensor  # [B] int32: 0 for padding in DEFERRED, all tokens in PREFILL
    history: Tensor  # [slots, positions] int32
    make_attention: Callable[[int | None], AttentionContext] | None  # where there is a draft pool
    dummy: bool = False  # a profiling run, a capture or a measurement: no request behind it

    @property
    def last_index(self) -> Tensor:
        """[B] int64: index into T of each request's last committed token (its first, if none)."""
        count, width = len(self.q_lens), self.q_lens[0]
        device = self.slots.device
        if all(q_len == width for q_len in self.q_lens):
            first = torch.arange(0, count * width, width, device=device)
        else:
            starts = [0, *accumulate(self.q_lens[:-1])]
            first = upload(torch.tensor(starts, dtype=torch.int64), device)
        return first + (self.num_committed - 1).clamp_min(0)

    @property
    def attention(self) -> AttentionContext:
        """Attention of these tokens over the draft's pool, planned once a step."""
        assert self.make_attention is not None, "SpecCaps.draft_kv declares no pool"
        return self.make_attention(None)

    def token_attention(self, i: int) -> AttentionContext:
        """Attention of token i of every request alone; in VERIFY, where all have W tokens."""
        assert self.make_attention is not None, "SpecCaps.draft_kv declares no pool"
        return self.make_attention(i)


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

    def create_future_map(self, ctx: SlotContext) -> SlotState:
        """The rows kept per request, `ctx.slots` of each."""
        return SlotState()

    def supports_target_verify_for_draft(self) -> bool:
        """Whether drafts have fixed shapes, like the verify pass, and never read the device.

        True: `propose` and `observe` are captured with the step into one graph. False: they run
        eagerly between the captured parts, with whatever shapes they like; this is slower.
        """
        return False

    @abstractmethod
    def propose(self, step: ProposeInput) -> Draft:
        """W - 1 tokens for every request. Not called for W = 1."""

    def observe(self, step: ObserveInput) -> None:
        """Learns from a forward of the target."""
        return None
