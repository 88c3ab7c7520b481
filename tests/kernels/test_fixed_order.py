"""Attention in a fixed order: right, and a token has the same bits however it is computed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from forerun.kernels.attention import fixed_order, prefill_sm90
from forerun.kernels.attention.decode import CAUSAL, TREE, MaskSpec
from forerun.kernels.attention.fixed_order import (
    TreePaths,
    choose_ctas,
    fixed_order_attention,
    fixed_order_prefill,
    num_segments,
    share_begin,
    sm90_ctas,
)
from forerun.kernels.attention.tile_map import build_tile_map
from forerun.kernels.attention.tiles import prefill_tile_config
from forerun.kernels.runtime import nvrtc
from forerun.kernels.runtime.gpu import GpuInfo, gpu_of
from forerun.kernels.runtime.jit import jit, tl
from tests.covering import some_of
from tests.kernels.attention_support import Paged, make_paged, ragged_rows, relative_error

pytest.importorskip("triton")

BOUND = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
CHAINS = [MaskSpec(CAUSAL), MaskSpec(CAUSAL, 5), MaskSpec(CAUSAL, 300)]
MASKS = [*CHAINS, MaskSpec(TREE), MaskSpec(TREE, 3), MaskSpec(TREE, 300)]
STARTS = [0, 13, 255, 256, 510, 700]
KV_LEN_UB = 1024
BOUNDS = [128 * s for s in range(32)] + [4096 + 1024 * s for s in range(12)]
BOUNDS += [16384 + 4096 * s for s in range(40)]


@jit
def _shares(out, start, last, ctas, WINDOW: tl.constexpr, SIZE: tl.constexpr):
    """Of each span, and of each number of CTAs: the segment with which each CTA begins, and end."""
    span, number, cta = tl.program_id(0), tl.program_id(1), tl.arange(0, SIZE)
    count = tl.load(ctas + number)
    begin = share_begin(cta, count, tl.load(start + span), tl.load(last + span), WINDOW)
    at = (span * tl.num_programs(1) + number) * SIZE + cta
    tl.store(out + at, begin, mask=cta <= count)


def step(case: Paged, mask: MaskSpec) -> Tensor:
    q_len, own = case.spans[0][1], case.mask(mask)
    paths = None if own.tree is None else TreePaths.of(own.tree, q_len)
    return fixed_order_attention(case.q, case.kv, q_len, own, case.scale, KV_LEN_UB, paths)


def chunks(case: Paged, mask: MaskSpec, tokens: int = 0) -> Tensor:
    """`tokens`: of an entry of the tile map; 0: as plans have them."""
    device, dim = case.q.device, case.q.shape[2]
    tile = prefill_tile_config(gpu_of(device), dim, case.q.dtype)
    group = case.q.shape[1] // case.k_pool.shape[2]
    tile_map = build_tile_map(case.spans, tokens or tile.block_m // group, lambda t: t.to(device))
    return fixed_order_prefill(case.q, case.kv, tile_map, mask, case.scale)


def divided(monkeypatch: pytest.MonkeyPatch, ctas: int) -> None:
    """Divides every context among as many CTAs; 1: one folds it in registers."""
    monkeypatch.setattr(fixed_order, "choose_ctas", lambda *_: ctas)


def dtypes(device: torch.device) -> list[torch.dtype]:
    return [torch.float32, torch.bfloat16] if device.type == "cuda" else [torch.float32]


def with_sinks(case: Paged, mask: MaskSpec) -> MaskSpec:
    return replace(mask, sinks=torch.linspace(-1, 1, case.q.shape[1], device=case.q.device))


@pytest.mark.covering(0, 1)
@pytest.mark.parametrize("ctas", [1, 3])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_step_against_the_definition(
    mask: MaskSpec, ctas: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    divided(monkeypatch, ctas)
    for dtype in dtypes(device):
        case = make_paged([(n, 3) for n in STARTS], 4, 2, 64, 16, dtype, device=device)
        for each in (mask, with_sinks(case, mask)):
            error = relative_error(step(case, each), case.reference(case.mask(each)))
            assert error < BOUND[dtype]


@pytest.mark.parametrize("mask", some_of([(mask,) for mask in CHAINS], 1), ids=str)
def test_chunks_against_the_definition(mask: MaskSpec, device: torch.device) -> None:
    for dtype in dtypes(device):
        case = make_paged([(0, 70), (250, 21), (600, 1)], 6, 2, 64, 16, dtype, device=device)
        for each in (mask, with_sinks(case, mask)):
            assert relative_error(chunks(case, each), case.reference(each)) < BOUND[dtype]


def test_an_entry_of_several_tiles(device: torch.device) -> None:
    """Tiles of the Triton kernel end with their entry, or with the chunk."""
    case = make_paged([(0, 70), (250, 21), (600, 1)], 6, 2, 64, 16, device=device)
    mask = with_sinks(case, MaskSpec(CAUSAL))
    expected = chunks(case, mask)
    for tokens in (7, 23, 64):
        assert torch.equal(chunks(case, mask, tokens), expected)


@pytest.mark.parametrize(
    "mask",
    some_of([(CHAINS[0],), (CHAINS[2],), (MaskSpec(TREE),), (MaskSpec(TREE, 300),)], 2),
    ids=str,
)
@pytest.mark.parametrize("ragged", some_of([(False,), (True,)], 1))
def test_any_division_has_the_same_bits(
    mask: MaskSpec, ragged: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever segments the first CTA folds and others leave; `ragged`: requests of any width."""
    rows = ragged_rows([1, 3], 4, device)
    for dtype in dtypes(device):
        case = make_paged([(130, 4), (430, 4)], 2, 1, 32, 64, dtype, device=device)
        own = with_sinks(case, case.mask(mask))
        paths = None if own.tree is None else TreePaths.of(own.tree, 4)
        q, kv = (rows.pack(case.q), replace(case.kv, rows=rows)) if ragged else (case.q, case.kv)
        outs = []
        for ctas in (1, 2, 3, 4):
            divided(monkeypatch, ctas)
            outs.append(fixed_order_attention(q, kv, 4, own, case.scale, KV_LEN_UB, paths))
        assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", CHAINS, ids=str)
def test_a_token_has_the_same_bits_in_any_pass(
    mask: MaskSpec, dim: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of any length, verify passes, single tokens; folded by one CTA or after several."""
    for dtype in dtypes(device):
        whole = make_paged([(n, 5) for n in STARTS], 4, 2, dim, 16, dtype, device=device)
        mask = with_sinks(whole, mask)
        expected = chunks(whole, mask)
        for ctas in (1, 2, 7):
            divided(monkeypatch, ctas)
            assert torch.equal(step(whole, mask), expected), ctas
            for token in range(5):
                alone = replace(
                    whole,
                    q=whole.q[token::5],
                    start=whole.start + token,
                    spans=[(start + token, 1) for start, _ in whole.spans],
                )
                assert torch.equal(step(alone, mask), expected[token::5]), (ctas, token)
        longest = replace(
            whole,
            q=whole.q[-5:],
            table=whole.table[-1:],
            start=whole.start[-1:],
            spans=whole.spans[-1:],
        )
        assert torch.equal(chunks(longest, mask), expected[-5:])


def chain_of(case: Paged, node: int) -> Paged:
    """The first request's tree as the chain that leads to a node."""
    assert case.tree is not None
    start, count = case.spans[0]
    bits = int(case.tree[node, 0])
    path = [j for j in range(count) if bits >> j & 1]
    page = case.k_pool.shape[1]
    pools = [pool.clone() for pool in (case.k_pool, case.v_pool)]

    def slot(position: int) -> int:
        return int(case.table[0, position // page]) * page + position % page

    for pool, old in zip(pools, (case.k_pool, case.v_pool), strict=True):
        for i, j in enumerate(path):
            pool.flatten(0, 1)[slot(start + i)] = old.flatten(0, 1)[slot(start + j)]
    spans = [(start + len(path) - 1, 1)]
    begin = torch.tensor([spans[0][0]], dtype=torch.int32, device=case.q.device)
    q, table = case.q[node : node + 1], case.table[:1]
    return Paged(q, *pools, table, begin, spans, case.scale)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 3, 300])
def test_a_node_has_the_bits_of_the_chain_to_it(
    window: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dtype in dtypes(device):
        for start in (0, 62, 250, 500):
            case = make_paged([(start, 40)], 4, 2, 64, 16, dtype, device=device, seed=start)
            for ctas in (1, 3):
                divided(monkeypatch, ctas)
                out = step(case, MaskSpec(TREE, window))
                for node in range(0, 40, 3):
                    alone = step(chain_of(case, node), MaskSpec(CAUSAL, window))
                    assert torch.equal(alone[0], out[node]), (start, ctas, node)


SM90_STARTS = [
    (700, 1500, 90, 0),
    (47, 48, 49, 63, 64, 112),  # around the ends of blocks
    (127, 128, 129, 255, 256),  # and of segments
    (4095, 4096, 4090, 17000, 33000),
]


SM90_SPANS: list[list[tuple[int, int]]] = [
    [(0, 1), (0, 63), (0, 64), (0, 65), (0, 127), (0, 128), (0, 129), (0, 300)],
    [(700, 40), (1, 255), (64, 64), (128, 128), (127, 2), (3000, 70)],
    [(4000, 200), (4090, 3), (0, 1100), (16000, 500), (30000, 33)],
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "q_len"), [((32, 8), 1), ((32, 8), 8), ((8, 2), 40), ((16, 1), 2), ((2, 2), 5)]
)
def test_hoppers_kernel_has_the_same_bits(
    heads: tuple[int, int], q_len: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Triton's, however many CTAs divide a context. K/V past the end of a context is NaN."""
    if gpu_of(device).amd or gpu_of(device).capability != 90 or not nvrtc.available():
        pytest.skip("it is for Hopper GPUs")
    mask, dtype = MaskSpec(CAUSAL), torch.bfloat16
    for starts in SM90_STARTS:
        spans = [(start, q_len) for start in starts]
        case = make_paged(spans, *heads, 128, 64, dtype, device=device, padded=1)
        rows = ragged_rows([1 + i % q_len for i in range(len(starts) + 1)], q_len, device)
        passes = [(case.q, case.kv), (rows.pack(case.q), replace(case.kv, rows=rows))]
        for q, kv in passes:
            outs = []
            for ctas in (0, 1, 2, 3, 8):
                monkeypatch.setattr(fixed_order, "sm90_ctas", lambda *_, ctas=ctas: ctas)
                ub = max(starts) + q_len
                outs.append(fixed_order_attention(q, kv, q_len, mask, case.scale, ub))
            assert outs[0].isfinite().all()
            assert all(torch.equal(out, outs[0]) for out in outs), starts


@pytest.mark.gpu
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize(
    ("heads", "dim"), [((32, 8), 128), ((4, 1), 64), ((5, 1), 128), ((6, 2), 64), ((16, 1), 128)]
)
def test_hoppers_prompts_have_the_same_bits(
    heads: tuple[int, int],
    dim: int,
    page: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Triton's. K/V past the end of a context is NaN."""
    gpu, dtype = gpu_of(device), torch.bfloat16
    if prefill_sm90.why_unfit(gpu, dtype, dtype, dim, page) is not None:
        pytest.skip("it is for Hopper GPUs")
    for spans in SM90_SPANS:
        case = make_paged(spans, *heads, dim, page, dtype, device=device)
        outs = [chunks(case, MaskSpec(CAUSAL))]
        with monkeypatch.context() as patch:
            patch.setattr(prefill_sm90, "why_unfit", lambda *_: "not today")
            outs.append(chunks(case, MaskSpec(CAUSAL)))
        assert outs[1].isfinite().all()
        assert torch.equal(*outs), spans


def test_hoppers_kernel_serves_few_tiles_of_plain_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "available", lambda: True)
    hopper, bf16 = GpuInfo(132, amd=False), torch.bfloat16

    def ctas(
        batch: int = 8,
        mask: MaskSpec = CHAINS[0],
        gpu: GpuInfo = hopper,
        dim: int = 128,
        page: int = 64,
        dtype: torch.dtype = bf16,
    ) -> int:
        case = make_paged([(0, 8)] * batch, 32, 8, dim, page, dtype)
        return sm90_ctas(gpu, case.q, case.kv, 8, mask, 1100)

    assert [ctas(batch) for batch in (1, 2, 4, 8, 9, 16, 17)] == [8, 8, 4, 2, 1, 1, 0]
    sinks = torch.zeros(32)
    for mask in (*CHAINS[1:], MaskSpec(TREE), MaskSpec(CAUSAL, sinks=sinks)):
        assert ctas(mask=mask) == 0
    for other in ({"dim": 64}, {"page": 16}, {"dtype": torch.float16}):
        assert ctas(**other) == 0  # type: ignore[arg-type]
    for changed in ({"capability": 100}, {"amd": True}, {"interpreted": True}):
        assert ctas(gpu=replace(hopper, **changed)) == 0
    monkeypatch.setattr(nvrtc, "available", lambda: False)
    assert ctas() == 0


@pytest.mark.gpu
def test_page_sizes_have_the_same_bits(device: torch.device) -> None:
    for dtype in dtypes(device):
        outs = []
        for page in (1, 16, 64, 256):
            case = make_paged([(n, 2) for n in STARTS], 4, 2, 64, page, dtype, device=device)
            case.q[:] = make_paged([(n, 2) for n in STARTS], 4, 2, 64, 16, dtype).q.to(device)
            position = torch.arange(STARTS[-1] + 2, device=device)
            for b, (start, count) in enumerate(case.spans):  # the same K/V at every position
                at = position[: start + count]
                index = case.table[b, at // page].long() * page + at % page
                for pool, shift in ((case.k_pool, 0.1), (case.v_pool, 0.7)):
                    values = torch.sin(
                        (at * 37 + b)[:, None, None] * shift
                        + torch.arange(128, device=device).view(2, 64)
                    )
                    pool.flatten(0, 1)[index] = values.to(dtype)
            outs.append(step(case, MaskSpec(CAUSAL)))
        assert all(torch.equal(out, outs[0]) for out in outs)


def test_segments() -> None:
    """The host counts as the device does: `segment_begin` of the next one is the end of each."""
    for index, begin in enumerate(BOUNDS):
        assert num_segments(begin + 1) == index + 1
        assert num_segments(begin) == max(index, 1)


@pytest.mark.parametrize("window", [None, 300])
def test_shares(window: int | None, device: torch.device) -> None:
    """Together all segments; one each if there are few, else about as many positions."""
    spans = [(0, 1), (100, 1), (1024, 8), (1100, 1), (4090, 16), (20000, 8), (130000, 1)]
    counts = (1, 2, 3, 8, 16)
    begins = torch.full((len(spans), len(counts), 32), -1, dtype=torch.int32, device=device)
    start = torch.tensor([s for s, _ in spans], dtype=torch.int32, device=device)
    last = start + torch.tensor([n - 1 for _, n in spans], dtype=torch.int32, device=device)
    ctas = torch.tensor(counts, dtype=torch.int32, device=device)
    _shares[begins.shape[:2]](begins, start, last, ctas, -1 if window is None else window, 32)
    for (first, width), of_span in zip(spans, begins.tolist(), strict=True):
        oldest = 0 if window is None else max(first - window + 1, 0)
        begin, end = num_segments(oldest + 1) - 1, num_segments(first + width)
        largest = max(BOUNDS[s + 1] - BOUNDS[s] for s in range(begin, end))
        for count, row in zip(counts, of_span, strict=True):
            shares = row[: count + 1]
            assert (shares[0], shares[-1]) == (begin, end)
            if end - begin <= count:
                assert shares == [min(begin + i, end) for i in range(count + 1)]
                continue
            fair = (first + width - BOUNDS[begin]) / count
            for left, right in pairwise(shares):
                assert 0 <= BOUNDS[right] - BOUNDS[left] <= fair + 2 * largest


def test_contexts_are_divided_while_tiles_are_few() -> None:
    gpu = GpuInfo(num_sms=132, amd=False)
    assert choose_ctas(gpu, 8, 1024) == 8
    assert choose_ctas(gpu, 8, 4097) == 33  # two on an SM
    assert choose_ctas(gpu, 8, 40960) == 16  # one on an SM
    assert choose_ctas(gpu, 64, 1100) == 2
    assert choose_ctas(gpu, 96, 40960) == 1
    assert choose_ctas(gpu, 131, 40960, per_sm=4) == 4
    assert choose_ctas(gpu, 132, 40960) == 1
