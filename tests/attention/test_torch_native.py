"""The plain backend over pools of another dtype: K/V is rounded once, when it is stored."""

from __future__ import annotations

import pytest
import torch

from forerun.attention.base import AttentionBatch, AttentionNeed, AttentionSpec, LayerMask
from forerun.attention.torch_native import TorchNative
from forerun.kvcache.layouts import ModelLayout
from forerun.kvcache.pools import ModelPools, PoolShape

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 16, 4


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn])
def test_attends_to_what_the_pool_can_hold(stored: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(6, HEADS, DIM, generator=generator)
    k, v = torch.randn(2, 6, KV_HEADS, DIM, generator=generator) * 3
    k[0, 0, 0], v[1, 1, 1] = 1e4, -1e4  # over what float8 holds
    limit = torch.finfo(stored).max
    rounded = [x.clamp(-limit, limit).to(stored).float() for x in (k, v)]
    table = torch.tensor([[2, 1]], dtype=torch.int32)
    batch = AttentionBatch(table, torch.zeros(1, dtype=torch.int32), 6, ragged=((0, 6),))
    outs = []
    for dtype, keys, values in ((stored, k, v), (torch.float32, *rounded)):
        need = AttentionNeed(
            "cpu", torch.float32, DIM, HEADS, KV_HEADS, PAGE, frozenset({LayerMask()}),
            kv_dtype=dtype,
        )  # fmt: skip
        pool = ModelPools(
            ModelLayout.dense(1, KV_HEADS, DIM, dtype), PoolShape(3, PAGE), torch.device("cpu")
        )
        backend = TorchNative(need, pool)
        plan = backend.plan(batch)
        backend.write(plan, 0, keys, values)
        outs.append(backend.attend(plan, 0, AttentionSpec(LayerMask(), DIM**-0.5), q))
    assert outs[0].dtype == torch.float32
    assert torch.equal(*outs)
