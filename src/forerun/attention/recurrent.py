"""How a recurrent layer (linear attention, SSM, convolution) reads and writes its state."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forerun.kernels.linear_attention.chunks import PromptChunks
from forerun.kernels.speculation.ragged import RaggedRows
from forerun.kvcache.pools import LayerState


@dataclass(frozen=True)
class RecurrentContext:
    """The state of one layer for the tokens of one forward.

    Decode and verify (`q_len` set): apply the first `num_pending` of the slot's `updates` to its
    `state` and store the result with `store_state`: it is the state before the first token. Then
    store what each token of this pass adds with `store_updates`. How many of these count is decided
    after the pass (`ModelPools.commit`), on the device.

    Prefill (`prompts` set): nothing is pending. Read `state`, store the one after each request's
    chunk with `store_state`.

    Tree (`parents` set, with `q_len`): the state before a token is the one after its parent; that
    of the root is the first token's. A layer that does so declares `RecurrentState.trees`; the
    updates of the accepted path are moved to where a chain would have left them.

    Ragged pass (`rows` set, with `q_len`): the forward's tokens are packed, request by request, and
    a request has at most `q_len`. A layer that serves it declares `RecurrentState.ragged`: by
    itself, or between `by_request` and `by_token`.
    """

    slots: Tensor  # [B] int64
    q_len: int | None  # tokens of every request, or
    prompts: PromptChunks | None  # those of chunks of prompts
    layer: LayerState
    parents: Tensor | None = None  # [B, q_len] int64 of a tree: indices of earlier tokens, or -1
    rows: RaggedRows | None = None

    def by_request(self, x: Tensor) -> Tensor:
        """[T, ...] -> [B * q_len, ...] of a pass with `q_len`; what is past a request's tokens is
        never committed. Of chunks of prompts: x itself.
        """
        return x if self.rows is None else self.rows.unpack(x)

    def by_token(self, x: Tensor) -> Tensor:
        """The way back: [B * q_len, ...] -> [T, ...]."""
        return x if self.rows is None else self.rows.pack(x)

    @property
    def num_pending(self) -> Tensor:
        """[B] int32: updates to apply; 0 for a new request."""
        return self.layer.num_pending.index_select(0, self.slots)

    def state(self, name: str) -> Tensor:
        """[B, ...]; zeros for a new request."""
        return self.layer.state[name].index_select(0, self.slots)

    def updates(self, name: str) -> Tensor:
        """[B, W, ...] of the last decode or verify pass, W of the widest; undefined past it."""
        return self.layer.updates[name].index_select(0, self.slots)

    def store_state(self, name: str, states: Tensor) -> None:
        """states [B, ...]."""
        kept = self.layer.state[name]
        kept.index_copy_(0, self.slots, states.to(kept.dtype))

    def store_updates(self, name: str, updates: Tensor) -> None:
        """updates [B, q_len, ...]: of each token of a decode or verify pass."""
        assert self.q_len is not None
        kept = self.layer.updates[name][:, : self.q_len]
        kept.index_copy_(0, self.slots, updates.to(kept.dtype))
