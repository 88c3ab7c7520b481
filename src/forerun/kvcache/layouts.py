"""What the layers of a model keep between steps, as values.

A layer may read the K/V of an earlier one and keep nothing (`SharedKV`). Otherwise there are three
kinds: K and V per token (`DenseKV`), one latent vector per token (`LatentKV`, MLA), or a
state of fixed size per request (`RecurrentState`: linear attention, SSM, convolutions). The first
two live in pages and are rolled back by a length alone. A recurrent state is valid at one length
only. So a verify pass leaves it as it is and stores what each token adds to it, its *update*; the
next pass applies the updates of the tokens that were committed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from forerun.kernels.linear_attention.replay import SnapshotRows

SSM = "ssm"  # name of linear attention's state, the tensor whose dtype can be chosen

TensorShapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # by name


@dataclass(frozen=True)
class DenseKV:
    """K and V, [num_kv_heads, head_dim] each, per token."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class LatentKV:
    """MLA: one vector [latent_dim | rope_dim] per token, shared by all heads.

    K is the whole vector, V its first `latent_dim` values (DeepSeek-V2, section 2.1).
    """

    latent_dim: int
    rope_dim: int
    dtype: torch.dtype

    @property
    def dim(self) -> int:
        return self.latent_dim + self.rope_dim

    @property
    def token_bytes(self) -> int:
        return self.dim * self.dtype.itemsize


@dataclass(frozen=True)
class StatePool:
    """One kind of recurrent state: L layers of equal tensors, stacked in dimension 0.

    Shapes, by tensor name: `state` [L, S, ...], before the last verify pass; `updates`
    [L, S, W, ...] of its tokens; `snapshots` [L, N, ...].
    """

    layers: tuple[int, ...]
    kind: RecurrentState
    state: Mapping[str, Tensor]
    updates: Mapping[str, Tensor]
    snapshots: Mapping[str, Tensor]


class Replay(Protocol):
    """Writes states after some of the last pass's tokens to snapshot rows; reads, changes nothing
    else. Runs between steps, without waiting for the device."""

    def __call__(self, pool: StatePool, to: SnapshotRows) -> None: ...


@dataclass(frozen=True)
class SharedKV:
    """Nothing: the layer reads K and V of layer `source` (Gemma 4's `num_kv_shared_layers`)."""

    source: int


@dataclass(frozen=True)
class RecurrentState:
    """Tensors of fixed shape per request.

    `updates` has those that a verify pass stores per token. They may be the state after the token,
    or whatever it is computed from; a layer that knows its recurrence stores far less than states.
    `replay` computes states from updates. `trees`: the layer follows `RecurrentContext.parents`;
    `ragged`: it reads `RecurrentContext.rows`.
    """

    tensors: TensorShapes
    updates: TensorShapes
    replay: Replay
    trees: bool = False
    ragged: bool = False

    def with_ssm_dtype(self, dtype: torch.dtype) -> RecurrentState:
        """The same with the tensor named `SSM`, if there is one, stored as `dtype`."""
        return replace(
            self,
            tensors={
                name: (shape, dtype if name == SSM else own)
                for name, (shape, own) in self.tensors.items()
            },
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of one state."""
        return _bytes(self.tensors)

    @property
    def update_bytes(self) -> int:
        """Bytes of one token's update."""
        return _bytes(self.updates)


def _bytes(tensors: TensorShapes) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in tensors.values())


PagedLayout = DenseKV | LatentKV
LayerLayout = DenseKV | LatentKV | RecurrentState | SharedKV


@dataclass(frozen=True)
class ModelLayout:
    """What a model keeps, layer by layer."""

    layers: tuple[LayerLayout, ...]

    @classmethod
    def dense(
        cls, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> ModelLayout:
        """K and V of one shape in every layer."""
        return cls((DenseKV(num_kv_heads, head_dim, dtype),) * num_layers)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def paged(self) -> tuple[PagedLayout, ...]:
        """The layers that keep something per token."""
        return tuple(layer for layer in self.layers if isinstance(layer, DenseKV | LatentKV))

    def paged_layer(self, index: int) -> PagedLayout:
        """What a layer reads per token: its own, or that of the layer whose K/V it shares."""
        layer = self.layers[index]
        if isinstance(layer, SharedKV):
            layer = self.layers[layer.source]
        assert isinstance(layer, DenseKV | LatentKV)
        return layer

    @property
    def recurrent(self) -> tuple[RecurrentState, ...]:
        return tuple(layer for layer in self.layers if isinstance(layer, RecurrentState))

    @property
    def has_recurrent_state(self) -> bool:
        return bool(self.recurrent)

    @property
    def latent_dim(self) -> int:
        """The longest latent row, rope part included; 0 without latent layers."""
        return max((layer.dim for layer in self.layers if isinstance(layer, LatentKV)), default=0)

    @property
    def token_bytes(self) -> int:
        """Bytes per KV slot, over all layers."""
        return sum(layer.token_bytes for layer in self.paged)

    @property
    def state_bytes(self) -> int:
        """Bytes of one recurrent state (or of one snapshot of it), over all layers."""
        return sum(layer.state_bytes for layer in self.recurrent)

    def slot_bytes(self, num_verify_tokens: int) -> int:
        """Bytes per request slot: the recurrent state and the updates of W tokens."""
        updates = sum(layer.update_bytes for layer in self.recurrent)
        return self.state_bytes + num_verify_tokens * updates

    def with_kv_dtype(self, dtype: torch.dtype) -> ModelLayout:
        """The same with K/V stored as `dtype`; recurrent states keep theirs."""
        return ModelLayout(
            tuple(
                replace(layer, dtype=dtype) if isinstance(layer, DenseKV | LatentKV) else layer
                for layer in self.layers
            )
        )

    @property
    def has_ssm_state(self) -> bool:
        return any(SSM in layer.tensors for layer in self.recurrent)

    def with_ssm_dtype(self, dtype: torch.dtype) -> ModelLayout:
        """The same with linear attention's states stored as `dtype`."""
        return ModelLayout(
            tuple(
                layer.with_ssm_dtype(dtype) if isinstance(layer, RecurrentState) else layer
                for layer in self.layers
            )
        )
