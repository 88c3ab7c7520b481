"""Expanded K and V of MLA in prefill: equal to the absorbed form, chosen where cheaper."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forerun.attention import latent
from forerun.attention.base import AttentionBatch, AttentionNeed, AttentionSpec, LayerMask
from forerun.attention.latent import LatentDims, LatentExpand
from forerun.attention.torch_native import TorchNative
from forerun.kvcache.layouts import LatentKV, ModelLayout
from forerun.kvcache.pools import ModelPools, PoolShape

F64, HEADS, PAGE = torch.float64, 3, 4
DIMS = LatentDims(latent=6, rope=2, nope=5, v=4)
CHUNKS = ((5, 4), (0, 3), (8, 1))
DEEPSEEK = LatentDims(latent=512, rope=64, nope=128, v=128)


class Expand(LatentExpand):
    num_heads, dims = HEADS, DIMS

    def __init__(self) -> None:
        self.w = normal(HEADS, DIMS.nope + DIMS.v, DIMS.latent)
        self.groups: list[slice] = []

    def __call__(self, rows: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        self.groups.append(heads)
        both = torch.einsum("sr,hdr->shd", rows[:, : DIMS.latent], self.w[heads])
        rope = rows[:, None, DIMS.latent :].expand(-1, both.shape[1], -1)
        return torch.cat((both[..., : DIMS.nope], rope), -1), both[..., DIMS.nope :]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("head_bytes", [1 << 20, 1])
def test_expanded_equals_absorbed(
    window: int | None, head_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent, "EXPANDED_BYTES", head_bytes)
    mask, expand = LayerMask(window=window), Expand()
    need = AttentionNeed("cpu", F64, 8, HEADS, 1, frozenset({mask}), mla=True, dense=False)
    layout = ModelLayout((LatentKV(DIMS.latent, DIMS.rope, F64),))
    backend = TorchNative(need, ModelPools(layout, PoolShape(10, PAGE), torch.device("cpu")))
    table = torch.tensor([[3, 1, 7], [2, 8, 4], [6, 5, 9]], dtype=torch.int32)
    context = AttentionBatch(
        table, torch.zeros(3, dtype=torch.int32), 8, ragged=tuple((0, max(s, 1)) for s, _ in CHUNKS)
    )
    rows = sum(n for _, n in context.ragged or ())
    backend.write_latent(backend.plan(context), 0, normal(rows, 8))
    starts = torch.tensor([start for start, _ in CHUNKS], dtype=torch.int32)
    batch = AttentionBatch(table, starts, 9, ragged=CHUNKS)
    plan, tokens = backend.plan(batch), sum(n for _, n in CHUNKS)
    backend.write_latent(plan, 0, normal(tokens, 8) * 2)
    q, spec = normal(tokens, HEADS, DIMS.qk), AttentionSpec(mask, 0.3)
    got = backend.attend_latent_prefill(plan, batch, 0, spec, q, expand)
    w_uk, w_uv = expand.w.split((DIMS.nope, DIMS.v), 1)
    absorbed = torch.einsum("thd,hdr->thr", q[..., : DIMS.nope], w_uk)
    out = backend.attend_latent(plan, 0, spec, torch.cat((absorbed, q[..., DIMS.nope :]), -1))
    torch.testing.assert_close(got, torch.einsum("thr,hdr->thd", out, w_uv))
    assert {g.stop - g.start for g in expand.groups} == ({HEADS} if head_bytes > 1 else {1})


@pytest.mark.parametrize(
    ("chunks", "cheaper"),
    [
        (((0, 1),), True),
        (((0, 4096),), True),
        (((32768, 1),), False),
        (((32768, 169),), False),
        (((32768, 172),), True),
        (((32768, 16), (0, 16)), False),
        (((1024, 16), (0, 4096)), True),
    ],
)
def test_expanding_pays_for_prompts_and_large_chunks(
    chunks: tuple[tuple[int, int], ...], cheaper: bool
) -> None:
    assert DEEPSEEK.expanding_is_cheaper(chunks) == cheaper


@pytest.mark.parametrize(
    ("chunks", "cheaper"),
    [
        (((0, 1024),) * 8, True),  # µs on an H200, 16 heads, expanded and absorbed: 151, 212
        (((0, 4096),), True),  # 210, 423
        (((4096, 4096),), True),  # 630, 1270
        (((7680, 512),), False),  # 260, 208
        (((8128, 64),) * 8, False),  # 219 absorbed; expanding alone takes longer
        (((32256, 512),), False),  # 1080, 838
        (((31744, 1024),), True),
    ],
)
def test_expanding_pays_later_where_absorbed_attention_is_twice_as_fast(
    chunks: tuple[tuple[int, int], ...], cheaper: bool
) -> None:
    """Hopper's kernel: half of the absorbed multiply-adds are counted."""
    assert DEEPSEEK.expanding_is_cheaper(chunks, absorbed_speedup=2.0) == cheaper


def test_operations_are_counted_as_they_are_done() -> None:
    """The rule against both counts, one head, pair by pair."""
    d = DEEPSEEK
    for start, n in ((0, 1), (7, 3), (100, 90), (5000, 150), (5000, 200)):
        pairs = sum(start + i + 1 for i in range(n))
        up = d.latent * (d.nope + d.v)
        absorbed = pairs * (2 * d.latent + d.rope) + n * up
        expanded = pairs * (d.qk + d.v) + (start + n) * up
        assert d.expanding_is_cheaper([(start, n)]) == (expanded < absorbed)
