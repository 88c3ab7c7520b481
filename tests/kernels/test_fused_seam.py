"""The fused seam of the attention backends: Triton's against the default, in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forerun.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionContext,
    AttentionNeed,
    AttentionSpec,
    LayerMask,
)
from forerun.attention.cpu import CpuAttention
from forerun.attention.torch_native import TorchNative
from forerun.attention.triton import TritonAttention
from forerun.config.rope_config import RopeConfig
from forerun.kernels.elementwise.qk_norm_rope import HeadNorms
from forerun.kvcache.layouts import ModelLayout
from forerun.kvcache.pools import ModelPools, PoolShape
from forerun.layers.attention import HeadNormRope
from forerun.layers.rope import LayerRopes
from forerun.models.dflash import ContextKVNormRope

HEADS, KV_HEADS, DIM, LAYERS, PAGE, WIDTH = 4, 2, 32, 3, 4, 4
NEW = (2, 4)  # tokens committed of each request


def run(
    kind: type[AttentionBackend], device: torch.device, alike: bool = True
) -> tuple[Tensor, Tensor]:
    """(what layer 1 gathers, the pool after all layers' K/V were written).

    `alike`: all layers have the same RoPE.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    float32 = torch.float32
    need = AttentionNeed(device.type, float32, DIM, HEADS, KV_HEADS, frozenset({LayerMask()}))
    backend = kind(
        need,
        ModelPools(ModelLayout.dense(LAYERS, KV_HEADS, DIM, float32), PoolShape(9, PAGE), device),
    )
    table = torch.randperm(8, generator=generator).view(2, 4).int() + 1
    start = torch.tensor([3, 7], dtype=torch.int32, device=device)
    batch = AttentionBatch(table.to(device), start, 12, q_len=WIDTH)
    context = AttentionContext(backend, backend.plan(batch), batch)
    positions = (start[:, None] + torch.arange(WIDTH, device=device)).flatten().int()
    thetas = [1e4 if alike else 1e4 / 10**layer for layer in range(LAYERS)]
    kinds = [(RopeConfig(theta=theta), DIM) for theta in thetas]
    rows = LayerRopes(kinds, 64, float32, device).rows(positions)
    tokens = len(positions)

    heads = HeadNormRope(HEADS, KV_HEADS, DIM, HeadNorms(normal(DIM), normal(DIM), 1e-6))
    qkv = normal(tokens, (HEADS + 2 * KV_HEADS) * DIM)
    gathered = context.run(1, AttentionSpec(LayerMask(), 0.2), qkv, heads, rows[1])

    norms = HeadNorms(normal(DIM), normal(LAYERS, DIM), 1e-6)
    kv = normal(tokens, 2 * LAYERS * KV_HEADS * DIM)
    new = torch.tensor(NEW, dtype=torch.int32, device=device)
    context.write_layers(kv, ContextKVNormRope(KV_HEADS, norms), rows, new)
    return gathered, backend.pools.dense


def test_backends_agree(device: torch.device) -> None:
    want, want_pool = run(TorchNative, device)
    got, pool = run(TritonAttention, device)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    # The default writes rejected tokens too: of the first request the last two.
    same = (pool - want_pool).abs().amax((0, 1, 4, 5)) < 1e-5
    assert int((~same).sum()) == 2 * WIDTH - sum(NEW)


@pytest.mark.parametrize("kind", [TritonAttention, CpuAttention])
def test_layers_of_different_ropes(kind: type[AttentionBackend], device: torch.device) -> None:
    if kind is CpuAttention and device.type != "cpu":
        pytest.skip("it runs on a CPU")
    (_, want), (_, pool), (_, alike) = (
        run(each, device, same)
        for each, same in ((TorchNative, False), (kind, False), (TorchNative, True))
    )
    torch.testing.assert_close(pool, want, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(alike, want, atol=1e-2)
