"""The plain backend compared with a loop: MLA, sinks, soft-cap, layers of different shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.attention.base import AttentionBatch, AttentionNeed, AttentionSpec, LayerMask
from forerun.attention.torch_native import TorchNative
from forerun.kvcache.layouts import DenseKV, LatentKV, ModelLayout
from forerun.kvcache.pools import ModelPools, PoolShape

CPU, F64 = torch.device("cpu"), torch.float64
HEADS, PAGE = 4, 4
LAYOUT = ModelLayout((DenseKV(2, 8, F64), LatentKV(6, 2, F64), DenseKV(1, 12, F64)))
LENGTHS, WIDTH = (9, 5), 3  # two requests: a prefill, then a verify pass


def backend() -> TorchNative:
    masks = frozenset({LayerMask()})
    need = AttentionNeed("cpu", F64, 8, HEADS, 2, masks, mla=True, uniform=False, sinks=True)
    assert TorchNative.why_not(need) == []
    return TorchNative(need, ModelPools(LAYOUT, PoolShape(9, PAGE), CPU))


def batches() -> list[AttentionBatch]:
    table = torch.tensor([[3, 1, 7, 5], [2, 8, 4, 6]], dtype=torch.int32)
    start = torch.zeros(2, dtype=torch.int32)
    prefill = AttentionBatch(table, start, 9, ragged=tuple((0, n) for n in LENGTHS))
    verify = AttentionBatch(table, torch.tensor(LENGTHS).int(), 12, q_len=WIDTH)
    return [prefill, verify]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(sum(shape)))


def loop(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k [n, H, D], v [n, H, Dv] of one request, token by token and head by head."""
    window = spec.mask.window or len(q)
    out = torch.zeros(len(q), q.shape[1], v.shape[2], dtype=F64)
    for i, h in ((i, h) for i in range(len(q)) for h in range(q.shape[1])):
        seen = range(max(0, i - window + 1), i + 1)
        scores = [float(q[i, h] @ k[j, h]) * spec.scale for j in seen]
        if spec.logit_softcap is not None:
            cap = spec.logit_softcap
            scores = [cap * float(torch.tanh(torch.tensor(s / cap))) for s in scores]
        weights = torch.tensor(scores, dtype=F64).exp()
        rest = 0.0 if spec.sinks is None else float(spec.sinks[h].double().exp())
        for weight, j in zip(weights / (weights.sum() + rest), seen, strict=True):
            out[i, h] += weight * v[j, h]
    return out


def split(x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens of both forwards, in their order, and by request."""
    first, second = sum(LENGTHS), len(LENGTHS) * WIDTH
    forwards = [x[:first], x[first : first + second]]
    prompts, more = forwards[0].split(LENGTHS), forwards[1].split(WIDTH)
    return forwards, [torch.cat(both) for both in zip(prompts, more, strict=True)]


def check(layer: int, spec: AttentionSpec) -> None:
    plain, total = backend(), sum(LENGTHS) + len(LENGTHS) * WIDTH
    kind = LAYOUT.layers[layer]
    dense = isinstance(kind, DenseKV)
    heads, dim = (kind.num_kv_heads, kind.head_dim) if isinstance(kind, DenseKV) else (1, 8)
    q, k, v = normal(total, HEADS, dim), normal(total, heads, dim), normal(total, heads, dim + 1)
    v = v[..., :dim] if dense else k[..., :6]
    got = []
    for batch, i in zip(batches(), range(2), strict=True):
        plan, (mine, keys, values) = plain.plan(batch), (split(x)[0][i] for x in (q, k, v))
        if dense:
            plain.write(plan, layer, keys, values)
            got.append(plain.attend(plan, layer, spec, mine))
        else:
            plain.write_latent(plan, layer, keys.squeeze(1))
            got.append(plain.attend_latent(plan, layer, spec, mine))
    by_request = split(torch.cat(got))[1]
    group = HEADS // heads
    for out, queries, keys, values in zip(
        by_request, split(q)[1], split(k)[1], split(v)[1], strict=True
    ):
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        want = loop(spec, queries, keys, values)
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def test_latent() -> None:
    check(1, AttentionSpec(LayerMask(), 0.3))


def test_latent_with_sinks_and_a_window() -> None:
    check(1, AttentionSpec(LayerMask(window=4), 0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])))


def test_sinks() -> None:
    check(0, AttentionSpec(LayerMask(), 0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])))


def test_soft_cap() -> None:
    check(0, AttentionSpec(LayerMask(window=3), 1.0, logit_softcap=2.0))


def test_layers_of_another_shape() -> None:
    check(2, AttentionSpec(LayerMask(), 0.3))
