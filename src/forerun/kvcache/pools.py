"""The memory behind a `ModelLayout`: K/V pages, latent pages, recurrent states.

Paged memory of every model (target, draft) is indexed by the same page ids, so a shared prefix
shares the K/V of both. A model that attends to a window only has window pages instead, ids of a
second space (`window_pages`). Page 0 of either is the null page: padding slots write there.
Recurrent states are indexed by request slot; the last slot is the padding slot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.core.errors import InternalError
from forerun.kernels.linear_attention.replay import SnapshotRows
from forerun.kernels.runtime.fp8 import as_bits
from forerun.kernels.speculation.tree import compact_kv
from forerun.kvcache.layouts import (
    DenseKV,
    LatentKV,
    ModelLayout,
    PagedLayout,
    RecurrentState,
    SharedKV,
    StatePool,
    TensorShapes,
)


@dataclass(frozen=True)
class LayerState:
    """The recurrent state of one layer: views into its `StatePool`."""

    state: Mapping[str, Tensor]  # [S, ...]
    updates: Mapping[str, Tensor]  # [S, W, ...]
    num_pending: Tensor  # [S] int32: updates that belong to the state and are not applied yet
    num_passes: Tensor  # [S] int32: decode and verify passes so far, for layers with two buffers


@dataclass(frozen=True)
class TrackedLengths:
    """Lengths of n requests at which the prefix cache wants their recurrent states."""

    slots: Tensor  # [n] int64
    rows: Tensor  # [n] int64: of the snapshot pool
    lengths: Tensor  # [n] int32


@dataclass(frozen=True)
class PoolShape:
    """How much memory the pools of a model get."""

    num_pages: int  # the null page included
    page_size: int
    num_slots: int = 1  # request slots, the padding slot included
    num_verify_tokens: int = 1  # W, the most a step verifies
    num_snapshots: int = 0  # recurrent states that the prefix cache may keep
    windowed: bool = False  # its pages are window pages


class ModelPools:
    """Everything one model keeps between steps.

    Layers of equal layout share one tensor: dense K/V [2, L, pages, P, Hkv, D] (K first), latent
    [1, L, pages, P, 1, Dl + Dr]. Kernels that work on all layers at once rely on it.
    """

    def __init__(self, layout: ModelLayout, shape: PoolShape, device: torch.device) -> None:
        self.layout, self.shape = layout, shape
        self.paged: dict[PagedLayout, Tensor] = {}
        self._k: dict[int, Tensor] = {}
        self._v: dict[int, Tensor] = {}
        self._latent: dict[int, Tensor] = {}
        self._state: dict[int, LayerState] = {}
        for kind in dict.fromkeys(layout.paged):
            self._allocate_pages(kind, device)
        for i, layer in enumerate(layout.layers):
            if isinstance(layer, SharedKV):
                self._k[i], self._v[i] = self._k[layer.source], self._v[layer.source]
        # Of every slot: how many tokens of its last verify pass were committed.
        self.num_pending = torch.zeros(shape.num_slots, dtype=torch.int32, device=device)
        self.num_passes = torch.zeros_like(self.num_pending)
        self.states = tuple(self._allocate_states(layers, device) for layers in _alike(layout))

    @property
    def device(self) -> torch.device:
        return self.num_pending.device

    @property
    def page_size(self) -> int:
        return self.shape.page_size

    @property
    def windowed(self) -> bool:
        """Whether its page ids are those of the second page space."""
        return self.shape.windowed

    @property
    def num_snapshots(self) -> int:
        return self.shape.num_snapshots if self.states else 0

    def k(self, layer: int) -> Tensor:
        """[pages, P, Hkv, D] that a layer attends to: its own, or those that it shares."""
        return self._k[layer]

    def v(self, layer: int) -> Tensor:
        """The same of V."""
        return self._v[layer]

    def latent(self, layer: int) -> Tensor:
        """[pages, P, Dl + Dr] of a latent layer."""
        return self._latent[layer]

    def state(self, layer: int) -> LayerState:
        """Returns the state of a recurrent layer."""
        return self._state[layer]

    @property
    def dense(self) -> Tensor:
        """K/V of all layers, [2, L, pages, P, Hkv, D], where all are dense and alike."""
        if len(self.paged) != 1 or self.layout.has_recurrent_state or self._latent:
            raise InternalError("The layers of this model do not share one dense K/V tensor.")
        return next(iter(self.paged.values()))

    # --- inside a step: on the device, can be captured ------------------------------------------

    def commit(self, slots: Tensor, num_committed: Tensor, path: Tensor | None = None) -> None:
        """Commits recurrent states: how many of the last pass's updates belong to them.

        The next pass reads and writes the states anyway, so it applies them. Nothing for K/V.

        Args:
            slots: [B] int64; the padding slot may occur more than once.
            num_committed: [B] int32, tokens of the verify pass that are committed.
            path: [B, W] int64, of a tree: update i becomes that of token path[i]; None: a chain.
        """
        if self.states:
            if path is not None:
                self._move_updates(slots, path)
            self.num_pending.index_copy_(0, slots, num_committed)
            self.num_pending[-1:].zero_()  # the padding slot's state stays zero
            self.num_passes.index_add_(0, slots, torch.ones_like(num_committed))

    def _move_updates(self, slots: Tensor, path: Tensor) -> None:
        places = torch.arange(path.shape[1], device=path.device)
        at = slots.unsqueeze(1) * self.shape.num_verify_tokens + places
        for pool in self.states:
            for update in pool.updates.values():  # [L, S, W, ...], as K/V of S pages of W tokens
                compact_kv(update.flatten(3).unsqueeze(3).unsqueeze(0), at, path)

    def move_tokens(self, kv_slots: Tensor, path: Tensor) -> None:
        """Moves the K/V of a tree's accepted path to where a chain would have written it.

        Args:
            kv_slots: [B, W] int64, KV slots (page id · P + offset) of the verified tokens.
            path: [B, W] int64: token i takes the K/V of token path[i]; all are read before any
                is written.
        """
        for data in self.paged.values():
            compact_kv(data, kv_slots, path)

    # --- between steps ---------------------------------------------------------------------------

    def clear_pages(self, pages: Tensor) -> None:
        """Zeroes pages [n] int64 of every layer: masked tokens are multiplied by 0."""
        for data in self.paged.values():
            as_bits(data).index_fill_(2, pages, 0)

    def reset_slots(self, slots: Tensor) -> None:
        """Zeroes the recurrent states of slots [n] int64: new requests start from nothing."""
        self.num_pending.index_fill_(0, slots, 0)
        for pool in self.states:
            for state in pool.state.values():
                state.index_fill_(1, slots, 0)

    def save_snapshots(self, slots: Tensor, rows: Tensor) -> None:
        """Copies the states of slots [n] int64 to snapshot rows [n] int64.

        After a prefill chunk: no updates are pending.
        """
        for pool in self.states:
            for name, state in pool.state.items():
                pool.snapshots[name].index_copy_(1, rows, state.index_select(1, slots))

    def track_snapshots(self, targets: TrackedLengths, kv_len: Tensor) -> None:
        """Writes the states at lengths that the last pass went past to snapshot rows.

        Where it did not, because it accepted too little or an earlier pass went past, the row keeps
        what it has.

        Args:
            kv_len: [S] int32: committed lengths.
        """
        slots, lengths = targets.slots, targets.lengths
        pending = self.num_pending.index_select(0, slots)
        counts = lengths - kv_len.index_select(0, slots) + pending
        counts = counts.masked_fill((counts < 0) | (counts > pending), 0)
        to = SnapshotRows(slots, targets.rows, counts, self.num_passes)
        for pool in self.states:
            pool.kind.replay(pool, to)

    def load_snapshots(self, slots: Tensor, rows: Tensor) -> None:
        """Copies snapshot rows [n] int64 to the states of slots [n] int64."""
        for pool in self.states:
            for name, state in pool.state.items():
                state.index_copy_(1, slots, pool.snapshots[name].index_select(1, rows))

    # --- allocation ------------------------------------------------------------------------------

    def _allocate_pages(self, kind: PagedLayout, device: torch.device) -> None:
        """One tensor for all layers of this layout."""
        layers = [i for i, layer in enumerate(self.layout.layers) if layer == kind]
        per_token = (
            (kind.num_kv_heads, kind.head_dim) if isinstance(kind, DenseKV) else (1, kind.dim)
        )
        planes = 2 if isinstance(kind, DenseKV) else 1
        shape = (planes, len(layers), self.shape.num_pages, self.shape.page_size, *per_token)
        # Zeros, not empty: masked tokens are multiplied by 0, and 0 x NaN is NaN.
        data = self.paged[kind] = zeros(shape, kind.dtype, device)
        for i, layer in enumerate(layers):
            if isinstance(kind, LatentKV):
                self._latent[layer] = data[0, i].flatten(2)
            else:
                self._k[layer], self._v[layer] = data[0, i], data[1, i]

    def _allocate_states(self, layers: tuple[int, ...], device: torch.device) -> StatePool:
        kind = self.layout.layers[layers[0]]
        assert isinstance(kind, RecurrentState)
        sizes = self.shape

        def room(tensors: TensorShapes, *each: int) -> dict[str, Tensor]:
            return {
                name: zeros((len(layers), *each, *shape), dtype, device)
                for name, (shape, dtype) in tensors.items()
            }

        pool = StatePool(
            layers,
            kind,
            state=room(kind.tensors, sizes.num_slots),
            updates=room(kind.updates, sizes.num_slots, sizes.num_verify_tokens),
            snapshots=room(kind.tensors, sizes.num_snapshots),
        )
        for i, layer in enumerate(layers):
            self._state[layer] = LayerState(
                {name: state[i] for name, state in pool.state.items()},
                {name: update[i] for name, update in pool.updates.items()},
                self.num_pending,
                self.num_passes,
            )
        return pool


def _alike(layout: ModelLayout) -> list[tuple[int, ...]]:
    """Indices of recurrent layers, grouped by equal state."""
    groups: list[tuple[RecurrentState, list[int]]] = []
    for i, layer in enumerate(layout.layers):
        if isinstance(layer, RecurrentState):
            group = next((indices for kind, indices in groups if kind == layer), None)
            if group is None:
                groups.append((layer, [i]))
            else:
                group.append(i)
    return [tuple(indices) for _, indices in groups]


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocates zeros. On a CPU the system commits memory when a page of it is first written.

    `torch.zeros` writes all of it at once; a pool is sized for every slot at the full context.
    """
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    data = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)  # calloc
    return torch.from_numpy(data).view(dtype).view(*shape)
