"""Prefill attention: kernel and reference against the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from forerun.kernels.attention.decode import BLOCK, CAUSAL, SLIDING_BLOCK, MaskSpec
from forerun.kernels.attention.paged_kv import PagedKV
from forerun.kernels.attention.prefill import prefill_attention, prefill_attention_ref
from forerun.kernels.attention.tile_map import build_tile_map
from forerun.kernels.attention.tiles import TileConfig, prefill_tile_config
from forerun.kernels.runtime.gpu import gpu_of
from tests.kernels.attention_support import (
    Paged,
    make_paged,
    relative_error,
    with_large_queries,
)

pytest.importorskip("triton")

BOUND = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def run(case: Paged, mask: MaskSpec, config: TileConfig | None = None) -> torch.Tensor:
    """By the Triton kernel, on Hopper too."""
    device, dim = case.q.device, case.q.shape[2]
    config = config or prefill_tile_config(gpu_of(device), dim, case.q.dtype)
    tokens_per_tile = config.block_m * case.k_pool.shape[2] // case.q.shape[1]
    tile_map = build_tile_map(case.spans, tokens_per_tile, lambda host: host.to(device))
    return prefill_attention(case.q, case.kv, case.spans, tile_map, mask, case.scale, config)


def reference(case: Paged, mask: MaskSpec) -> torch.Tensor:
    return prefill_attention_ref(case.q, case.kv, case.spans, mask, case.scale)


MASKS = [
    MaskSpec(CAUSAL),
    MaskSpec(CAUSAL, 7),
    MaskSpec(CAUSAL, 40),
    MaskSpec(BLOCK),
    MaskSpec(BLOCK, 9),
    MaskSpec(SLIDING_BLOCK, 3),
    MaskSpec(SLIDING_BLOCK, 40),
    MaskSpec(CAUSAL, 40, softcap=0.7),
]


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize(
    ("page_size", "heads", "kv_heads", "dim", "mask"),
    [
        *((16, 4, 2, 64, mask) for mask in MASKS),
        (1, 2, 2, 64, MaskSpec(CAUSAL, 7)),
        (64, 8, 1, 80, MaskSpec(CAUSAL)),
        (256, 3, 1, 128, MaskSpec(BLOCK, 9)),
        (16, 1, 1, 256, MaskSpec(CAUSAL)),
        (32, 2, 1, 512, MaskSpec(CAUSAL)),
    ],
)
def test_kernel_and_reference_match_the_definition(
    page_size: int, heads: int, kv_heads: int, dim: int, mask: MaskSpec, device: torch.device
) -> None:
    spans = [(0, 1), (0, 25), (47, 6)]
    case = make_paged(spans, heads, kv_heads, dim, page_size, device=device)
    expected = case.reference(mask)
    assert relative_error(run(case, mask, TileConfig(16, 16, 4, 1)), expected) < 2e-6
    assert relative_error(reference(case, mask), expected) < 2e-6


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_sinks(mask: MaskSpec, device: torch.device) -> None:
    case = make_paged([(0, 1), (0, 25), (47, 6)], 4, 2, 64, 16, device=device)
    mask = replace(mask, sinks=torch.tensor([-30.0, 0.5, 4.0, 60.0], device=device))
    expected = case.reference(mask)
    assert relative_error(run(case, mask, TileConfig(16, 16, 4, 1)), expected) < 2e-6
    assert relative_error(reference(case, mask), expected) < 2e-6


def test_default_tiles_and_half_precision(device: torch.device) -> None:
    case = make_paged([(0, 37), (33, 5)], 4, 2, 64, 16, torch.float16, device=device)
    assert relative_error(run(case, MaskSpec()), case.reference(MaskSpec())) < BOUND[torch.float16]


def test_float8_pool(device: torch.device) -> None:
    case = make_paged([(9, 20)], 2, 1, 64, 16, kv_dtype=torch.float8_e4m3fn, device=device)
    assert relative_error(run(case, MaskSpec()), case.reference(MaskSpec())) < 2e-6


def test_large_queries_over_a_float8_pool(device: torch.device) -> None:
    kinds = torch.bfloat16, torch.float8_e4m3fn
    case = with_large_queries(make_paged([(9, 20)], 2, 1, 64, 16, *kinds, device))
    assert relative_error(run(case, MaskSpec()), case.reference(MaskSpec())) < BOUND[torch.bfloat16]


def test_a_tile_must_hold_all_heads_of_a_group(device: torch.device) -> None:
    case = make_paged([(0, 3)], 32, 1, 64, 16, device=device)
    tile_map = build_tile_map(case.spans, 1, lambda host: host.to(device))
    args = (case.q, case.kv, case.spans, tile_map)
    with pytest.raises(AssertionError, match="no room"):
        prefill_attention(*args, MaskSpec(), case.scale, TileConfig(16, 16, 4, 1))


def test_tiles_cover_every_token_once_long_requests_first() -> None:
    spans = [(0, 5), (100, 1), (7, 12), (0, 4)]
    entries = build_tile_map(spans, 4, lambda host: host).entries.tolist()
    begins = [0, 5, 6, 18]
    covered = sorted(
        begin + first + i
        for request, begin, count, first in entries
        for i in range(min(4, count - first))
    )
    assert covered == list(range(22))
    assert all(begin == begins[r] and count == spans[r][1] for r, begin, count, _ in entries)
    assert [r for r, *_ in entries] == [1, 2, 2, 2, 0, 0, 3]  # by their ends: 101, 19, 5, 4
    assert [first for r, _, _, first in entries if r == 2] == [8, 4, 0]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("page_size", "mask"),
    [
        (16, MaskSpec()),
        (1, MaskSpec(CAUSAL, 300)),
        (64, MaskSpec()),
        (256, MaskSpec(BLOCK)),
        (64, MaskSpec(SLIDING_BLOCK, 300)),
        (64, MaskSpec(CAUSAL, 300, softcap=2.0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
@pytest.mark.parametrize("shape", [(32, 8, 128), (4, 2, 64)], ids=["qwen3-8b", "pair"])
def test_on_gpu(
    shape: tuple[int, int, int], dtype: torch.dtype, page_size: int, mask: MaskSpec
) -> None:
    spans = [(0, 700), (0, 1), (1000, 130), (64, 64)]
    case = make_paged(spans, *shape, page_size, dtype, device="cuda")
    kv = PagedKV(case.k_pool.double(), case.v_pool.double(), case.table, case.start)
    expected = prefill_attention_ref(case.q.double(), kv, spans, mask, case.scale)
    assert relative_error(run(case, mask), expected) < BOUND[dtype]
