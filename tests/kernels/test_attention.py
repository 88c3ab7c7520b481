"""Short query blocks: kernel == twin == the definition."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from forerun.kernels.attention import (
    BLOCK,
    CAUSAL,
    TREE,
    Sight,
    paged_attention,
    paged_attention_torch,
)
from forerun.kernels.attention_tiles import Tiles, choose_splits
from forerun.kernels.paged import pool_rows
from forerun.kernels.qkv import qk_norm_rope_write
from tests.kernels.attention_support import (
    Paged,
    make_paged,
    relative_error,
    with_large_queries,
)

pytest.importorskip("triton")

BOUND = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SIGHTS = [Sight(CAUSAL), Sight(CAUSAL, 5), Sight(BLOCK), Sight(BLOCK, 6), Sight(TREE)]


def run(case: Paged, sight: Sight, splits: int, tiles: Tiles | None = None) -> torch.Tensor:
    return paged_attention(
        case.q,
        case.k_pool,
        case.v_pool,
        case.table,
        case.start,
        case.spans[0][1],
        sight,
        case.scale,
        splits,
        case.tree,
        tiles,
    )


def twin(case: Paged, sight: Sight) -> torch.Tensor:
    args = (case.q, case.k_pool, case.v_pool, case.table, case.start)
    return paged_attention_torch(*args, case.spans[0][1], sight, case.scale, case.tree)


def spans(starts: list[int], width: int) -> list[tuple[int, int]]:
    return [(start, width) for start in starts]


@pytest.mark.parametrize("sight", SIGHTS, ids=str)
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
    sight: Sight,
    device: torch.device,
) -> None:
    case = make_paged(spans([1, 41], width), heads, kv_heads, dim, page, device=device, padded=1)
    expected = case.reference(sight)
    assert relative_error(run(case, sight, splits, Tiles(16, 16, 4, 1)), expected) < 2e-6
    assert relative_error(twin(case, sight), expected) < 2e-6


@pytest.mark.parametrize("splits", range(1, 9))
def test_splits_change_nothing(splits: int, device: torch.device) -> None:
    """Also where there are more splits than blocks, and with several tiles of rows."""
    case = make_paged(spans([0, 60], 3), 6, 1, 64, 16, device=device)
    sight = Sight(CAUSAL, 20 if splits % 3 == 0 else None)
    out = run(case, sight, splits, Tiles(16, 16, 4, 1))
    assert relative_error(out, case.reference(sight)) < 2e-6


def test_default_tiles(device: torch.device) -> None:
    case = make_paged(spans([3, 140], 16), 4, 1, 64, 16, device=device)
    for sight in (Sight(), Sight(BLOCK, 20)):
        assert relative_error(run(case, sight, 2), case.reference(sight)) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16")
    case = make_paged(spans([5, 33], 2), 4, 2, 64, 16, dtype, device=device)
    out = run(case, Sight(), 2)
    assert out.dtype == dtype
    assert relative_error(out, case.reference(Sight())) < BOUND[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_float8_pool(dtype: torch.dtype, device: torch.device) -> None:
    fp8 = torch.float8_e4m3fn
    case = make_paged(spans([5, 33], 2), 4, 2, 64, 16, dtype, fp8, device)
    out = run(case, Sight(), 2)
    assert relative_error(out, case.reference(Sight())) < BOUND[dtype]


@pytest.mark.parametrize("splits", [1, 2])
def test_large_queries_over_a_float8_pool(splits: int, device: torch.device) -> None:
    """bfloat16 rows are multiplied in float16 there, whose largest number is 65504."""
    kinds = torch.bfloat16, torch.float8_e4m3fn
    case = with_large_queries(make_paged(spans([5, 33], 2), 4, 2, 64, 16, *kinds, device))
    out = run(case, Sight(), splits)
    assert relative_error(out, case.reference(Sight())) < BOUND[torch.bfloat16]


def test_a_tree_of_64_rows(device: torch.device) -> None:
    """Bit 63 is the sign of an int64."""
    case = make_paged(spans([20], 64), 2, 1, 64, 16, device=device)
    assert case.tree is not None and bool((case.tree < 0).any())
    assert relative_error(run(case, Sight(TREE), 1), case.reference(Sight(TREE))) < 2e-6


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
    ("shape", "dtype", "page", "sight"),  # six kernels each to be compiled: no full product
    [
        *((QWEN3_8B, dtype, 16, Sight()) for dtype in BOUND),
        *((PAIR, torch.bfloat16, 16, sight) for sight in (Sight(), Sight(TREE))),
        (QWEN3_8B, torch.bfloat16, 16, Sight(CAUSAL, 300)),
        (QWEN3_8B, torch.bfloat16, 16, Sight(BLOCK)),
        (QWEN3_8B, torch.bfloat16, 16, Sight(TREE)),
        (QWEN3_8B, torch.bfloat16, 1, Sight()),
        (QWEN3_8B, torch.bfloat16, 64, Sight()),
        (QWEN3_8B, torch.bfloat16, 64, Sight(TREE)),
        (QWEN3_8B, torch.bfloat16, 64, Sight(CAUSAL, 300)),
        (QWEN3_8B, torch.float32, 64, Sight(BLOCK)),
        (PAIR, torch.float16, 128, Sight()),
        (QWEN3_8B, torch.bfloat16, 256, Sight(BLOCK, 500)),
    ],
    ids=str,
)
def test_on_gpu(shape: tuple[int, int, int], dtype: torch.dtype, page: int, sight: Sight) -> None:
    for width, starts in ((1, [0, 1023, 2000]), (16, [0, 511, 1500]), (64, [100])):
        case = make_paged(spans(starts, width), *shape, page, dtype, device="cuda", padded=1)
        expected = paged_attention_torch(
            case.q.double(),
            case.k_pool.double(),
            case.v_pool.double(),
            case.table,
            case.start,
            width,
            sight,
            case.scale,
            case.tree,
        )
        for splits in (1, 7, 32):
            assert relative_error(run(case, sight, splits), expected) < BOUND[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
def test_float8_on_gpu(dtype: torch.dtype) -> None:
    fp8 = torch.float8_e4m3fn
    case = make_paged(spans([0, 1023, 2000], 16), *QWEN3_8B, 16, dtype, fp8, "cuda")
    wide = (case.q.double(), case.k_pool.double(), case.v_pool.double())
    expected = paged_attention_torch(*wide, case.table, case.start, 16, Sight(), case.scale)
    assert relative_error(run(case, Sight(), 4), expected) < BOUND[dtype]


@pytest.mark.gpu
def test_places_past_32_bits() -> None:
    """A pool of more than 2^31 elements, the requests' pages at its end."""
    case = make_paged(spans([40, 300], 16), *QWEN3_8B, 16, torch.bfloat16, device="cuda")
    expected = case.reference(Sight())
    small, pages = case.k_pool.shape[0], (1 << 31) // case.k_pool[0].numel() + 1
    pools = torch.empty(2, pages, *case.k_pool.shape[1:], dtype=torch.bfloat16, device="cuda")
    pools[0, -small:], pools[1, -small:] = case.k_pool, case.v_pool
    case.k_pool, case.v_pool = pools.unbind(0)
    case.table += pages - small
    assert relative_error(run(case, Sight(), 3), expected) < BOUND[torch.bfloat16]


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
        rows = pool_rows(table, start, None, width, len(starts) * width, page)
        position = (start[:, None] + torch.arange(width, device="cuda")).flatten().int()
        rope = torch.ones(max(starts) + width, 2, 1, dim, device="cuda", dtype=torch.bfloat16)
        rope[:, 1] = 0  # by no angle
        qkv = torch.randn(len(rows), (heads + 2 * kv_heads) * dim, device="cuda").bfloat16()

        def step(case: Paged) -> torch.Tensor:
            args = (rope, position, rows, case.k_pool, case.v_pool)  # noqa: B023
            case.q = qk_norm_rope_write(qkv, heads, None, *args)  # noqa: B023
            return run(case, Sight(), splits)

        step(cases[0])  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [step(case) for case in cases]
        for case in cases:
            for pool in (case.k_pool, case.v_pool):
                pool.flatten(0, 1)[rows] = float("nan")
        graph.replay()
        for case, out in zip(cases, outs, strict=True):
            assert relative_error(out, case.reference(Sight())) < BOUND[torch.bfloat16]
