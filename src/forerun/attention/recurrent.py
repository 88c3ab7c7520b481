"""How a recurrent layer (linear attention, SSM, convolution) reads and writes its state."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forerun.kvcache.pools import LayerState


@dataclass(frozen=True)
class RecurrentContext:
    """The state of one layer for the tokens of one forward.

    Decode and verify (`q_len` set): read `initial`, store the state after every token with
    `store_each`. The slot's own state stays as it is; after the verify pass the step commits the
    intermediate state of the last committed token (`ModelPools.commit`).

    Prefill (`ragged` set): read `initial`, store the state after each request's chunk with
    `store_last`.
    """

    slots: Tensor  # [B] int64
    q_len: int | None  # tokens of every request, or
    ragged: tuple[tuple[int, int], ...] | None  # host: (start, tokens) per request
    layer: LayerState

    def initial(self, name: str) -> Tensor:
        """[B, ...]: the state before the first token; zeros for a new request."""
        return self.layer.state[name].index_select(0, self.slots)

    def store_each(self, name: str, states: Tensor) -> None:
        """states [B, q_len, ...]: after each token of a decode or verify pass."""
        assert self.q_len is not None
        kept = self.layer.intermediate[name][:, : self.q_len]
        kept.index_copy_(0, self.slots, states.to(kept.dtype))

    def store_last(self, name: str, states: Tensor) -> None:
        """states [B, ...]: after the last token of each request's prefill chunk."""
        assert self.ragged is not None
        kept = self.layer.state[name]
        kept.index_copy_(0, self.slots, states.to(kept.dtype))
