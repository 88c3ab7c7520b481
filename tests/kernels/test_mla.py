"""Attention over latent rows (MLA, absorbed): kernel and reference against the definition."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from forerun.kernels.attention import mla_sm90
from forerun.kernels.attention.decode import BLOCK, CAUSAL, TREE, MaskSpec
from forerun.kernels.attention.mla_absorbed import (
    PagedLatent,
    build_row_tile_map,
    mla_decode,
    mla_decode_ref,
    mla_prefill,
    mla_prefill_ref,
)
from forerun.kernels.attention.mla_expanded import (
    ExpandedKV,
    expanded_attention,
    expanded_attention_ref,
    split_dim,
)
from forerun.kernels.attention.mla_sm90 import MlaArguments
from forerun.kernels.attention.mla_write import write_latent
from forerun.kernels.attention.tile_map import build_tile_map
from forerun.kernels.attention.tiles import (
    LatentShape,
    TileConfig,
    choose_mla_splits,
    expanded_tile_config,
    mla_prefill_tile_rows,
    mla_tile_config,
    mla_uses_tma,
    why_not_mla_sm90,
)
from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import GpuInfo, gpu_of
from tests.covering import covering_cells
from tests.kernels.attention_support import (
    Paged,
    make_paged,
    relative_error,
    with_large_queries,
)

pytest.importorskip("triton")

BOUND = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
MASKS = [
    MaskSpec(CAUSAL),
    MaskSpec(CAUSAL, 5),
    MaskSpec(BLOCK),
    MaskSpec(BLOCK, 6),
    MaskSpec(TREE),
]
SMALL = TileConfig(16, 16, 4, 1)
HOPPER = GpuInfo(132, amd=False)
DEEPSEEK = LatentShape(512, 64, torch.bfloat16, torch.bfloat16, 64)


def make(
    spans: list[tuple[int, int]],
    heads: int,
    dims: tuple[int, int],
    page: int,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    padded: int = 0,
) -> tuple[Paged, PagedLatent]:
    """Random requests whose K is a row of dims (Dl, Dr), and V the same row."""
    case = make_paged(spans, heads, 1, sum(dims), page, dtype, kv_dtype, device, padded=padded)
    case = replace(case, v_pool=case.k_pool)
    return case, PagedLatent(case.k_pool.squeeze(2), dims[0], case.table, case.start)


def decode(
    case: Paged,
    cache: PagedLatent,
    mask: MaskSpec,
    num_splits: int,
    config: TileConfig | None = None,
) -> torch.Tensor:
    q_len = case.spans[0][1]
    return mla_decode(case.q, cache, q_len, case.mask(mask), case.scale, num_splits, config)


def prefill(
    case: Paged, cache: PagedLatent, mask: MaskSpec, config: TileConfig | None = None
) -> torch.Tensor:
    shape, gpu = cache.shape(case.q.dtype), gpu_of(case.q.device)
    tile_rows = config.block_m if config else mla_prefill_tile_rows(gpu, shape)
    tiles = build_row_tile_map(
        case.spans, case.q.shape[1], tile_rows, lambda host: host.to(case.q.device)
    )
    return mla_prefill(case.q, cache, case.spans, tiles, mask, case.scale, config)


def expected(case: Paged, cache: PagedLatent, mask: MaskSpec) -> torch.Tensor:
    return case.reference(case.mask(mask))[..., : cache.latent_dim]


@pytest.mark.covering(0, 2)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(
    ("page", "heads", "dims", "q_len", "num_splits"),
    [
        (16, 16, (32, 16), 1, 1),
        (1, 4, (32, 16), 5, 3),
        (64, 3, (24, 8), 4, 2),
        (16, 2, (48, 16), 16, 4),
        (128, 32, (128, 32), 2, 1),
    ],
)
def test_decode_matches_the_definition(
    page: int,
    heads: int,
    dims: tuple[int, int],
    q_len: int,
    num_splits: int,
    mask: MaskSpec,
    device: torch.device,
) -> None:
    """Ragged lengths and a padding slot, with tiles of part of a token's heads and of several."""
    case, cache = make([(1, q_len), (41, q_len)], heads, dims, page, device=device, padded=1)
    right = expected(case, cache, mask)
    assert relative_error(decode(case, cache, mask, num_splits, SMALL), right) < 2e-6
    plain = mla_decode_ref(case.q, cache, q_len, case.mask(mask), case.scale)
    assert relative_error(plain, right) < 2e-6


@pytest.mark.parametrize("num_splits", [2, 5, 8])
def test_partial_results_are_combined_in_parts(num_splits: int, device: torch.device) -> None:
    """A latent of 256 values is two heads of 128 to the kernel that combines splits."""
    case, cache = make([(0, 2), (70, 2)], 4, (256, 64), 16, device=device)
    out = decode(case, cache, MaskSpec(), num_splits, SMALL)
    assert relative_error(out, expected(case, cache, MaskSpec())) < 2e-6


@pytest.mark.parametrize(
    ("page", "heads", "mask"),
    [(1, 3, MASKS[0]), (16, 8, MASKS[1]), (16, 3, MASKS[2]), (1, 8, MASKS[3]), (64, 24, MASKS[0])],
    ids=str,
)
def test_prefill_matches_the_definition(
    page: int, heads: int, mask: MaskSpec, device: torch.device
) -> None:
    case, cache = make([(0, 7), (37, 1), (5, 11)], heads, (32, 16), page, device=device)
    right = expected(case, cache, mask)
    assert relative_error(prefill(case, cache, mask, SMALL), right) < 2e-6
    plain = mla_prefill_ref(case.q, cache, case.spans, mask, case.scale)
    assert relative_error(plain, right) < 2e-6


def test_default_tiles(device: torch.device) -> None:
    """Of decode with 1 and 5 tokens, and of prefill."""
    for q_len in (1, 5):
        case, cache = make([(3, q_len), (70, q_len)], 16, (64, 16), 64, device=device)
        out = decode(case, cache, MaskSpec(), 2)
        assert relative_error(out, expected(case, cache, MaskSpec())) < 2e-6
        out = prefill(case, cache, MaskSpec())
        assert relative_error(out, expected(case, cache, MaskSpec())) < 2e-6


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.float8_e4m3fn])
def test_half_precision(kv_dtype: torch.dtype, device: torch.device) -> None:
    half = torch.float16
    case, cache = make([(5, 2), (33, 2)], 4, (64, 16), 16, half, kv_dtype, device)
    out = decode(case, cache, MaskSpec(), 2)
    assert out.dtype == half
    assert relative_error(out, expected(case, cache, MaskSpec())) < BOUND[half]


def test_large_queries_over_a_float8_pool(device: torch.device) -> None:
    kinds = torch.bfloat16, torch.float8_e4m3fn
    case, cache = make([(5, 2), (33, 2)], 4, (64, 16), 16, *kinds, device)
    case = with_large_queries(case)
    out = decode(case, cache, MaskSpec(), 2)
    assert relative_error(out, expected(case, cache, MaskSpec())) < BOUND[torch.bfloat16]


def test_splits_fill_the_device_and_no_more() -> None:
    def splits(batch: int, q_len: int, context: int) -> int:
        return choose_mla_splits(HOPPER, 16 * q_len, DEEPSEEK, batch, context)

    assert splits(32, 16, 32768) == 1  # 128 tiles of 64 rows for 132 SMs
    assert splits(32, 1, 32768) == 4
    assert splits(1, 1, 1024) == 16  # a block each
    assert splits(1, 16, 1024) == 8
    assert splits(1, 1, 1 << 20) == 64


def test_tiles_of_deepseek_on_hopper() -> None:
    """Two blocks in flight; pages of 64 positions come by TMA."""
    assert mla_tile_config(HOPPER, 16, DEEPSEEK) == TileConfig(16, 64, 8, 3)
    assert mla_tile_config(HOPPER, 80, DEEPSEEK) == TileConfig(64, 64, 8, 2)
    assert mla_uses_tma(HOPPER, DEEPSEEK, 64)
    assert not mla_uses_tma(HOPPER, replace(DEEPSEEK, page_size=16), 64)
    assert not mla_uses_tma(HOPPER, replace(DEEPSEEK, rope_dim=24), 64)


@pytest.mark.parametrize(
    ("gpu", "rows", "shape", "reason"),
    [
        (HOPPER, 17, DEEPSEEK, None),
        (HOPPER, 16, DEEPSEEK, "up to 16 rows"),
        (replace(HOPPER, capability=100), 80, DEEPSEEK, "Hopper"),
        (replace(HOPPER, amd=True), 80, DEEPSEEK, "Hopper"),
        (HOPPER, 80, replace(DEEPSEEK, page_size=128), "pages have 128"),
        (HOPPER, 80, replace(DEEPSEEK, dtype=torch.float16), "float16 over"),
        (HOPPER, 80, replace(DEEPSEEK, kv_dtype=torch.float8_e4m3fn), "over torch.float8"),
        (HOPPER, 80, replace(DEEPSEEK, latent_dim=256), r"\(256, 64\) values"),
    ],
)
def test_what_hoppers_kernel_serves(
    gpu: GpuInfo,
    rows: int,
    shape: LatentShape,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvrtc, "available", lambda: True)
    said = why_not_mla_sm90(gpu, rows, shape)
    assert (said is None) if reason is None else re.search(reason, said or "")
    for tile_rows in {mla_prefill_tile_rows(gpu, shape)} if rows > 16 else ():
        assert (tile_rows == 128) == (reason is None)
    monkeypatch.setattr(nvrtc, "available", lambda: False)
    assert why_not_mla_sm90(gpu, rows, shape) is not None


# --- the write ----------------------------------------------------------------------------------


def test_rows_are_stored_as_they_are(device: torch.device) -> None:
    rows, kv_slots = torch.randn(3, 40, device=device)[:, :32], torch.tensor([5, 1, 9]).to(device)
    pool = torch.zeros(5, 2, 32, device=device)
    write_latent(rows, kv_slots, pool)
    assert torch.equal(pool.flatten(0, 1)[kv_slots], rows)
    assert int(pool.abs().sum(2).count_nonzero()) == 3


# --- expanded K and V ---------------------------------------------------------------------------

SPANS = [(0, 7), (37, 1), (5, 21), (0, 1)]


def make_expanded(
    spans: list[tuple[int, int]],
    heads: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[torch.Tensor, ExpandedKV]:
    """q [T, H, D] and K, V, all of them views into wider rows, as the model's are."""
    draw = torch.Generator().manual_seed(1)
    lengths = [start + count for start, count in spans]
    tokens, positions = sum(n for _, n in spans), sum(lengths)
    q = torch.randn(tokens, heads + 1, dims[0], generator=draw).to(device, dtype)[:, :heads]
    both = torch.randn(positions, heads, sum(dims), generator=draw).to(device, dtype)
    k, v = both.split_with_sizes(dims, 2)
    ends = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    return q, ExpandedKV(k, v, ends)


def run_expanded(
    spans: list[tuple[int, int]],
    q: torch.Tensor,
    kv: ExpandedKV,
    window: int | None,
    config: TileConfig | None = None,
) -> torch.Tensor:
    dims = q.shape[2], kv.v.shape[2]
    tile = config or expanded_tile_config(gpu_of(q.device), *dims, q.dtype)
    tiles = build_tile_map(spans, tile.block_m, lambda host: host.to(q.device))
    return expanded_attention(q, kv, spans, tiles, dims[0] ** -0.5, window, config)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("dims", [(192, 128), (24, 16), (80, 40)])
def test_expanded_attention(
    dims: tuple[int, int], window: int | None, device: torch.device
) -> None:
    q, kv = make_expanded(SPANS, 2, dims, torch.float32, device)
    exact = ExpandedKV(kv.k.double(), kv.v.double(), kv.cu_kv_lens)
    right = expanded_attention_ref(q.double(), exact, SPANS, dims[0] ** -0.5, window)
    out = run_expanded(SPANS, q, kv, window, TileConfig(16, 16, 4, 1))
    assert relative_error(out, right) < 2e-6


def test_a_neighbour_full_of_nan_changes_nothing(device: torch.device) -> None:
    q, kv = make_expanded(SPANS, 2, (32, 16), torch.float32, device)
    before = run_expanded(SPANS, q, kv, None)
    kv.k[7:45], kv.v[7:45] = float("nan"), float("nan")  # the context of the second request
    after = run_expanded(SPANS, q, kv, None)
    others = [i for i in range(len(q)) if i != 7]
    assert torch.equal(after[others], before[others])


def test_head_dims_are_split_into_powers_of_two() -> None:
    sizes = {64: (64, 0), 48: (64, 0), 192: (128, 64), 128: (128, 0), 256: (256, 0), 96: (64, 32)}
    assert {dim: split_dim(dim) for dim in sizes} == sizes


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 100])
def test_expanded_attention_on_gpu(
    window: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    spans = [(0, 333), (700, 65), (1500, 1), (64, 64), (0, 1024)]
    q, kv = make_expanded(spans, 16, (192, 128), dtype, device)
    exact = ExpandedKV(kv.k.double(), kv.v.double(), kv.cu_kv_lens)
    right = expanded_attention_ref(q.double(), exact, spans, 192**-0.5, window)
    assert relative_error(run_expanded(spans, q, kv, window), right) < BOUND[dtype]


# --- on a GPU: DeepSeek's sizes -----------------------------------------------------------------


GPU_MASKS = [MaskSpec(), MaskSpec(BLOCK), MaskSpec(TREE), MaskSpec(CAUSAL, 100)]


@pytest.mark.gpu
@covering_cells(  # nearly every cell compiles a kernel, so they are few also with `-m gpu`
    3,
    {
        "q_len": [1, 2, 5, 16],
        "heads": [8, 16, 32, 64, 128],
        "page": [1, 16, 64, 128],
        "mask": GPU_MASKS,
        "num_splits": [1, 7],
    },
)
def test_decode_on_gpu(
    q_len: int, heads: int, page: int, mask: MaskSpec, num_splits: int, device: torch.device
) -> None:
    half = torch.bfloat16
    spans = [(700, q_len), (1500, q_len), (90, q_len), (33, q_len)]
    case, cache = make(spans, heads, (512, 64), page, half, device=device, padded=1)
    right = mla_decode_ref(case.q.double(), _double(cache), q_len, case.mask(mask), case.scale)
    assert relative_error(decode(case, cache, mask, num_splits), right) < BOUND[half]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float16, torch.float8_e4m3fn),
    ],
)
@pytest.mark.parametrize("q_len", [1, 5])
def test_dtypes_on_gpu(
    q_len: int, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> None:
    spans = [(700, q_len), (150, q_len)]
    case, cache = make(spans, 16, (512, 64), 16, dtype, kv_dtype, device)
    right = mla_decode_ref(case.q.double(), _double(cache), q_len, MaskSpec(), case.scale)
    for num_splits in (1, 3):
        assert relative_error(decode(case, cache, MaskSpec(), num_splits), right) < BOUND[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("heads", [16, 128])
def test_prefill_on_gpu(heads: int, page: int, device: torch.device) -> None:
    half = torch.bfloat16
    spans = [(0, 333), (700, 65), (1500, 1), (64, 64)]
    case, cache = make(spans, heads, (512, 64), page, half, device=device)
    for mask in (MaskSpec(), MaskSpec(CAUSAL, 100)):
        right = mla_prefill_ref(case.q.double(), _double(cache), spans, mask, case.scale)
        assert relative_error(prefill(case, cache, mask), right) < BOUND[half]


@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [1, 5, 16])
def test_a_captured_decode_follows_lengths_on_the_device(q_len: int, device: torch.device) -> None:
    """One graph for all lengths: splits are cut on the device."""
    half = torch.bfloat16
    spans = [(n, q_len) for n in (2000, 1500, 1600, 1999)]
    case, cache = make(spans, 16, (512, 64), 64, half, device=device)
    case.k_pool.nan_to_num_(0.0)  # shorter lengths than the pool was made for
    decode(case, cache, MaskSpec(), 8)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(case, cache, MaskSpec(), 8)
    for lengths in ([2000, 1500, 1600, 1999], [0, 1, 63, 64], [1024, 90, 700, 33]):
        cache.start.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        right = mla_decode_ref(case.q.double(), _double(cache), q_len, MaskSpec(), case.scale)
        assert relative_error(out, right) < BOUND[half]


# --- on Hopper: the kernel in CUDA C++ ----------------------------------------------------------


@pytest.fixture
def launches(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[MlaArguments]:
    """Launches of the kernel; skips the test where it does not serve."""
    reason = why_not_mla_sm90(gpu_of(device), 128, DEEPSEEK)
    if reason is not None:
        pytest.skip(reason)
    seen: list[MlaArguments] = []
    launch = mla_sm90.launch

    def record(args: MlaArguments) -> None:
        seen.append(args)
        launch(args)

    monkeypatch.setattr(mla_sm90, "launch", record)
    return seen


STARTS = {
    "ragged": (700, 1500, 90, 0),
    "around the ends of blocks": (58, 59, 62, 63, 64, 112, 126, 127, 128),
    "long": (6000, 31),
}


@pytest.mark.gpu
@covering_cells(
    2,
    {
        "q_len": [2, 4, 5, 16],  # 16 heads: 32, 64, 80 and 256 rows
        "heads": [16, 24, 128],
        "mask": [*GPU_MASKS, MaskSpec(BLOCK, 100)],
        "num_splits": [1, 3, 64],
        "starts": list(STARTS),
    },
)
def test_hopper_decode_on_gpu(
    q_len: int,
    heads: int,
    mask: MaskSpec,
    num_splits: int,
    starts: str,
    launches: list[MlaArguments],
    device: torch.device,
) -> None:
    """K/V past the end of each request is NaN; splits may be more than blocks."""
    half = torch.bfloat16
    spans = [(start, q_len) for start in STARTS[starts]]
    case, cache = make(spans, heads, (512, 64), 64, half, device=device, padded=1)
    right = mla_decode_ref(case.q.double(), _double(cache), q_len, case.mask(mask), case.scale)
    assert relative_error(decode(case, cache, mask, num_splits), right) < BOUND[half]
    assert len(launches) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("q_len", "heads", "mask"),
    [(1, 128, MaskSpec()), (1, 32, MaskSpec(CAUSAL, 100)), (64, 16, MaskSpec(TREE))],
    ids=str,
)
def test_hopper_one_token_and_the_largest_tree_on_gpu(
    q_len: int, heads: int, mask: MaskSpec, launches: list[MlaArguments], device: torch.device
) -> None:
    half = torch.bfloat16
    spans = [(start, q_len) for start in (700, 90, 0)]
    case, cache = make(spans, heads, (512, 64), 64, half, device=device)
    right = mla_decode_ref(case.q.double(), _double(cache), q_len, case.mask(mask), case.scale)
    for num_splits in (1, 4):
        assert relative_error(decode(case, cache, mask, num_splits), right) < BOUND[half]
    assert len(launches) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [MaskSpec(), MaskSpec(CAUSAL, 100), MaskSpec(BLOCK)], ids=str)
@pytest.mark.parametrize("heads", [16, 24, 128])
def test_hopper_prefill_on_gpu(
    heads: int, mask: MaskSpec, launches: list[MlaArguments], device: torch.device
) -> None:
    half = torch.bfloat16
    spans = [(0, 333), (700, 65), (1500, 1), (64, 64)]
    case, cache = make(spans, heads, (512, 64), 64, half, device=device)
    right = mla_prefill_ref(case.q.double(), _double(cache), spans, mask, case.scale)
    assert relative_error(prefill(case, cache, mask), right) < BOUND[half]
    assert len(launches) == 1


@pytest.mark.gpu
def test_hopper_decode_reads_rows_that_the_kernel_before_it_writes(
    launches: list[MlaArguments], device: torch.device
) -> None:
    """In a graph with programmatic dependent launch, where older rows are read ahead."""
    half, q_len = torch.bfloat16, 5
    spans = [(start, q_len) for start in (59, 64, 127, 1000)]
    case, cache = make(spans, 16, (512, 64), 64, half, device=device)
    position = cache.start[:, None] + torch.arange(q_len, device=device)
    pages = cache.page_table.gather(1, (position // 64).long())
    kv_slots = (pages * 64 + position % 64).long().flatten()
    rows = torch.randn(len(kv_slots), 576, device=device, dtype=half)

    def run() -> torch.Tensor:
        write_latent(rows, kv_slots, cache.pool)
        return decode(case, cache, MaskSpec(), 4)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(3):
        rows.normal_()
        graph.replay()
        right = mla_decode_ref(case.q.double(), _double(cache), q_len, MaskSpec(), case.scale)
        assert relative_error(out, right) < BOUND[half]
    assert len(launches) == 2


@pytest.mark.gpu
def test_hopper_pages_past_32_bit_offsets(
    launches: list[MlaArguments], device: torch.device
) -> None:
    """Pages behind 2^31 elements give what the same rows give at the start of a pool."""
    half, count = torch.bfloat16, 24
    total = (1 << 31) // (64 * 576) + 2 * count  # 4.3 GB
    pool = torch.empty(total, 64, 576, device=device, dtype=half)
    pool[:count] = torch.randn(count, 64, 576, device=device, dtype=half)
    pool[-count:] = pool[:count]
    ids = torch.arange(count, device=device, dtype=torch.int32)[None]
    start = torch.tensor([64 * count - 5], device=device, dtype=torch.int32)
    near, far = (PagedLatent(pool, 512, table, start) for table in (ids, ids + total - count))
    q = torch.randn(5, 16, 576, device=device, dtype=half)
    for num_splits in (1, 3):
        results = [mla_decode(q, kv, 5, MaskSpec(), 0.07, num_splits) for kv in (near, far)]
        assert torch.equal(*results)
    assert len(launches) == 4


def _double(cache: PagedLatent) -> PagedLatent:
    """float8 by way of float32: PyTorch indexes no float8."""
    return replace(cache, pool=cache.pool.float().double())
