"""Short query blocks: kernel == twin == the definition."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from forerun.kernels.attention.decode import (
    BLOCK,
    CAUSAL,
    TREE,
    MaskSpec,
    paged_attention,
    paged_attention_ref,
)
from forerun.kernels.attention.paged_kv import compute_kv_slots
from forerun.kernels.attention.tiles import Tiles, choose_splits
from forerun.kernels.elementwise.qk_norm_rope import qk_norm_rope_write
from tests.kernels.attention_support import (
    Paged,
    make_paged,
    relative_error,
    with_large_queries,
)

pytest.importorskip("triton")

BOUND = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SIGHTS = [
    MaskSpec(CAUSAL),
    MaskSpec(CAUSAL, 5),
    MaskSpec(BLOCK),
    MaskSpec(BLOCK, 6),
    MaskSpec(TREE),
]


def run(case: Paged, mask_spec: MaskSpec, splits: int, tiles: Tiles | None = None) -> torch.Tensor:
    return paged_attention(
        case.q,
        case.k_pool,
        case.v_pool,
        case.table,
        case.start,
        case.spans[0][1],
        mask_spec,
        case.scale,
        splits,
        case.tree,
        tiles,
    )


def twin(case: Paged, mask_spec: MaskSpec) -> torch.Tensor:
    args = (case.q, case.k_pool, case.v_pool, case.table, case.start)
    return paged_attention_ref(*args, case.spans[0][1], mask_spec, case.scale, case.tree)


def spans(starts: list[int], width: int) -> list[tuple[int, int]]:
    return [(start, width) for start in starts]


@pytest.mark.parametrize("mask_spec", SIGHTS, ids=str)
@pytest.mark.parametrize(
    ("page", "heads", "kv_heads", "dim", "width", "splits"),
    [
        (16, 4, 2, 64, 1, 1),
        (16, 4, 2, 64, 5, 3),
        (1, 2, 2, 64, 3, 2),
        (64, 8, 1, 64, 2, 4),
        (256, 6, 2, 80, 3, 1),
        (16, 2, 1, 128, 10, 1),
        (1, 1, 1, 256, 2, 2),
        (8, 3, 1, 24, 33, 2),
        (256, 2, 1, 32, 20, 1),
    ],
)
def test_kernel_is_the_definition(
    page: int,
    heads: int,
    kv_heads: int,
    dim: int,
    width: int,
    splits: int,
    mask_spec: MaskSpec,
    device: torch.device,
) -> None:
    case = make_paged(spans([1, 41], width), heads, kv_heads, dim, page, device=device, padded=1)
    expected = case.reference(mask_spec)
    assert relative_error(run(case, mask_spec, splits, Tiles(16, 16, 4, 1)), expected) < 2e-6
    assert relative_error(twin(case, mask_spec), expected) < 2e-6


@pytest.mark.parametrize("splits", range(1, 9))
def test_splits_change_nothing(splits: int, device: torch.device) -> None:
    """Also where there are more splits than blocks, and with several tiles of rows."""
    case = make_paged(spans([0, 60], 3), 6, 1, 64, 16, device=device)
    mask_spec = MaskSpec(CAUSAL, 20 if splits % 3 == 0 else None)
    out = run(case, mask_spec, splits, Tiles(16, 16, 4, 1))
    assert relative_error(out, case.reference(mask_spec)) < 2e-6


def test_default_tiles(device: torch.device) -> None:
    case = make_paged(spans([3, 140], 16), 4, 1, 64, 16, device=device)
    for mask_spec in (MaskSpec(), MaskSpec(BLOCK, 20)):
        assert relative_error(run(case, mask_spec, 2), case.reference(mask_spec)) < 2e-6


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


@pytest.mark.parametrize("splits", [1, 2])
def test_large_queries_over_a_float8_pool(splits: int, device: torch.device) -> None:
    """bfloat16 rows are multiplied in float16 there, whose largest number is 65504."""
    kinds = torch.bfloat16, torch.float8_e4m3fn
    case = with_large_queries(make_paged(spans([5, 33], 2), 4, 2, 64, 16, *kinds, device))
    out = run(case, MaskSpec(), splits)
    assert relative_error(out, case.reference(MaskSpec())) < BOUND[torch.bfloat16]


def test_a_tree_of_64_rows(device: torch.device) -> None:
    """Bit 63 is the sign of an int64."""
    case = make_paged(spans([20], 64), 2, 1, 64, 16, device=device)
    assert case.tree is not None and bool((case.tree < 0).any())
    assert relative_error(run(case, MaskSpec(TREE), 1), case.reference(MaskSpec(TREE))) < 2e-6


def test_splits_fill_the_device_and_no_more(device: torch.device) -> None:
    pool = (128, torch.bfloat16, 16)
    few = choose_splits(device, 64, 4, 8, 4096, *pool)
    many = choose_splits(device, 1, 4, 1, 4096, *pool)
    assert few <= many
    assert choose_splits(device, 1, 4, 1, 10, *pool) == 1  # nothing to cut


# --- real shapes, on a GPU ----------------------------------------------------------------------

QWEN3_8B, PAIR = (32, 8, 128), (4, 2, 64)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype", "page", "mask_spec"),  # six kernels each to be compiled: no full product
    [
        *((QWEN3_8B, dtype, 16, MaskSpec()) for dtype in BOUND),
        *((PAIR, torch.bfloat16, 16, mask_spec) for mask_spec in (MaskSpec(), MaskSpec(TREE))),
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
    ],
    ids=str,
)
def test_on_gpu(
    shape: tuple[int, int, int], dtype: torch.dtype, page: int, mask_spec: MaskSpec
) -> None:
    for width, starts in ((1, [0, 1023, 2000]), (16, [0, 511, 1500]), (64, [100])):
        case = make_paged(spans(starts, width), *shape, page, dtype, device="cuda", padded=1)
        expected = paged_attention_ref(
            case.q.double(),
            case.k_pool.double(),
            case.v_pool.double(),
            case.table,
            case.start,
            width,
            mask_spec,
            case.scale,
            case.tree,
        )
        for splits in (1, 7, 32):
            assert relative_error(run(case, mask_spec, splits), expected) < BOUND[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
def test_float8_on_gpu(dtype: torch.dtype) -> None:
    fp8 = torch.float8_e4m3fn
    case = make_paged(spans([0, 1023, 2000], 16), *QWEN3_8B, 16, dtype, fp8, "cuda")
    wide = (case.q.double(), case.k_pool.double(), case.v_pool.double())
    expected = paged_attention_ref(*wide, case.table, case.start, 16, MaskSpec(), case.scale)
    assert relative_error(run(case, MaskSpec(), 4), expected) < BOUND[dtype]


@pytest.mark.gpu
def test_places_past_32_bits() -> None:
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
@pytest.mark.parametrize("page", [16, 64, 128])
@pytest.mark.parametrize("splits", [1, 3])
def test_behind_the_kernel_that_writes(page: int, splits: int) -> None:
    """Its launch overlaps: rows of the block that were read too early would be no numbers."""
    width, layers = 16, 12
    heads, kv_heads, dim = QWEN3_8B
    for starts in ([0, 3, 47, 48, 63, 64, 200], [1000, 1023, 2000]):
        make = partial(make_paged, spans(starts, width), *QWEN3_8B, page, torch.bfloat16)
        cases = [make(device="cuda") for _ in range(layers)]
        table, start = cases[0].table, cases[0].start  # all have these
        rows = compute_kv_slots(table, start, None, width, len(starts) * width, page)
        position = (start[:, None] + torch.arange(width, device="cuda")).flatten().int()
        rope = torch.ones(max(starts) + width, 2, 1, dim, device="cuda", dtype=torch.bfloat16)
        rope[:, 1] = 0  # by no angle
        qkv = torch.randn(len(rows), (heads + 2 * kv_heads) * dim, device="cuda").bfloat16()

        def step(case: Paged) -> torch.Tensor:
            args = (rope, position, rows, case.k_pool, case.v_pool)  # noqa: B023
            case.q = qk_norm_rope_write(qkv, heads, None, *args)  # noqa: B023
            return run(case, MaskSpec(), splits)

        step(cases[0])  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [step(case) for case in cases]
        for case in cases:
            for pool in (case.k_pool, case.v_pool):
                pool.flatten(0, 1)[rows] = float("nan")
        graph.replay()
        for case, out in zip(cases, outs, strict=True):
            assert relative_error(out, case.reference(MaskSpec())) < BOUND[torch.bfloat16]
