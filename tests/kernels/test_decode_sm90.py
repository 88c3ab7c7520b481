"""Hopper's verify attention: when it is chosen, and on a GPU its results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from forerun.kernels.attention import decode, decode_sm90
from forerun.kernels.attention.decode import (
    BLOCK,
    CAUSAL,
    TREE,
    MaskSpec,
    paged_attention,
    paged_attention_ref,
    why_not_decode_sm90,
)
from forerun.kernels.attention.decode_sm90 import DecodeArguments
from forerun.kernels.attention.paged_kv import PagedKV
from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import GpuInfo, gpu_of
from tests.covering import covering_cells
from tests.kernels.attention_support import Paged, make_paged, relative_error

HOPPER = GpuInfo(132, amd=False)
BF16 = torch.bfloat16
BOUND = 8e-3


# --- when it is chosen --------------------------------------------------------------------------


def qwen3(q_len: int = 16, batch: int = 1, dim: int = 128, page: int = 64) -> Paged:
    """Qwen3-8B's heads."""
    return make_paged([(0, q_len)] * batch, 32, 8, dim, page, BF16)


def reason_for(case: Paged, num_splits: int = 16, gpu: GpuInfo = HOPPER) -> str | None:
    return why_not_decode_sm90(gpu, case.q, case.kv, case.spans[0][1], num_splits)


def test_it_serves_verify_steps_with_one_cta_per_sm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "available", lambda: True)
    assert reason_for(qwen3()) == "contexts are short"
    monkeypatch.setattr(decode, "MIN_SM90_CONTEXT", 0)
    assert reason_for(qwen3()) is None
    assert reason_for(qwen3(5)) is None
    assert reason_for(qwen3(batch=8), 2) is None
    for case, num_splits, said in [
        (qwen3(1), 16, "16 rows"),
        (qwen3(4), 16, "16 rows"),
        (qwen3(batch=16), 1, "two splits"),
        (qwen3(batch=8), 4, "one CTA per SM"),
        (qwen3(dim=64), 16, "head dim is 64"),
        (qwen3(page=16), 16, "pages have 16"),
        (make_paged([(0, 16)], 5, 1, 128, 64, BF16), 16, "5 query heads"),
        (make_paged([(0, 16)], 32, 8, 128, 64, torch.float16), 16, "not torch.float16"),
        (make_paged([(0, 16)], 32, 8, 128, 64, BF16, torch.float8_e4m3fn), 16, "float8"),
    ]:
        assert said in (reason_for(case, num_splits) or "")
    for other in ({"capability": 100}, {"amd": True}, {"interpreted": True}):
        assert reason_for(qwen3(), gpu=replace(HOPPER, **other)) == "it is for Hopper GPUs"
    monkeypatch.setattr(nvrtc, "available", lambda: False)
    assert reason_for(qwen3()) == "it needs NVRTC"


# --- on a GPU -----------------------------------------------------------------------------------

MASKS = [
    MaskSpec(CAUSAL),
    MaskSpec(CAUSAL, 3),
    MaskSpec(CAUSAL, 300),
    MaskSpec(BLOCK),
    MaskSpec(BLOCK, 100),
    MaskSpec(TREE),
]
STARTS = {
    "ragged": (700, 1500, 90, 0),
    "around the ends of blocks": (47, 48, 49, 63, 64, 112),
    "long": (6000,),
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[DecodeArguments]:
    """Launches of the kernel; skips the test where it does not serve."""
    gpu = gpu_of(torch.device("cuda"))
    if gpu.amd or gpu.capability != 90 or not nvrtc.available():
        pytest.skip("it is for Hopper GPUs")
    seen: list[DecodeArguments] = []
    launch = decode_sm90.launch

    def record(args: DecodeArguments) -> None:
        seen.append(args)
        launch(args)

    monkeypatch.setattr(decode, "MIN_SM90_CONTEXT", 0)
    monkeypatch.setattr(decode_sm90, "launch", record)
    return seen


def run(case: Paged, mask: MaskSpec, num_splits: int) -> torch.Tensor:
    q_len = case.spans[0][1]
    return paged_attention(case.q, case.kv, q_len, case.mask(mask), case.scale, num_splits)


def reference(case: Paged, mask: MaskSpec) -> torch.Tensor:
    kv = PagedKV(case.k_pool.double(), case.v_pool.double(), case.table, case.start)
    return paged_attention_ref(case.q.double(), kv, case.spans[0][1], case.mask(mask), case.scale)


@pytest.mark.gpu
@covering_cells(
    2,
    {
        "q_len": [5, 8, 16, 40],
        "heads": [(8, 1), (8, 2), (16, 1), (32, 1), (2, 2)],
        "mask": MASKS,
        "num_splits": [2, 3, 16],
        "starts": list(STARTS),
    },
)
def test_kernel_matches_the_reference(
    q_len: int,
    heads: tuple[int, int],
    mask: MaskSpec,
    num_splits: int,
    starts: str,
    launches: list[DecodeArguments],
) -> None:
    """K/V past the end of each request is NaN; splits may be more than blocks."""
    spans = [(start, q_len) for start in STARTS[starts]]
    case = make_paged(spans, *heads, 128, 64, BF16, device="cuda", padded=1)
    fits = why_not_decode_sm90(gpu_of(case.q.device), case.q, case.kv, q_len, num_splits) is None
    out = run(case, mask, num_splits)
    assert relative_error(out, reference(case, mask)) < BOUND
    assert len(launches) == fits
    assert torch.equal(run(case, mask, num_splits), out)


@pytest.mark.gpu
def test_qwen3_at_a_long_context(launches: list[DecodeArguments]) -> None:
    """Every stage is used many times, and 513 blocks are divided among 16 splits."""
    case = make_paged([(32768, 16)], 32, 8, 128, 64, BF16, device="cuda")
    for mask in (MaskSpec(CAUSAL), MaskSpec(BLOCK)):
        assert relative_error(run(case, mask, 16), reference(case, mask)) < BOUND
    assert len(launches) == 2


@pytest.mark.gpu
def test_sinks_count_once(launches: list[DecodeArguments]) -> None:
    case = make_paged([(300, 16)], 32, 8, 128, 64, BF16, device="cuda")
    mask = MaskSpec(sinks=torch.linspace(-3, 3, 32, device="cuda"))
    assert relative_error(run(case, mask, 4), reference(case, mask)) < BOUND
    assert len(launches) == 1


@pytest.mark.gpu
def test_a_captured_launch_serves_all_lengths(launches: list[DecodeArguments]) -> None:
    case = make_paged([(2000, 16), (1500, 16)], 32, 8, 128, 64, BF16, device="cuda")
    case.k_pool.nan_to_num_(0.0)  # shorter lengths than the pool was made for
    case.v_pool.nan_to_num_(0.0)
    run(case, MaskSpec(), 8)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(case, MaskSpec(), 8)
    assert len(launches) == 2
    for lengths in ([2000, 1500], [0, 1], [63, 64], [1024, 90]):
        case.start.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        assert relative_error(out, reference(case, MaskSpec())) < BOUND


@pytest.mark.gpu
def test_pools_past_32_bit_offsets(launches: list[DecodeArguments]) -> None:
    case = make_paged([(100, 16), (300, 16)], 32, 8, 128, 64, BF16, device="cuda")
    expected = reference(case, MaskSpec())
    pages, used = (1 << 31) // case.k_pool[0].numel() + 9, case.k_pool.shape[0]
    pools = [torch.empty(pages, *case.k_pool.shape[1:], dtype=BF16, device="cuda") for _ in "kv"]
    for pool, small in zip(pools, (case.k_pool, case.v_pool), strict=True):
        pool[pages - used :] = small
    case.k_pool, case.v_pool = pools
    case.table = case.table + (pages - used)
    assert relative_error(run(case, MaskSpec(), 3), expected) < BOUND
    assert len(launches) == 1
