"""Hopper's prefill attention: when it is chosen, and on a GPU its results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from forerun.kernels.attention.decode import BLOCK, CAUSAL, MaskSpec
from forerun.kernels.attention.paged_kv import PagedKV
from forerun.kernels.attention.prefill import prefill_attention, prefill_attention_ref
from forerun.kernels.attention.prefill_sm90 import BLOCK_M, why_unfit
from forerun.kernels.attention.tile_map import build_tile_map
from forerun.kernels.attention.tiles import prefill_tile_config
from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import GpuInfo, gpu_of
from tests.kernels.attention_support import Paged, make_paged, relative_error

HOPPER = GpuInfo(132, amd=False)
BF16, FP16 = torch.bfloat16, torch.float16
BOUND = {FP16: 1e-3, BF16: 8e-3}


# --- when it is chosen --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "q_dtype", "kv_dtype", "head_dim", "page_size", "reason"),
    [
        (HOPPER, BF16, BF16, 128, 64, None),
        (HOPPER, FP16, FP16, 64, 8, None),
        (HOPPER, BF16, BF16, 128, 16, None),
        (HOPPER, BF16, BF16, 128, 192, None),
        (replace(HOPPER, capability=100), BF16, BF16, 128, 64, "Hopper"),
        (replace(HOPPER, amd=True), BF16, BF16, 128, 64, "Hopper"),
        (replace(HOPPER, interpreted=True), BF16, BF16, 128, 64, "Hopper"),
        (HOPPER, torch.float32, torch.float32, 128, 64, "not torch.float32"),
        (HOPPER, BF16, torch.float8_e4m3fn, 128, 64, "K/V in torch.float8_e4m3fn"),
        (HOPPER, BF16, FP16, 128, 64, "K/V in torch.float16"),
        (HOPPER, BF16, BF16, 80, 64, "head dim is 80"),
        (HOPPER, BF16, BF16, 128, 4, "page of 4 tokens"),
    ],
)
def test_where_it_can_be_used(
    gpu: GpuInfo,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
    page_size: int,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvrtc, "available", lambda: True)
    said = why_unfit(gpu, q_dtype, kv_dtype, head_dim, page_size)
    if reason is None:
        assert said is None
        # The plan's tiles serve both kernels.
        assert prefill_tile_config(gpu, head_dim, q_dtype).block_m == BLOCK_M
    else:
        assert said is not None and reason in said


def test_it_needs_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "available", lambda: False)
    assert why_unfit(HOPPER, BF16, BF16, 128, 64) == "NVRTC is not installed"


def test_the_work_counter_begins_at_zero_in_the_same_upload() -> None:
    uploads: list[torch.Tensor] = []

    def upload(host: torch.Tensor) -> torch.Tensor:
        uploads.append(host)
        return host

    tile_map = build_tile_map([(3, 5), (0, 1)], 4, upload)
    assert len(uploads) == 1 and tile_map.entries.shape == (3, 4)
    assert tile_map.next_work.tolist() == [0] and tile_map.next_work.dtype == torch.int32
    assert tile_map.entries.data_ptr() % 16 == 0 and tile_map.entries.is_contiguous()


# --- on a GPU -----------------------------------------------------------------------------------

SPANS = [(0, 700), (0, 1), (1000, 130), (64, 64), (129, 3), (0, 128)]
MASKS = [
    MaskSpec(CAUSAL),
    MaskSpec(CAUSAL, 1),
    MaskSpec(CAUSAL, 300),
    MaskSpec(BLOCK),
    MaskSpec(BLOCK, 100),
]


def run(case: Paged, mask: MaskSpec) -> torch.Tensor:
    dtypes = case.q.dtype, case.k_pool.dtype
    gpu, dim, page_size = gpu_of(case.q.device), case.q.shape[2], case.k_pool.shape[1]
    assert why_unfit(gpu, *dtypes, dim, page_size) is None
    group = case.q.shape[1] // case.k_pool.shape[2]
    tile_map = build_tile_map(case.spans, BLOCK_M // group, lambda host: host.cuda())
    out = prefill_attention(case.q, case.kv, case.spans, tile_map, mask, case.scale)
    assert tile_map.next_work.item() == 0
    return out


def reference(case: Paged, mask: MaskSpec) -> torch.Tensor:
    kv = PagedKV(case.k_pool.double(), case.v_pool.double(), case.table, case.start)
    return prefill_attention_ref(case.q.double(), kv, case.spans, mask, case.scale)


def check(case: Paged, mask: MaskSpec) -> None:
    expected, out = reference(case, mask), run(case, mask)
    assert relative_error(out, expected) < BOUND[case.q.dtype]
    assert (out.double() - expected).abs().max() < 10 * BOUND[case.q.dtype]


@pytest.fixture
def hopper() -> None:
    reason = why_unfit(gpu_of(torch.device("cuda")), BF16, BF16, 128, 64)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("page_size", [8, 16, 64, 128, 192])
def test_masks_and_pages(page_size: int, mask: MaskSpec) -> None:
    """K/V past the end of every request is NaN."""
    check(make_paged(SPANS, 32, 8, 128, page_size, BF16, device="cuda"), mask)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("shape", [(4, 4, 64), (8, 1, 128), (3, 1, 128), (128, 1, 64)], ids=str)
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_groups_head_dims_and_dtypes(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(make_paged(SPANS, *shape, 64, dtype, device="cuda"), MaskSpec(CAUSAL))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("mask", [MaskSpec(CAUSAL, 200), MaskSpec(BLOCK, 200)], ids=str)
def test_pages_before_the_window_may_hold_anything(mask: MaskSpec) -> None:
    """They belong to another request by now; here they are a page of NaN."""
    case = make_paged([(1000, 70), (530, 300)], 8, 2, 128, 16, BF16, device="cuda")
    expected = reference(case, mask)
    case.k_pool = torch.cat((case.k_pool, torch.full_like(case.k_pool[:1], float("nan"))))
    case.v_pool = torch.cat((case.v_pool, torch.full_like(case.v_pool[:1], float("nan"))))
    nan_page = case.k_pool.shape[0] - 1
    for b, (start, _) in enumerate(case.spans):
        case.table[b, : (start - 200) // 16] = nan_page
    assert relative_error(run(case, mask), expected) < BOUND[BF16]


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_a_request_does_not_depend_on_the_batch() -> None:
    case = make_paged(SPANS, 32, 8, 128, 64, BF16, device="cuda")
    out, first = run(case, MaskSpec()), 0
    for b, (start, count) in enumerate(SPANS):
        alone = replace(
            case,
            q=case.q[first : first + count],
            table=case.table[b : b + 1],
            start=case.start[b : b + 1],
            spans=[(start, count)],
        )
        assert torch.equal(run(alone, MaskSpec()), out[first : first + count])
        first += count


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_a_captured_launch_replays() -> None:
    case = make_paged(SPANS, 32, 8, 128, 64, BF16, device="cuda")
    tile_map = build_tile_map(SPANS, 32, lambda host: host.cuda())
    args = (case.kv, SPANS, tile_map, MaskSpec(), case.scale)
    q = case.q.clone()
    prefill_attention(q, *args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = prefill_attention(q, *args)
    for scale in (1.0, -0.5):
        q.copy_(case.q * scale)
        graph.replay()
        case.q = q
        assert relative_error(out, reference(case, MaskSpec())) < BOUND[BF16]


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_pools_past_32_bit_offsets() -> None:
    case = make_paged([(100, 70), (300, 200)], 32, 8, 128, 64, BF16, device="cuda")
    expected = reference(case, MaskSpec())
    pages, used = (1 << 31) // case.k_pool[0].numel() + 9, case.k_pool.shape[0]
    pools = [torch.empty(pages, *case.k_pool.shape[1:], dtype=BF16, device="cuda") for _ in "kv"]
    for pool, small in zip(pools, (case.k_pool, case.v_pool), strict=True):
        pool[pages - used :] = small
    case.k_pool, case.v_pool = pools
    case.table = case.table + (pages - used)
    assert relative_error(run(case, MaskSpec()), expected) < BOUND[BF16]
