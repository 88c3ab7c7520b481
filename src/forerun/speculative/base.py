"""The interface of a drafting algorithm.

    propose  →  verify  →  commit  →  observe

The engine runs this loop for every algorithm; plain decoding is the one that proposes nothing.
An algorithm declares its needs as values (`SpecCaps`) and keeps per-request state in tensors
indexed by slot. docs/add-an-algorithm.md is the guide.

Shapes: B requests; W = K + 1 tokens verified for each; T tokens in all; hidden size H; vocabulary
V. A slot is a running request's index into all per-request tensors; the last one, the padding slot,
fills up padded batches.
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
from forerun.kernels.speculation.ragged import RaggedRows
from forerun.kvcache.layouts import ModelLayout
from forerun.layers.communication import SINGLE_RANK, Communicator, WeightPlacement
from forerun.layers.gemm import DRAFT, INT8
from forerun.platform.device import upload

UNQUANT = "unquant"  # `speculative_draft_model_quantization`: none


@dataclass(frozen=True)
class Option:
    """A setting that an algorithm declares: a keyword of `LLM` and a command-line flag."""

    name: str
    type: type
    default: Any
    help: str


@dataclass(frozen=True)
class SpecCaps:
    """The needs of an algorithm; the engine branches on these values, never on a name."""

    num_drafts: int = 0  # K: most draft tokens per request and step
    # `propose` takes any W from 2 to K + 1; otherwise K + 1 only. A tree of W tokens is then the
    # beginning of every larger one.
    flexible: bool = False
    kv_reserve: int = 1  # KV slots past the committed length that a step may write, >= K + 1
    target_layers: tuple[int, ...] = ()  # layers whose outputs are captured (aux hidden states)
    draft_kv: ModelLayout | None = None  # K/V of the draft model, in a pool of its own
    # The draft has no K/V and attends to the target's, from `ProposeInput.attention`.
    reads_target_kv: bool = False
    draft_heads: int = 0  # query heads of the draft model's attention
    draft_hidden_size: int = 0  # of the draft model: ranks divide large ones by default
    draft_attention: tuple[LayerMask, ...] = ()  # one per draft layer
    draft_sinks: bool = False  # some draft layer has attention sinks
    draft_trees: bool = False  # `propose` attends with trees in causal draft layers
    # False: `observe` of prompts writes the draft's K/V and never attends to it.
    draft_attends_in_prefill: bool = True
    verify_mask: Mask = Mask.CAUSAL  # CUSTOM: `propose` returns trees
    tree_depth: int | None = None  # drafts on the longest path of a tree, if known
    prefix_lookahead: int = 0  # n: draft K/V at position i depends on tokens up to i + n
    needs_host_tokens: bool = False  # `propose` reads `ProposeInput.host`: no overlap, no capture
    # False: `observe` does not read `ObserveInput.hidden_states`.
    reads_hidden_states: bool = True
    # `observe` may be called for several plain steps of a request at once (`Phase.DEFERRED`).
    deferred_observe: bool = False
    # `observe` takes a ragged verify pass as it is: requests differ in their tokens, and only the
    # device knows how many each has (`ObserveInput.rows`). Else it gets W tokens of every request.
    observes_packed: bool = False
    draft_summary: str | None = None  # body, head and row layout of the draft, for `explain`
    # The setting that serves the draft in the other row layout: `propose_row_layouts`.
    other_row_layout: str | None = None

    @property
    def num_verify_tokens(self) -> int:
        """W = K + 1: most tokens verified per request and step."""
        return self.num_drafts + 1

    @property
    def makes_trees(self) -> bool:
        return self.verify_mask is Mask.CUSTOM

    @property
    def max_tree_depth(self) -> int | None:
        """Drafts on the longest path of a tree, at most; None: a chain."""
        return (self.tree_depth or self.num_drafts) if self.makes_trees else None


@dataclass(frozen=True)
class TargetHandle:
    """The parts of the target that a draft model may share."""

    config: ModelConfig
    embed: Callable[[Tensor], Tensor]  # ids [T] -> [T, H]
    embedding_rows: Callable[[], Tensor | None]  # [V, H], if `embed` is a look-up only
    compute_logits: Callable[[Tensor], Tensor]  # [T, H] -> logits [T, V]
    compute_argmax: Callable[[Tensor], Tensor]  # [T, H] -> [T] int64, the most likely tokens
    lm_head: Callable[[Tensor], Tensor]  # [T, H] -> [T, V], before what a family does to logits


@dataclass(frozen=True)
class DraftContext:
    """Input of `load`. Attention over the draft's pool is part of each step's input."""

    config: EngineConfig
    caps: SpecCaps
    target: TargetHandle
    device: torch.device
    dtype: torch.dtype
    max_positions: int  # positions that a request can reach, `kv_reserve` included
    max_running_requests: int
    comm: Communicator = SINGLE_RANK  # ranks that share the draft's weights
    keeps_float32: bool = False  # dtype is float32 because that is asked for, or the target's own

    @property
    def asked_quantization(self) -> str | None:
        """The setting `speculative_draft_model_quantization`; None: linears stay as they are."""
        asked = self.config.speculative_draft_model_quantization
        return None if asked == UNQUANT else asked

    @property
    def quantization(self) -> str | None:
        """How the draft's linears are kept: as is asked for, or else in int8 on a CPU.

        The target alone decides what is accepted, and 8 bits are read faster. Where float32 is
        asked for, the draft has it as well.
        """
        if self.config.speculative_draft_model_quantization is not None or self.keeps_float32:
            return self.asked_quantization
        return INT8 if self.device.type == "cpu" else None

    @property
    def placement(self) -> WeightPlacement:
        """What a draft model is built with."""
        quantization = DRAFT if self.quantization == INT8 else None
        return WeightPlacement(self.dtype, self.device, self.comm, quantization)


@dataclass(frozen=True)
class SlotContext:
    """Input of `create_future_map`."""

    slots: int  # size of the first dimension: `max_running_requests` and the padding slot
    chunked_prefill_size: int  # most prompt tokens of one `observe`
    context_length: int  # most tokens of a prompt and its output
    device: torch.device

    @property
    def padding_slot(self) -> int:
        """The last slot. No request ever has it, and what is written there is never read."""
        return self.slots - 1


class DraftAttention(Protocol):
    """Attention over the draft's pool in a decode step."""

    def __call__(self, q_len: int, offset: int = 0, tree: Tensor | None = None) -> AttentionContext:
        """Attention of tokens [offset, offset + q_len) of every request, from its `start` on.

        An offset below 0 begins before that, but not before position 0. `tree` [B, q_len, words]
        int64, with `SpecCaps.draft_trees` and q_len > 1: which of these tokens each one sees, as
        in `AttentionBatch.tree`.
        """


class ObserveAttention(Protocol):
    """Attention over the draft's pool of observed tokens."""

    def __call__(self, token: int | None, before: int = 0) -> AttentionContext:
        """Attention of all tokens or, given `token`, of this one of each request.

        `before`: positions that they begin earlier.
        """


class Sample(Protocol):
    """Samples drafts with each request's sampling parameters and the target's own noise.

    Noise is keyed by (seed, position), so a draft equals the target's token as often as the two
    distributions allow. For greedy requests it is the argmax. Biases and penalties are not applied.
    """

    def __call__(
        self, logits: Tensor, positions: Tensor, token_ids: Tensor | None = None
    ) -> Tensor:
        """
        Args:
            logits: [B, n, V].
            positions: [B, n] integers: positions of the tokens to sample.
            token_ids: [V] int64, the token id of each column; default: 0 … V - 1.

        Returns:
            [B, n] int64, indices of columns.
        """


@dataclass(frozen=True)
class ProposeInput:
    """The decode step that drafts are proposed for. Tensors are on the device and read-only.

    A padded batch ends with requests in the padding slot.
    """

    slots: Tensor  # [B] int64
    start: Tensor  # [B] int32: committed length, the position of `last_token`
    positions: Tensor  # [B * W] int32: start … start + W - 1 of each request
    num_verify_tokens: int  # W >= 2; may differ from step to step (`SpecCaps.flexible`)
    last_token: Tensor  # [B] int64: the newest sampled token; its K/V is not written yet
    history: Tensor  # [slots, positions] int32: tokens by slot and position, known up to `start`
    tenants: Tensor  # [slots] int32: whose request a slot has, by `SchedulingParams.tenant`
    sample: Sample
    attention: DraftAttention | None  # with `SpecCaps.draft_kv` or `reads_target_kv`
    host: HostTokens | None  # with `SpecCaps.needs_host_tokens`
    dummy: bool = False  # see `ObserveInput.dummy`
    greedy: bool = False  # every request takes the most likely token: `sample` is the argmax


@dataclass(frozen=True)
class HostTokens:
    """The tokens of a step's requests on the host, in the order of `slots`."""

    tokens: Sequence[Sequence[int]]  # prompt and output, `last_token` included
    request_ids: Sequence[str]


@dataclass(frozen=True)
class Draft:
    """The proposed tokens, in a chain or (`verify_mask` CUSTOM) in a tree.

    `tokens` [B, W - 1] int64. In a chain, token i is proposed for position `start` + 1 + i. In a
    tree, node 0 is `last_token` and node i + 1 is token i; `parents` [B, W - 1] int64 holds the
    node of each token's parent, which comes before its own. None: a chain. `confidence` [B, W - 1]
    float32 of a chain: the estimated probability that each token is accepted, given that those
    before it are; None: no estimate.
    """

    tokens: Tensor
    parents: Tensor | None = None
    confidence: Tensor | None = None


class Phase(Enum):
    """Which forward of the target is observed."""

    PREFILL = "prefill"  # prompt chunks: numbers of tokens differ between requests
    VERIFY = "verify"  # a decode step of W >= 1 tokens per request
    DEFERRED = "deferred"  # several plain steps of each request, observed together


@dataclass(frozen=True)
class ObserveInput:
    """T tokens of B requests that the target has run on, request by request.

    Tensors are on the device and read-only. Per-token tensors are in order of position; in a tree
    step the accepted path comes first, as if it had been a chain. The first `num_committed` tokens
    of each request are committed: `input_ids` are the tokens at `positions`, `next_ids` those one
    position further. The tokens after them are rejected drafts or padding, with arbitrary values;
    their K/V may be written to the draft's pool, where the next step overwrites it.
    """

    phase: Phase
    slots: Tensor  # [B] int64; a padded batch ends with requests in the padding slot
    start: Tensor  # [B] int32: position of the request's first token
    positions: Tensor  # [T] int32
    q_lens: tuple[int, ...]  # tokens of each request, T in all; with `rows` at most so many
    input_ids: Tensor  # [T] int64
    # [T, H], after the final norm. Without `SpecCaps.reads_hidden_states` those of prompts are not
    # all computed and those of plain steps are not kept: do not read them.
    hidden_states: Tensor
    aux_hidden_states: Tensor | None  # [T, n * H]: outputs of the n `target_layers`
    next_ids: Tensor  # [T] int64: the token after each, from the prompt or sampled
    # [B] int32. PREFILL: all q_lens, or fewer where a captured prefill is padded; VERIFY: 1 … W;
    # DEFERRED: the plain steps of each request, 0 for padding.
    num_committed: Tensor
    history: Tensor  # [slots, positions] int32: see `ProposeInput`
    tenants: Tensor  # [slots] int32: see `ProposeInput`
    make_attention: ObserveAttention | None  # with `SpecCaps.draft_kv`
    # A profiling run or a measurement: every request is in the padding slot. Always False for
    # algorithms that are captured with the step: a replay keeps the value read at capture.
    dummy: bool = False
    # With `SpecCaps.observes_packed`: how the T tokens of a ragged verify pass are divided.
    rows: RaggedRows | None = None

    @property
    def first_index(self) -> Tensor:
        """[B] int64: index into T of each request's first token."""
        if self.rows is not None:
            return self.rows.first[:-1].long()
        count, width = len(self.q_lens), self.q_lens[0]
        device = self.slots.device
        if all(q_len == width for q_len in self.q_lens):
            return torch.arange(0, count * width, width, device=device)
        starts = [0, *accumulate(self.q_lens[:-1])]
        return upload(torch.tensor(starts, dtype=torch.int64), device)

    @property
    def last_index(self) -> Tensor:
        """[B] int64: index into T of each request's last committed token (its first, if none)."""
        return self.first_index + (self.num_committed - 1).clamp_min(0)

    @property
    def owner(self) -> Tensor:
        """[T] int64: index into B of each token's request."""
        if self.rows is not None:
            return self.rows.owner
        count, width = len(self.q_lens), self.q_lens[0]
        device = self.slots.device
        if all(q_len == width for q_len in self.q_lens):
            return torch.arange(count * width, device=device) // width
        lens = torch.tensor(self.q_lens)
        return upload(torch.repeat_interleave(torch.arange(count), lens), device)

    @property
    def attention(self) -> AttentionContext:
        """Attention of these tokens over the draft's pool; planned once per step."""
        assert self.make_attention is not None, "SpecCaps.draft_kv declares no pool"
        return self.make_attention(None)

    def token_attention(self, i: int) -> AttentionContext:
        """Attention of token i of every request, all of which must have equally many tokens."""
        assert self.make_attention is not None, "SpecCaps.draft_kv declares no pool"
        return self.make_attention(i)

    def attention_before(self, count: int) -> AttentionContext:
        """Attention of as many tokens of each request that begin `count` positions before.

        They begin no further back than the first token that the request did not find in the prefix
        cache; `AttentionContext.batch.start` says where.
        """
        assert self.make_attention is not None, "SpecCaps.draft_kv declares no pool"
        return self.make_attention(None, count)


@dataclass(frozen=True)
class SlotState:
    """Tensors [slots, ...] that an algorithm keeps per request.

    The engine zeroes a slot's row when a request is admitted to it.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)


class SpeculativeAlgorithm(ABC):
    """Subclass this, register it, and the engine runs it."""

    options: ClassVar[tuple[Option, ...]] = ()
    # Whether `load` divides the draft among `DraftContext.comm`, and `resolve` gives a rank's part
    # of its K/V and heads, with `speculative_draft_tp_size`.
    shards_draft: ClassVar[bool] = False
    # Whether `load` follows `speculative_draft_model_quantization`.
    quantizes_draft: ClassVar[bool] = False
    bundled_draft: ClassVar[str | None] = None  # folder next to the bundled target, if one ships

    @classmethod
    @abstractmethod
    def resolve(cls, config: EngineConfig, target: ModelConfig, dtype: torch.dtype) -> SpecCaps:
        """The algorithm's needs with these settings. Loads nothing.

        Raises:
            ConfigError: invalid settings; the message says how to fix them.
        """

    @abstractmethod
    def load(self, ctx: DraftContext) -> None:
        """Loads weights and allocates buffers. Called once."""

    def create_future_map(self, ctx: SlotContext) -> SlotState:
        """Allocates the per-request tensors; their first dimension is `ctx.slots`.

        In SGLang, a future map passes sampled tokens on from one overlapped batch to the next; here
        those stay in the engine's slot tables, and this is what the algorithm keeps beside them.
        """
        return SlotState()

    def supports_target_verify_for_draft(self) -> bool:
        """Whether `propose` and `observe` can be captured with the verify pass.

        True: shapes depend on (B, W) only, and neither method reads the device on the host or
        makes tensors from host values; the whole step is then one graph. False: both run eagerly,
        before and after the captured verify pass.

        In SGLang it says whether the draft model itself runs in the mode of a target verify pass.
        """
        return False

    @abstractmethod
    def propose(self, step: ProposeInput) -> Draft:
        """Proposes W - 1 tokens for every request. Not called if W = 1."""

    def propose_row_layouts(self, step: ProposeInput) -> Tensor:
        """Drafts of every request in the row layout that is served, and in the other one.

        With `SpecCaps.other_row_layout`, called before some steps, outside of the captured
        step: the engine warns if the target would accept more in the other layout.

        Returns:
            [2, B, D] int64, the first D drafts of each; any D > 0.
        """
        raise NotImplementedError

    def observe(self, step: ObserveInput) -> None:
        """Observes a forward of the target, for example to write the draft's K/V."""
        return None
