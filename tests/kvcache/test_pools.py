"""KV pools: allocation, moves, commits and snapshots follow the layout."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forerun.kernels.linear_attention.replay import SnapshotRows
from forerun.kvcache.layouts import DenseKV, LatentKV, ModelLayout, RecurrentState, StatePool
from forerun.kvcache.pools import ModelPools, PoolShape

CPU, MIB = torch.device("cpu"), 2**20
F32, BF16 = torch.float32, torch.bfloat16


def no_replay(pool: StatePool, to: SnapshotRows) -> None:
    raise AssertionError


STATE = RecurrentState({"s": ((2, 3), F32), "conv": ((4,), BF16)}, {"k": ((5,), F32)}, no_replay)
MIXED = ModelLayout(
    (DenseKV(2, 4, F32), STATE, LatentKV(6, 2, F32), DenseKV(1, 4, F32), STATE, DenseKV(2, 4, F32))
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_pool_is_zero_and_can_be_written(dtype: torch.dtype) -> None:
    pools = ModelPools(ModelLayout.dense(2, 3, 8, dtype), PoolShape(5, 4), CPU)
    assert pools.dense.shape == (2, 2, 5, 4, 3, 8) and pools.dense.dtype == dtype
    assert pools.dense.is_contiguous() and not pools.dense.float().any()
    pools.k(1)[2, 3] = torch.ones(3, 8).to(dtype)
    pools.v(0)[4, 0] = torch.full((3, 8), 2.0).to(dtype)
    assert pools.dense.float().sum() == 3 * 8 + 2 * 3 * 8
    assert pools.dense[0, 1, 2, 3].float().eq(1).all()
    assert pools.dense[1, 0, 4, 0].float().eq(2).all()


def resident() -> int:
    """Resident memory of this process in bytes."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_only_written_pages_use_memory() -> None:
    """A pool has room for all slots at full context length, most of which is never used."""
    before = resident()
    pools = ModelPools(ModelLayout.dense(4, 4, 64, F32), PoolShape(4096, 16), CPU)
    assert pools.dense.nbytes == 512 * MIB
    assert resident() - before < 16 * MIB
    pools.dense[:, :, :64] = 1.0
    assert 8 * MIB <= resident() - before < 64 * MIB


def test_sizes() -> None:
    assert MIXED.token_bytes == 4 * (2 * 2 * 4 * 2 + 8 + 2 * 4)
    assert MIXED.state_bytes == 2 * (2 * 3 * 4 + 4 * 2)
    assert MIXED.slot_bytes(num_verify_tokens=5) == MIXED.state_bytes + 5 * 2 * 5 * 4
    assert MIXED.has_recurrent_state and not ModelLayout.dense(1, 1, 2, F32).has_recurrent_state


def test_the_kv_dtype_does_not_apply_to_recurrent_state() -> None:
    stored = MIXED.with_kv_dtype(BF16)
    assert 2 * stored.token_bytes == MIXED.token_bytes
    assert stored.recurrent == MIXED.recurrent


def mixed(**shape: int) -> ModelPools:
    return ModelPools(MIXED, PoolShape(3, 2, **shape), CPU)


def test_layers_of_one_layout_share_a_tensor() -> None:
    pools = mixed()
    assert [data.shape for data in pools.paged.values()] == [
        (2, 2, 3, 2, 2, 4),
        (1, 1, 3, 2, 1, 8),
        (2, 1, 3, 2, 1, 4),
    ]
    assert pools.latent(2).shape == (3, 2, 8)
    shared = pools.paged[DenseKV(2, 4, F32)]
    pools.v(5)[1, 1] = 7.0
    assert shared[1, 1, 1, 1].eq(7).all() and shared.sum() == 7 * 8


def test_tree_compaction_moves_tokens_of_every_paged_layer() -> None:
    pools = mixed()
    for data in pools.paged.values():
        data.copy_(torch.arange(data.numel()).view(data.shape))
    before = {kind: data.clone().flatten(2, 3) for kind, data in pools.paged.items()}
    slots = torch.tensor([[2, 3, 4, 5]])
    pools.move_tokens(slots, torch.tensor([[0, 2, 3, 3]]))
    for kind, data in pools.paged.items():
        after, want = data.flatten(2, 3), before[kind]
        assert torch.equal(after[:, :, [0, 1, 2, 3, 4, 5]], want[:, :, [0, 1, 2, 4, 5, 5]])


def states(pools: ModelPools, layer: int) -> dict[str, Tensor]:
    return dict(pools.state(layer).state)


def test_commit_says_how_many_updates_belong_to_a_state() -> None:
    pools = mixed(num_slots=4, num_verify_tokens=3)
    assert pools.state(4).updates["k"].shape == (4, 3, 5)
    pools.commit(torch.tensor([2, 0]), torch.tensor([3, 1], dtype=torch.int32))
    for layer in (1, 4):
        assert pools.state(layer).num_pending.tolist() == [1, 0, 3, 0]
    pools.reset_slots(torch.tensor([2]))
    pools.commit(torch.tensor([3, 3]), torch.tensor([2, 3], dtype=torch.int32))  # padding
    assert pools.num_pending.tolist() == [1, 0, 0, 0]


def test_a_snapshot_restores_a_state() -> None:
    pools = mixed(num_slots=3, num_snapshots=2)
    for pool in pools.states:
        for state in pool.state.values():
            state.copy_(torch.randn(state.shape))
    kept = {layer: {n: s[1].clone() for n, s in states(pools, layer).items()} for layer in (1, 4)}
    pools.save_snapshots(torch.tensor([1, 0]), torch.tensor([1, 0]))
    pools.reset_slots(torch.tensor([0, 1]))
    assert not states(pools, 1)["s"][:2].any() and states(pools, 1)["s"][2].any()
    pools.load_snapshots(torch.tensor([2]), torch.tensor([1]))
    for layer in (1, 4):
        assert all(torch.equal(states(pools, layer)[n][2], s) for n, s in kept[layer].items())


def test_models_without_recurrent_state_allocate_nothing() -> None:
    pools = ModelPools(
        ModelLayout.dense(2, 1, 4, F32), PoolShape(3, 2, num_slots=9, num_snapshots=4), CPU
    )
    assert pools.states == () and pools.num_snapshots == 0
    pools.commit(torch.tensor([0]), torch.tensor([1]))
    pools.reset_slots(torch.tensor([0]))
