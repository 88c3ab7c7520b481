"""Decode attention: kernel and reference against the definition."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from forerun.kernels.attention.decode import (
    BLOCK,
    CAUSAL,
    SLIDING_BLOCK,
    TREE,
    MaskSpec,
    paged_attention,
    paged_attention_ref,
)
from forerun.kernels.attention.paged_kv import PagedKV, compute_kv_slots
from forerun.kernels.attention.tiles import DecodeProblem, TileConfig, choose_num_splits
from forerun.kernels.elementwise.qk_norm_rope import RopePositions, qk_norm_rope_write
from forerun.kernels.runtime.gpu import GpuInfo, gpu_of
from tests.covering import some_of
from tests.kernels.attention_support import (
    Paged,
    make_paged,
    relative_error,
    tree_words,
    with_large_queries,
)

pytest.importorskip("triton")

BOUND = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
MASKS = [
    MaskSpec(CAUSAL),
    MaskSpec(CAUSAL, 5),
    MaskSpec(BLOCK),
    MaskSpec(BLOCK, 6),
    MaskSpec(SLIDING_BLOCK, 3),
    MaskSpec(SLIDING_BLOCK, 20),
    MaskSpec(TREE),
    MaskSpec(TREE, 3),
    MaskSpec(CAUSAL, softcap=0.7),
    MaskSpec(TREE, 6, softcap=2.0),
]


def run(
    case: Paged, mask: MaskSpec, num_splits: int, config: TileConfig | None = None
) -> torch.Tensor:
    q_len = case.spans[0][1]
    return paged_attention(case.q, case.kv, q_len, case.mask(mask), case.scale, num_splits, config)


def reference(case: Paged, mask: MaskSpec) -> torch.Tensor:
    return paged_attention_ref(case.q, case.kv, case.spans[0][1], case.mask(mask), case.scale)


def reference_in_double(case: Paged, mask: MaskSpec) -> torch.Tensor:
    kv = PagedKV(case.k_pool.double(), case.v_pool.double(), case.table, case.start)
    return paged_attention_ref(case.q.double(), kv, case.spans[0][1], case.mask(mask), case.scale)


def spans(starts: list[int], q_len: int) -> list[tuple[int, int]]:
    return [(start, q_len) for start in starts]


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(
    ("page_size", "heads", "kv_heads", "dim", "q_len", "num_splits"),
    [
        (16, 4, 2, 64, 1, 1),
        (16, 4, 2, 64, 5, 3),
        (1, 2, 2, 64, 3, 2),
        (64, 8, 1, 64, 2, 4),
        (256, 6, 2, 80, 3, 1),
        (16, 2, 1, 128, 10, 1),
        (1, 1, 1, 256, 2, 2),
        (32, 4, 1, 512, 3, 2),
        (8, 3, 1, 24, 33, 2),
        (256, 2, 1, 32, 20, 1),
    ],
)
def test_kernel_and_reference_match_the_definition(
    page_size: int,
    heads: int,
    kv_heads: int,
    dim: int,
    q_len: int,
    num_splits: int,
    mask: MaskSpec,
    device: torch.device,
) -> None:
    case = make_paged(
        spans([1, 41], q_len), heads, kv_heads, dim, page_size, device=device, padded=1
    )
    expected = case.reference(mask)
    assert relative_error(run(case, mask, num_splits, TileConfig(16, 16, 4, 1)), expected) < 2e-6
    assert relative_error(reference(case, mask), expected) < 2e-6


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("num_splits", range(1, 9))
def test_splits_do_not_change_the_result(num_splits: int, device: torch.device) -> None:
    """Also with more num_splits than K/V blocks, and with several tiles of rows."""
    case = make_paged(spans([0, 60], 3), 6, 1, 64, 16, device=device)
    mask = MaskSpec(CAUSAL, 20 if num_splits % 3 == 0 else None)
    out = run(case, mask, num_splits, TileConfig(16, 16, 4, 1))
    assert relative_error(out, case.reference(mask)) < 2e-6


@pytest.mark.covering(1)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_sinks(mask: MaskSpec, num_splits: int, device: torch.device) -> None:
    """Small, large and larger than any score; once, however many splits there are."""
    case = make_paged(spans([1, 41, 0], 3), 4, 2, 64, 16, device=device)
    sinks = torch.tensor([-30.0, 0.5, 4.0, 60.0], device=device)
    mask = replace(mask, sinks=sinks)
    expected = case.reference(mask)
    assert relative_error(run(case, mask, num_splits, TileConfig(16, 16, 4, 1)), expected) < 2e-6
    assert relative_error(reference(case, mask), expected) < 2e-6
    without = case.reference(replace(mask, sinks=None))
    assert relative_error(expected[:, 0], without[:, 0]) < 1e-6  # a sink of e^-30
    assert expected[:, 3].abs().max() < 1e-9


def test_default_tiles(device: torch.device) -> None:
    case = make_paged(spans([3, 140], 16), 4, 1, 64, 16, device=device)
    for mask in (MaskSpec(), MaskSpec(BLOCK, 20)):
        assert relative_error(run(case, mask, 2), case.reference(mask)) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16")
    case = make_paged(spans([5, 33], 2), 4, 2, 64, 16, dtype, device=device)
    out = run(case, MaskSpec(), 2)
    assert out.dtype == dtype
    assert relative_error(out, case.reference(MaskSpec())) < BOUND[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_float8_pool(dtype: torch.dtype, device: torch.device) -> None:
    fp8 = torch.float8_e4m3fn
    case = make_paged(spans([5, 33], 2), 4, 2, 64, 16, dtype, fp8, device)
    out = run(case, MaskSpec(), 2)
    assert relative_error(out, case.reference(MaskSpec())) < BOUND[dtype]


@pytest.mark.parametrize("num_splits", [1, 2])
def test_large_queries_over_a_float8_pool(num_splits: int, device: torch.device) -> None:
    """There bfloat16 queries are multiplied in float16, whose largest number is 65504."""
    kinds = torch.bfloat16, torch.float8_e4m3fn
    case = with_large_queries(make_paged(spans([5, 33], 2), 4, 2, 64, 16, *kinds, device))
    out = run(case, MaskSpec(), num_splits)
    assert relative_error(out, case.reference(MaskSpec())) < BOUND[torch.bfloat16]


@pytest.mark.covering(0)
@pytest.mark.parametrize("nodes", some_of([(64,), (65,), (128,), (256,)], 0, 1))
def test_trees_of_several_words(nodes: int, device: torch.device) -> None:
    """The last bit of a word is the sign of an int64."""
    case = make_paged(spans([20], nodes), 2, 1, 16, 16, device=device)
    assert case.tree is not None and bool((case.tree < 0).any())
    assert case.tree.shape == (nodes, -(-nodes // 64))
    wide, tile = MaskSpec(TREE), TileConfig(16, 16, 4, 1)
    assert relative_error(run(case, wide, 2, tile), case.reference(wide)) < 2e-6
    assert relative_error(reference(case, wide), case.reference(wide)) < 2e-6
    assert case.mask(wide).needs_triton is (nodes > 64)
    assert relative_error(run(case, MaskSpec(TREE), 1), case.reference(MaskSpec(TREE))) < 2e-6


@pytest.mark.exhaustive
@pytest.mark.parametrize("window", [1, 5, 63, 64, 80])
@pytest.mark.parametrize("nodes", [64, 150])
def test_windows_of_large_trees(nodes: int, window: int, device: torch.device) -> None:
    """A path of half of them, so that windows end within the tree, at its root and before it."""
    case = make_paged(spans([90], nodes), 2, 1, 16, 16, device=device)
    case.tree = torch.tensor(
        tree_words([max(node - 2, 0) for node in range(1, nodes)]), device=device
    )
    mask = MaskSpec(TREE, window)
    expected = case.reference(mask)
    assert relative_error(run(case, mask, 2, TileConfig(16, 16, 4, 1)), expected) < 2e-6
    assert relative_error(reference(case, mask), expected) < 2e-6


def test_windows_around_tokens_of_blocks_go_to_triton() -> None:
    """The kernels for Hopper would take them for windows before the block."""
    assert MaskSpec(SLIDING_BLOCK, 5).needs_triton
    assert not MaskSpec(BLOCK, 5).needs_triton


def test_splits_fill_the_device_and_no_more(device: torch.device) -> None:
    small = DecodeProblem(
        batch_size=1,
        q_rows=4,
        num_kv_heads=1,
        head_dim=128,
        kv_dtype=torch.bfloat16,
        page_size=16,
        kv_len_ub=4096,
    )
    gpu, large = gpu_of(device), replace(small, batch_size=64, num_kv_heads=8)
    assert choose_num_splits(gpu, large) <= choose_num_splits(gpu, small)
    assert choose_num_splits(gpu, replace(small, kv_len_ub=10)) == 1  # nothing to split


@pytest.mark.parametrize(
    ("batch_size", "splits"), [(1, 20), (4, 8), (8, 4), (16, 2), (25, 2), (32, 1), (64, 1)]
)
def test_splits_on_an_h200(batch_size: int, splits: int) -> None:
    """One token of qwen3-30b-a3b, 4 CTAs a request before splitting: 132 SMs are filled once."""
    problem = DecodeProblem(batch_size, 8, 4, 128, torch.bfloat16, page_size=64, kv_len_ub=2048)
    h200 = GpuInfo(132, amd=False, capability=90)
    assert choose_num_splits(h200, problem) == splits
    long = replace(problem, kv_len_ub=1 << 15)  # fills the SMs
    assert choose_num_splits(h200, long) == max(1, 132 // (4 * batch_size), splits)


# --- real shapes, on a GPU ----------------------------------------------------------------------

QWEN3_8B, PAIR, GEMMA2_9B = (32, 8, 128), (4, 2, 64), (16, 8, 256)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype", "page_size", "mask"),  # six kernels each to be compiled: no full product
    [
        *((QWEN3_8B, dtype, 16, MaskSpec()) for dtype in BOUND),
        *((PAIR, torch.bfloat16, 16, mask) for mask in (MaskSpec(), MaskSpec(TREE))),
        (QWEN3_8B, torch.bfloat16, 16, MaskSpec(CAUSAL, 300)),
        (QWEN3_8B, torch.bfloat16, 16, MaskSpec(BLOCK)),
        (QWEN3_8B, torch.bfloat16, 16, MaskSpec(TREE)),
        (QWEN3_8B, torch.bfloat16, 1, MaskSpec()),
        (QWEN3_8B, torch.bfloat16, 64, MaskSpec()),
        (QWEN3_8B, torch.bfloat16, 64, MaskSpec(TREE)),
        (QWEN3_8B, torch.bfloat16, 64, MaskSpec(CAUSAL, 300)),
        (QWEN3_8B, torch.float32, 64, MaskSpec(BLOCK)),
        (PAIR, torch.float16, 128, MaskSpec()),
        (QWEN3_8B, torch.bfloat16, 256, MaskSpec(BLOCK, 500)),
        (QWEN3_8B, torch.bfloat16, 64, MaskSpec(SLIDING_BLOCK, 300)),
        (PAIR, torch.bfloat16, 16, MaskSpec(SLIDING_BLOCK, 7)),
        (QWEN3_8B, torch.bfloat16, 64, MaskSpec(TREE, 300)),
        (PAIR, torch.bfloat16, 16, MaskSpec(TREE, 7)),
        (GEMMA2_9B, torch.bfloat16, 32, MaskSpec(softcap=2.0)),
        (GEMMA2_9B, torch.float16, 16, MaskSpec(CAUSAL, 300, softcap=2.0)),
    ],
    ids=str,
)
def test_on_gpu(
    shape: tuple[int, int, int], dtype: torch.dtype, page_size: int, mask: MaskSpec
) -> None:
    for q_len, starts in ((1, [0, 1023, 2000]), (16, [0, 511, 1500]), (64, [100])):
        case = make_paged(spans(starts, q_len), *shape, page_size, dtype, device="cuda", padded=1)
        expected = reference_in_double(case, mask)
        for num_splits in (1, 7, 32):
            assert relative_error(run(case, mask, num_splits), expected) < BOUND[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
def test_float8_on_gpu(dtype: torch.dtype) -> None:
    fp8 = torch.float8_e4m3fn
    case = make_paged(spans([0, 1023, 2000], 16), *QWEN3_8B, 16, dtype, fp8, "cuda")
    expected = reference_in_double(case, MaskSpec())
    assert relative_error(run(case, MaskSpec(), 4), expected) < BOUND[dtype]


@pytest.mark.gpu
def test_offsets_past_32_bits() -> None:
    """A pool of more than 2^31 elements, the requests' pages at its end."""
    case = make_paged(spans([40, 300], 16), *QWEN3_8B, 16, torch.bfloat16, device="cuda")
    expected = case.reference(MaskSpec())
    small, pages = case.k_pool.shape[0], (1 << 31) // case.k_pool[0].numel() + 1
    pools = torch.empty(2, pages, *case.k_pool.shape[1:], dtype=torch.bfloat16, device="cuda")
    pools[0, -small:], pools[1, -small:] = case.k_pool, case.v_pool
    case.k_pool, case.v_pool = pools.unbind(0)
    case.table += pages - small
    assert relative_error(run(case, MaskSpec(), 3), expected) < BOUND[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_after_the_kernel_that_writes(page_size: int, num_splits: int) -> None:
    """Its launch overlaps: K/V of the query tokens that was read too early would be NaN."""
    q_len, layers = 16, 12
    heads, kv_heads, dim = QWEN3_8B
    for starts in ([0, 3, 47, 48, 63, 64, 200], [1000, 1023, 2000]):
        make = partial(make_paged, spans(starts, q_len), *QWEN3_8B, page_size, torch.bfloat16)
        cases = [make(device="cuda") for _ in range(layers)]
        table, start = cases[0].table, cases[0].start  # all have these
        kv_slots = compute_kv_slots(table, start, None, q_len, len(starts) * q_len, page_size)
        position = (start[:, None] + torch.arange(q_len, device="cuda")).flatten().int()
        rope = torch.ones(max(starts) + q_len, 2, 1, dim, device="cuda", dtype=torch.bfloat16)
        rope[:, 1] = 0  # the identity
        qkv = torch.randn(len(kv_slots), (heads + 2 * kv_heads) * dim, device="cuda").bfloat16()

        def step(case: Paged) -> torch.Tensor:
            at = RopePositions(rope, position)  # noqa: B023
            target = (kv_slots, case.k_pool, case.v_pool)  # noqa: B023
            case.q = qk_norm_rope_write(qkv, heads, None, at, *target)  # noqa: B023
            return run(case, MaskSpec(), num_splits)

        step(cases[0])  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [step(case) for case in cases]
        for case in cases:
            for pool in (case.k_pool, case.v_pool):
                pool.flatten(0, 1)[kv_slots] = float("nan")
        graph.replay()
        for case, out in zip(cases, outs, strict=True):
            assert relative_error(out, case.reference(MaskSpec())) < BOUND[torch.bfloat16]
