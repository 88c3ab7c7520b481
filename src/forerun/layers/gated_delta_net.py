"""Gated DeltaNet (arXiv 2412.06464): linear attention with a state of fixed size per request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.attention.base import AttentionContext, RopeInput
from forerun.attention.recurrent import RecurrentContext
from forerun.kernels.gemm.gemm import DeferredNorm
from forerun.kernels.linear_attention.causal_conv import (
    ConvState,
    causal_conv_prefill,
    causal_conv_update,
)
from forerun.kernels.linear_attention.gated_delta import (
    DeltaGates,
    DeltaState,
    gated_delta_prefill,
    gated_delta_update,
)
from forerun.kernels.linear_attention.gated_norm import gated_rms_norm
from forerun.kernels.linear_attention.replay import (
    ConvStates,
    DeltaStates,
    SnapshotRows,
    replay_conv,
    replay_gated_delta,
)
from forerun.kvcache.layouts import SSM, RecurrentState, StatePool
from forerun.layers.attention import KVLayer
from forerun.layers.communication import Communicator, WeightPlacement
from forerun.layers.linear import LinearBase, MergedLinear, PendingGemm, RowLinear
from forerun.layers.module import Module
from forerun.layers.norm import RMSNorm
from forerun.layers.sharding import Shard, even_shard, share_of


@dataclass(frozen=True)
class DeltaHeads:
    """Heads of a layer, and of what it keeps. Every key head serves as many value heads."""

    num_k: int
    num_v: int
    k_dim: int
    v_dim: int
    kernel_size: int  # of the convolution

    @property
    def key(self) -> int:
        """Width of all key heads, and of all query heads."""
        return self.num_k * self.k_dim

    @property
    def value(self) -> int:
        return self.num_v * self.v_dim

    @property
    def conv(self) -> int:
        """Channels of the convolution: q, k and v heads."""
        return 2 * self.key + self.value

    def of_rank(self, comm: Communicator) -> DeltaHeads:
        """
        Raises:
            ConfigError: the heads cannot be divided among the ranks.
        """
        num_k = share_of(self.num_k, comm, "linear attention's key heads")
        return replace(self, num_k=num_k, num_v=num_k * (self.num_v // self.num_k))

    def conv_shard(self, comm: Communicator) -> Shard:
        """A rank's channels of q, k and v."""
        kinds = ("queries", self.key), ("keys", self.key), ("values", self.value)
        return Shard.joined(*(even_shard(size, comm, name) for name, size in kinds))


class CausalConv(Module):
    """`weight` [C, 1, K], one short filter per channel; SiLU after it."""

    def __init__(self, heads: DeltaHeads, place: WeightPlacement) -> None:
        self._ranks, self._channels = place.comm.size, heads.conv_shard(place.comm)
        self.weight = place.empty(self._channels.count, heads.kernel_size)

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        return {f"{prefix}weight": self.weight.unsqueeze(1)}

    def shards(self, prefix: str = "") -> dict[str, Shard]:
        return {f"{prefix}weight": self._channels} if self._ranks > 1 else {}

    def __call__(self, x: Tensor, state: RecurrentContext) -> Tensor:
        """x [T, C] -> [T, C]."""
        layer = state.layer
        kept = ConvState(state.slots, layer.num_pending, layer.state["conv"], layer.updates["conv"])
        if state.prompts is None:
            return causal_conv_update(x, self.weight, kept, state.parents, state.rows)
        return causal_conv_prefill(x, self.weight, kept, state.prompts)


class GatedDeltaNet(KVLayer):
    """Projections, convolution, the gated delta rule, a norm per head with a gate, `out_proj`.

    `in_proj` computes q, k, v, the output's gate z, and what decides about β (b) and the decay (a),
    in this order. `parts` are their names in checkpoints, with widths. A family whose checkpoints
    have the rows in another order says so by `row_order` [rows] int64: where to take them from.
    """

    def __init__(
        self,
        layer_id: int,
        hidden_size: int,
        heads: DeltaHeads,
        eps: float,
        parts: Mapping[str, int | Shard],
        place: WeightPlacement,
        row_order: Tensor | None = None,
    ) -> None:
        """`heads`, `parts`: of the whole layer; `row_order`: of what is this rank's."""
        self.layer_id, self._row_order = layer_id, row_order
        self.heads = heads.of_rank(place.comm)
        self._ranks = place.comm.size
        self._value_heads = even_shard(heads.num_v, place.comm, "linear attention's value heads")
        self.in_proj = MergedLinear(hidden_size, parts, False, place)
        self.conv1d = CausalConv(heads, place)
        float32 = WeightPlacement(torch.float32, place.device)
        num_v = self.heads.num_v
        self._a_log, self._dt_bias = float32.empty(num_v), float32.empty(num_v)
        self._decay = torch.empty(0)
        self.norm = RMSNorm(heads.v_dim, eps, place)
        self.out_proj = RowLinear(heads.value, hidden_size, False, place)
        self._conv_dtype, self._fixed_order = place.dtype, place.fixed_order

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        own = {f"{prefix}A_log": self._a_log, f"{prefix}dt_bias": self._dt_bias}
        return super().weights(prefix) | own

    def shards(self, prefix: str = "") -> dict[str, Shard]:
        if self._ranks == 1:
            return {}
        own = dict.fromkeys((f"{prefix}A_log", f"{prefix}dt_bias"), self._value_heads)
        return super().shards(prefix) | own

    def prepare(self) -> None:
        if self._row_order is not None:
            order = self._row_order
            self.in_proj.map_rows(lambda rows: rows.copy_(rows[order.to(rows.device)]))
        super().prepare()
        self._decay = self._a_log.exp()

    def kv_layout(self, kv_dtype: torch.dtype) -> RecurrentState:
        heads, float32 = self.heads, torch.float32
        return RecurrentState(
            tensors={
                "conv": ((heads.kernel_size - 1, heads.conv), self._conv_dtype),
                SSM: ((heads.num_v, heads.k_dim, heads.v_dim), float32),
            },
            updates={
                "conv": ((heads.conv,), self._conv_dtype),
                "k": ((2, heads.num_k, heads.k_dim), float32),
                "delta": ((heads.num_v, heads.v_dim), float32),
                "g": ((2, heads.num_v), float32),
            },
            replay=replay_states,
            trees=True,
            ragged=True,
        )

    @property
    def input_proj(self) -> LinearBase:
        return self.in_proj

    def __call__(
        self, x: Tensor | DeferredNorm, rope: RopeInput, ctx: AttentionContext
    ) -> PendingGemm:
        """x [T, H] -> [T, H]; `rope` is not looked at."""
        heads, state = self.heads, ctx.recurrent(self.layer_id)
        widths = heads.conv, heads.value, heads.num_v, heads.num_v
        qkv, z, b, a = self.in_proj(x).result().split_with_sizes(widths, 1)
        out = self._attend(self.conv1d(qkv, state), a, b, state)
        return self.out_proj(gated_rms_norm(out, z, self.norm.weight, self.norm.eps))

    def _attend(self, qkv: Tensor, a: Tensor, b: Tensor, state: RecurrentContext) -> Tensor:
        gates, layer = DeltaGates(a, b, self._decay, self._dt_bias), state.layer
        kept = DeltaState(
            state.slots,
            layer.num_pending,
            layer.num_passes,
            layer.state[SSM],
            layer.updates["k"],
            layer.updates["delta"],
            layer.updates["g"],
        )
        if state.prompts is None:
            return gated_delta_update(
                *(qkv, gates, kept, state.parents), self._fixed_order, state.rows
            )
        return gated_delta_prefill(qkv, gates, kept, state.prompts, self._fixed_order)


def replay_states(pool: StatePool, to: SnapshotRows) -> None:
    """`RecurrentState.replay` of these layers."""
    state, updates, snapshots = pool.state, pool.updates, pool.snapshots
    replay_conv(ConvStates(state["conv"], updates["conv"], snapshots["conv"]), to)
    replay_gated_delta(
        DeltaStates(state[SSM], updates["k"], updates["delta"], updates["g"], snapshots[SSM]), to
    )
