"""MLA in a fixed order: right, and a token has the same bits however it is computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forerun.kernels.attention import mla_fixed_order
from forerun.kernels.attention.decode import CAUSAL, TREE, MaskSpec
from forerun.kernels.attention.fixed_order import TreePaths
from forerun.kernels.attention.mla_absorbed import PagedLatent, build_row_tile_map
from forerun.kernels.attention.mla_fixed_order import (
    mla_fixed_order_decode,
    mla_fixed_order_prefill,
)
from forerun.kernels.attention.tiles import mla_fixed_order_tile
from forerun.kernels.gemm.head_gemm import MAX_TOKENS, head_gemm
from forerun.kernels.runtime.gpu import gpu_of
from tests.kernels.attention_support import Paged, make_paged, relative_error

pytest.importorskip("triton")

BOUND = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
CHAINS = [MaskSpec(CAUSAL), MaskSpec(CAUSAL, 300)]
MASKS = [*CHAINS, MaskSpec(TREE), MaskSpec(TREE, 300)]
STARTS = [0, 13, 255, 256, 510, 700]
KV_LEN_UB = 1024
SMALL, DEEPSEEK = (32, 16), (512, 64)


def make(
    spans: list[tuple[int, int]],
    heads: int,
    dims: tuple[int, int] = SMALL,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Paged:
    """Random requests whose K is a row of dims (Dl, Dr), and V the same row."""
    case = make_paged(spans, heads, 1, sum(dims), page, dtype, device=device)
    return replace(case, v_pool=case.k_pool)


def cache_of(case: Paged) -> PagedLatent:
    row = case.k_pool.shape[-1]
    latent = DEEPSEEK[0] if row == sum(DEEPSEEK) else SMALL[0]
    return PagedLatent(case.k_pool.squeeze(2), latent, case.table, case.start)


def step(case: Paged, mask: MaskSpec) -> Tensor:
    q_len, own, cache = case.spans[0][1], case.mask(mask), cache_of(case)
    paths = None if own.tree is None else TreePaths.of(own.tree, q_len)
    return mla_fixed_order_decode(case.q, cache, q_len, own, case.scale, KV_LEN_UB, paths)


def chunks(case: Paged, mask: MaskSpec) -> Tensor:
    device, cache = case.q.device, cache_of(case)
    tile = mla_fixed_order_tile(gpu_of(device), cache.shape(case.q.dtype))
    rows = build_row_tile_map(case.spans, case.q.shape[1], tile.block_m, lambda t: t.to(device))
    return mla_fixed_order_prefill(case.q, cache, rows, mask, case.scale)


def expected(case: Paged, mask: MaskSpec) -> Tensor:
    return case.reference(case.mask(mask))[..., : cache_of(case).latent_dim]


def divided(monkeypatch: pytest.MonkeyPatch, ctas: int) -> None:
    """Divides every context among as many CTAs; 1: one CTA folds it in registers."""
    monkeypatch.setattr(mla_fixed_order, "choose_ctas", lambda *_, **__: ctas)


@pytest.mark.covering(0, 1)
@pytest.mark.parametrize("ctas", [3, 1])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_step_against_the_definition(
    mask: MaskSpec, ctas: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    divided(monkeypatch, ctas)
    case = make([(n, 3) for n in (0, 13, 300)], 6, device=device)
    assert relative_error(step(case, mask), expected(case, mask)) < BOUND[torch.float32]


@pytest.mark.covering(0)
@pytest.mark.parametrize("mask", CHAINS, ids=str)
def test_chunks_against_the_definition(mask: MaskSpec, device: torch.device) -> None:
    case = make([(0, 20), (250, 11), (600, 1)], 6, device=device)
    assert relative_error(chunks(case, mask), expected(case, mask)) < BOUND[torch.float32]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mask", [CHAINS[1], MASKS[2]], ids=str)
def test_any_division_has_the_same_bits(
    mask: MaskSpec, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever segments the first CTA folds and others leave."""
    case = make([(130, 3), (400, 3)], 6, device=device)
    outs = []
    for ctas in (1, 2, 3, 4):
        divided(monkeypatch, ctas)
        outs.append(step(case, mask))
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("mask", CHAINS, ids=str)
def test_a_token_has_the_same_bits_in_any_pass(
    mask: MaskSpec, heads: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of any length, verify passes, single tokens; folded by one CTA or after several."""
    whole = make([(n, 5) for n in STARTS], heads, DEEPSEEK, 64, torch.bfloat16, device)
    got = chunks(whole, mask)
    assert relative_error(got, expected(whole, mask)) < BOUND[torch.bfloat16]
    for ctas in (1, 2, 7):
        divided(monkeypatch, ctas)
        assert torch.equal(step(whole, mask), got), ctas
        for token in range(5):
            alone = replace(
                whole,
                q=whole.q[token::5],
                start=whole.start + token,
                spans=[(start + token, 1) for start, _ in whole.spans],
            )
            assert torch.equal(step(alone, mask), got[token::5]), (ctas, token)
            assert torch.equal(chunks(alone, mask), got[token::5]), token


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 300])
def test_a_node_has_the_bits_of_the_chain_to_it(
    window: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for start in (0, 62, 250, 500):
        case = make([(start, 40)], 16, DEEPSEEK, 64, torch.bfloat16, device)
        assert case.tree is not None
        for ctas in (1, 3):
            divided(monkeypatch, ctas)
            out = step(case, MaskSpec(TREE, window))
            for node in range(0, 40, 3):
                alone = step(chain_of(case, node), MaskSpec(CAUSAL, window))
                assert torch.equal(alone[0], out[node]), (start, ctas, node)


def chain_of(case: Paged, node: int) -> Paged:
    """The first request's tree as the chain that leads to a node."""
    assert case.tree is not None
    start, count = case.spans[0]
    bits, page = int(case.tree[node, 0]), case.k_pool.shape[1]
    path = [j for j in range(count) if bits >> j & 1]
    old, pool = case.k_pool.flatten(0, 1), case.k_pool.clone()

    def slot(position: int) -> int:
        return int(case.table[0, position // page]) * page + position % page

    for i, j in enumerate(path):
        pool.flatten(0, 1)[slot(start + i)] = old[slot(start + j)]
    spans = [(start + len(path) - 1, 1)]
    begin = torch.tensor([spans[0][0]], dtype=torch.int32, device=case.q.device)
    q, table = case.q[node : node + 1], case.table[:1]
    return Paged(q, pool, pool, table, begin, spans, case.scale)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_projections_of_heads_are_the_same_among_any_number(heads: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    x, weight = normal(1000, heads, 128), normal(heads, 128, 512) * 0.1

    def run(rows: Tensor) -> Tensor:
        out = rows.new_empty(len(rows), heads, 512)
        head_gemm(rows, weight, out, fixed_order=True)
        return out

    whole = run(x)
    exact = torch.einsum("thk,hkn->thn", x.double(), weight.double())
    assert relative_error(whole, exact) < BOUND[torch.bfloat16]
    for count in (1, 15, 16, 17, MAX_TOKENS, MAX_TOKENS + 1, 129, 600):
        assert torch.equal(run(x[:count]), whole[:count]), count
        assert torch.equal(run(x[-count:]), whole[-count:]), count
