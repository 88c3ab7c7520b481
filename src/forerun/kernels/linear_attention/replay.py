# mypy: allow-untyped-defs, allow-incomplete-defs
"""States at a length within the last pass, for the prefix cache.

A decode or verify pass leaves the state before its first token and the updates of its tokens. So
the state after any of them is at hand until the next pass: the state and the first few updates.
These functions write it to rows of a snapshot pool, for all layers at once. They run between steps
and only for requests that may have passed the length; which have, only the device knows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.cpu import linear_attention as cpu
from forerun.kernels.cpu.library import serves
from forerun.kernels.linear_attention import causal_conv
from forerun.kernels.linear_attention.gated_delta import (
    DeltaState,
    add_update,
    apply_updates,
    state_columns,
)
from forerun.kernels.runtime.jit import jit, tl, triton, use_triton


@dataclass(frozen=True)
class SnapshotRows:
    """n states to be written, each to a row of its own."""

    slots: Tensor  # [n] int64
    rows: Tensor  # [n] int64
    counts: Tensor  # [n] int32: updates after which the state is wanted; 0: the row stays as it is
    num_passes: Tensor  # [S] int32


@dataclass(frozen=True)
class ConvStates:
    """Convolutions of L layers."""

    state: Tensor  # [L, S, K - 1, C]
    inputs: Tensor  # [L, S, W, C]
    snapshots: Tensor  # [L, N, K - 1, C]


@dataclass(frozen=True)
class DeltaStates:
    """States of L layers; see `DeltaState`."""

    state: Tensor  # [L, S, HV, Dk, Dv]
    k: Tensor  # [L, S, W, 2, HK, Dk] float32
    delta: Tensor  # [L, S, W, HV, Dv] float32
    g: Tensor  # [L, S, W, 2, HV] float32
    snapshots: Tensor  # [L, N, HV, Dk, Dv]


def replay_conv(conv: ConvStates, to: SnapshotRows) -> None:
    """Writes the last inputs up to `to.counts` tokens of the last pass."""
    if not use_triton(conv.state):
        return replay_conv_ref(conv, to)
    layers, slots, before, channels = conv.state.shape
    assert before < causal_conv.MAX_KERNEL_SIZE
    block = causal_conv.BLOCK
    _replay_conv[(len(to.slots), triton.cdiv(channels, block), layers)](
        to.slots, to.rows, to.counts, conv.state, conv.inputs, conv.snapshots,
        slots, conv.snapshots.shape[1], channels, conv.inputs.shape[2],
        BEFORE=before, BLOCK=block, num_warps=1,
    )  # fmt: skip


def replay_conv_ref(conv: ConvStates, to: SnapshotRows) -> None:
    """Reference implementation of `replay_conv`."""
    before = conv.state.shape[2]
    at = to.counts.long().unsqueeze(1) + torch.arange(before, device=to.counts.device)
    for state, inputs, snapshots in zip(conv.state, conv.inputs, conv.snapshots, strict=True):
        kept = torch.cat((state[to.slots], inputs[to.slots]), 1)
        _store(snapshots, kept.take_along_dim(at.unsqueeze(2), 1), to)


def replay_gated_delta(delta: DeltaStates, to: SnapshotRows) -> None:
    """Writes the states after `to.counts` tokens of the last pass."""
    if not use_triton(delta.state):
        if serves(delta.state.dtype, delta.state.device) and delta.state.dtype == torch.float32:
            return replay_gated_delta_cpu(delta, to)
        return replay_gated_delta_ref(delta, to)
    layers, slots, v_heads, k_dim, v_dim = delta.state.shape
    width, _, k_heads, _ = delta.k.shape[2:]
    block_v = state_columns()
    _replay_gated_delta[(len(to.slots) * v_heads, triton.cdiv(v_dim, block_v), layers)](
        to.slots, to.rows, to.counts, to.num_passes,
        delta.state, delta.k, delta.delta, delta.g, delta.snapshots,
        slots, delta.snapshots.shape[1], width,
        K_HEADS=k_heads, V_HEADS=v_heads, K_DIM=k_dim, V_DIM=v_dim,
        BLOCK_K=triton.next_power_of_2(k_dim), BLOCK_V=block_v, num_warps=1,
    )  # fmt: skip


def replay_gated_delta_ref(delta: DeltaStates, to: SnapshotRows) -> None:
    """Reference implementation of `replay_gated_delta`."""
    counts = torch.zeros_like(to.num_passes).index_copy_(0, to.slots, to.counts)
    every = zip(delta.state, delta.k, delta.delta, delta.g, delta.snapshots, strict=True)
    for state, k, deltas, g, snapshots in every:
        layer = DeltaState(to.slots, counts, to.num_passes, state, k, deltas, g)
        _store(snapshots, apply_updates(layer), to)


def replay_gated_delta_cpu(delta: DeltaStates, to: SnapshotRows) -> None:
    """`replay_gated_delta` by our kernel for CPUs; states are float32."""
    width, counts = delta.delta.shape[2], to.counts.int().contiguous()
    pending = to.slots, counts, to.num_passes
    requests = cpu.Pass.of(pending, len(to.slots), width)
    every = zip(delta.state, delta.k, delta.delta, delta.g, delta.snapshots, strict=True)
    for state, k, deltas, g, snapshots in every:
        cpu.replay_delta(requests, state, (k, deltas, g), counts, to.rows, snapshots)


def _store(snapshots: Tensor, states: Tensor, to: SnapshotRows) -> None:
    """states [n, ...] to rows of snapshots [N, ...], where some updates count."""
    wanted = (to.counts > 0).view(-1, *[1] * (states.dim() - 1))
    kept = torch.where(wanted, states.to(snapshots.dtype), snapshots[to.rows])
    snapshots.index_copy_(0, to.rows, kept)


@jit
def _replay_conv(
    slots, rows, counts, state, inputs, snapshots, num_slots, num_rows, channels, width,
    BEFORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One CTA per BLOCK channels of an entry in a layer. Without updates nothing is read."""
    entry, layer = tl.program_id(0), tl.program_id(2).to(tl.int64)
    count = tl.load(counts + entry)
    slot = layer * num_slots + tl.load(slots + entry)
    row = layer * num_rows + tl.load(rows + entry)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (at < channels) & (count > 0)
    state += slot * BEFORE * channels + at
    inputs += slot * width * channels + at
    snapshots += row * BEFORE * channels + at
    for i in tl.static_range(BEFORE):
        index = count + i
        old = tl.load(state + index * channels, mask=inside & (index < BEFORE), other=0.0)
        new = tl.load(
            inputs + (index - BEFORE) * channels, mask=inside & (index >= BEFORE), other=0.0
        )
        tl.store(snapshots + i * channels, old + new, mask=inside)


@jit
def _replay_gated_delta(
    slots, rows, counts, num_passes, state, k_kept, delta_kept, g_kept, snapshots,
    num_slots, num_rows, width,
    K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One CTA per BLOCK_V columns of a value head's state, of an entry in a layer.

    The same operations as a pass's (`gated_delta._gated_delta_update`), so the same state. Without
    updates nothing is read.
    """
    entry, head = tl.program_id(0) // V_HEADS, tl.program_id(0) % V_HEADS
    layer = tl.program_id(2).to(tl.int64)
    k_head = head // (V_HEADS // K_HEADS)
    count = tl.load(counts + entry)
    slot = tl.load(slots + entry)
    turn = tl.load(num_passes + slot) & 1
    slot += layer * num_slots
    to = layer * num_rows + tl.load(rows + entry)
    row = tl.arange(0, BLOCK_K)
    column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside_k, inside_v = row < K_DIM, column < V_DIM
    inside = inside_k[:, None] & inside_v[None, :] & (count > 0)
    at = row[:, None] * V_DIM + column[None, :]
    state += (slot * V_HEADS + head) * (K_DIM * V_DIM) + at
    snapshots += (to * V_HEADS + head) * (K_DIM * V_DIM) + at
    k_kept += slot * width * (2 * K_HEADS * K_DIM) + k_head * K_DIM + row
    g_kept += slot * width * (2 * V_HEADS) + head
    delta_kept += (slot * width * V_HEADS + head) * V_DIM + column
    s = tl.load(state, mask=inside, other=0.0).to(tl.float32)
    for i in range(count):
        k = tl.load(k_kept + (2 * i + turn) * (K_HEADS * K_DIM), mask=inside_k, other=0.0)
        delta = tl.load(delta_kept + i * (V_HEADS * V_DIM), mask=inside_v, other=0.0)
        g = tl.load(g_kept + (2 * i + turn) * V_HEADS)
        s = add_update(s * tl.exp(g), k, delta)
    tl.store(snapshots, s.to(snapshots.dtype.element_ty), mask=inside)
