"""Attention of ragged passes: each row as in a pass in which every request has as many tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from forerun.kernels.attention import fixed_order, mla_fixed_order
from forerun.kernels.attention.decode import (
    BLOCK,
    CAUSAL,
    SLIDING_BLOCK,
    TREE,
    MaskSpec,
    paged_attention,
    paged_attention_ref,
)
from forerun.kernels.attention.fixed_order import TreePaths, fixed_order_attention
from forerun.kernels.attention.mla_absorbed import PagedLatent, mla_decode, mla_decode_ref
from forerun.kernels.attention.mla_fixed_order import mla_fixed_order_decode
from forerun.kernels.attention.tiles import TileConfig
from forerun.kernels.speculation.ragged import RaggedRows
from tests.kernels.attention_support import Paged, make_paged, ragged_rows, relative_error

pytest.importorskip("triton")

STARTS, WIDTHS, MOST = [1, 41, 0, 130], [3, 1, 9, 7], 9
LATENT = 32  # Dl of rows of 48
SMALL = TileConfig(16, 16, 4, 1)
MASKS = [MaskSpec(CAUSAL), MaskSpec(CAUSAL, 5), MaskSpec(TREE), MaskSpec(TREE, 3)]
Attend = Callable[[Paged, MaskSpec, RaggedRows | None], Tensor]


def rows_of(device: torch.device) -> RaggedRows:
    return ragged_rows(WIDTHS, MOST, device)


def dense(case: Paged, mask: MaskSpec, rows: RaggedRows | None, splits: int = 1) -> Tensor:
    kv = replace(case.kv, rows=rows)
    return paged_attention(case.q, kv, MOST, case.mask(mask), case.scale, splits, SMALL)


def dense_ref(case: Paged, mask: MaskSpec, rows: RaggedRows | None) -> Tensor:
    return paged_attention_ref(
        case.q, replace(case.kv, rows=rows), MOST, case.mask(mask), case.scale
    )


def cache_of(case: Paged, rows: RaggedRows | None) -> PagedLatent:
    return PagedLatent(case.k_pool.squeeze(2), LATENT, case.table, case.start, rows)


def latent(case: Paged, mask: MaskSpec, rows: RaggedRows | None, splits: int = 1) -> Tensor:
    cache = cache_of(case, rows)
    return mla_decode(case.q, cache, MOST, case.mask(mask), case.scale, splits, SMALL)


def latent_ref(case: Paged, mask: MaskSpec, rows: RaggedRows | None) -> Tensor:
    return mla_decode_ref(case.q, cache_of(case, rows), MOST, case.mask(mask), case.scale)


def in_fixed_order(case: Paged, mask: MaskSpec, rows: RaggedRows | None) -> Tensor:
    own = case.mask(mask)
    paths = None if own.tree is None else TreePaths.of(own.tree, MOST)
    kv = replace(case.kv, rows=rows)
    return fixed_order_attention(case.q, kv, MOST, own, case.scale, 256, paths)


def latent_in_fixed_order(case: Paged, mask: MaskSpec, rows: RaggedRows | None) -> Tensor:
    own = case.mask(mask)
    paths = None if own.tree is None else TreePaths.of(own.tree, MOST)
    return mla_fixed_order_decode(case.q, cache_of(case, rows), MOST, own, case.scale, 256, paths)


def case_of(kv_heads: int, dim: int, device: torch.device) -> Paged:
    case = make_paged([(s, MOST) for s in STARTS], 4, kv_heads, dim, 16, device=device)
    return replace(case, v_pool=case.k_pool) if kv_heads == 1 else case


def pair(case: Paged, mask: MaskSpec, attend: Attend) -> tuple[Tensor, Tensor]:
    """The rows of a ragged pass, and the same ones of a pass of full width.

    K/V past a request's tokens is NaN in the ragged one.
    """
    rows = rows_of(case.q.device)
    want = rows.pack(attend(case, mask, None))
    pools = []
    for pool in (case.k_pool, case.v_pool):
        pool = pool.clone()
        for b, (start, width) in enumerate(zip(STARTS, WIDTHS, strict=True)):
            for position in range(start + width, start + MOST):
                pool[case.table[b, position // 16].long(), position % 16] = float("nan")
        pools.append(pool)
    ragged = replace(case, q=rows.pack(case.q), k_pool=pools[0], v_pool=pools[1])
    return attend(ragged, mask, rows), want


@pytest.mark.covering(0)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("splits", [1, 3])
def test_dense(mask: MaskSpec, splits: int, device: torch.device) -> None:
    case = case_of(2, 64, device)
    got, want = pair(case, mask, lambda *args: dense(*args, splits=splits))
    assert relative_error(got, want.double()) < 2e-6
    reference, _ = pair(case, mask, dense_ref)
    assert relative_error(reference, want.double()) < 2e-6


@pytest.mark.parametrize(
    "mask", [MaskSpec(BLOCK), MaskSpec(BLOCK, 6), MaskSpec(SLIDING_BLOCK, 6)], ids=str
)
def test_blocks_end_with_their_requests_tokens(mask: MaskSpec, device: torch.device) -> None:
    spans = list(zip(STARTS, WIDTHS, strict=True))
    case = make_paged(spans, 4, 2, 64, 16, device=device)
    got = dense(case, mask, rows_of(device), splits=2)
    assert relative_error(got, case.reference(mask)) < 2e-6


@pytest.mark.covering(0)
@pytest.mark.parametrize("mask", [MASKS[2], MASKS[1], MASKS[0]], ids=str)
@pytest.mark.parametrize("splits", [1, 3])
def test_latent(mask: MaskSpec, splits: int, device: torch.device) -> None:
    case = case_of(1, 48, device)
    got, want = pair(case, mask, lambda *args: latent(*args, splits=splits))
    assert relative_error(got, want.double()) < 2e-6
    reference, _ = pair(case, mask, latent_ref)
    assert relative_error(reference, want.double()) < 2e-6


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ctas", "mask"), [*product((1, 3), MASKS)], ids=str)
def test_fixed_order(
    mask: MaskSpec, ctas: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit."""
    for module in (fixed_order, mla_fixed_order):
        monkeypatch.setattr(module, "choose_ctas", lambda *_, **__: ctas)
    got, want = pair(case_of(2, 64, device), mask, in_fixed_order)
    assert torch.equal(got, want)
    got, want = pair(case_of(1, 48, device), mask, latent_in_fixed_order)
    assert torch.equal(got, want)
