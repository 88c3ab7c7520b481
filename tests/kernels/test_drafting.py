"""Kernels of drafting heads, against loops in float64; heads with them, against heads without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.drafting import best_token, gru, keys, top_columns, walk
from forerun.kernels.drafting.convolution import convolve_rows
from forerun.kernels.runtime.gpu import GpuInfo
from forerun.kernels.sampling.argmax import argmax_keys_ref
from forerun.layers.communication import WeightPlacement
from forerun.models.heads import correlator, markov, selector
from forerun.models.heads import gru as domino
from forerun.models.heads.base import Block, BodySizes, DraftHead, HeadConfig
from tests.covering import some_of
from tests.models.head_parts import Vocabulary, best

DTYPES = [torch.float32, torch.bfloat16]


def _random(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab", "k"), [(3, 4000, 16), (1, 130, 2), (2, 2048, 11)])
def test_top_columns(
    rows: int, vocab: int, k: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Rounded to bfloat16, many values are equal: the lowest column comes first."""
    logits = _random(rows, vocab, device=device).bfloat16().to(dtype)
    logits[0, 7] = torch.nan
    logits[-1, 5] = float("-inf")
    values, columns, lse = top_columns.top_columns(logits, k)
    full = logits.double().nan_to_num(nan=float("-inf"))
    want, order = full.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(columns, order[:, :k]) and torch.equal(values.double(), want[:, :k])
    torch.testing.assert_close(lse.double(), full.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_top_columns_of_nothing(device: torch.device) -> None:
    """Rows without a finite value give different columns."""
    _, columns, _ = top_columns.top_columns(torch.full((1, 600), torch.nan, device=device), 4)
    assert len(set(columns[0].tolist())) == 4 and int(columns.max()) < 600


@pytest.mark.parametrize(("smem", "batch", "stages"), [(227, 64, 4), (99, 16, 2), (99, 64, 1)])
def test_tiles_of_w2_fit_into_shared_memory(smem: int, batch: int, stages: int) -> None:
    """Of rank 256 in bfloat16: an H100's, and an RTX 4090's."""
    gpu = GpuInfo(128, amd=False, smem_bytes=smem << 10)
    assert best_token.stages(gpu, best_token.BLOCK_V, batch, 512) == stages
    assert (stages * best_token.BLOCK_V + batch) * 512 <= smem << 10


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("looks_up", [False, True])
@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize(("batch", "vocab", "rank"), [(1, 200, 16), (5, 1000, 64), (17, 333, 32)])
def test_corrected_rows(
    batch: int,
    vocab: int,
    rank: int,
    pruned: bool,
    looks_up: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Row by row, given the token that the row before has chosen; odd rows read backwards."""
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter multiplies no bfloat16 matrices")
    depth = 3
    logits = _random(batch, depth, vocab + 3, device=device).to(dtype)[:, :, :vocab]
    weight = _random(vocab, rank, device=device, seed=2).to(dtype)
    table = _random(3 * vocab if pruned else vocab, rank, device=device, seed=3).to(dtype)
    columns = torch.arange(vocab, device=device)
    d2t = 2 * columns + columns % 2 if pruned else None  # columns 0, 1, 2 ... are 0, 4, 6 ...
    before = torch.arange(batch, device=device) * 11
    logits[0, 1, 3] = torch.nan
    assert best_token.fits_corrected_rows(table[:batch], weight)
    rows = best_token.CorrectedRows(logits, before, weight, table, d2t)
    ids = columns if d2t is None else columns + d2t
    for row in range(depth):
        if looks_up:
            rows.choose(row)
        else:
            rows.choose(row, rows.look_up(row).clone())
    got = rows.tokens()
    assert torch.isin(got, ids).all()
    for row in range(depth):
        assert torch.equal(rows.before[:, row], table[before])
        bias = table[before].double() @ weight.double().T
        scores = (logits[:, row].double() + bias).nan_to_num(nan=float("-inf"))
        column = torch.searchsorted(ids, got[:, row].contiguous())
        found = scores.gather(1, column.unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(found, scores.amax(1), rtol=1e-6, atol=1e-4)
        before = got[:, row]


def test_equal_scores_give_the_lowest_id(device: torch.device) -> None:
    """Whichever direction a row is read in; the lowest of all for a row of nothing."""
    logits = torch.zeros(2, 4, 700, device=device)
    logits[1, :2, [650, 300, 301]] = 1.0
    logits[1, 1, 299] = -0.0
    logits[:, 2:] = -torch.inf
    weight = torch.zeros(700, 16, device=device)
    rows = best_token.CorrectedRows(logits, torch.tensor([3, 4], device=device), weight, weight)
    for row in range(4):
        rows.choose(row)
    assert rows.tokens().tolist() == [[0, 0, 0, 0], [300, 300, 0, 0]]
    x, found = torch.zeros(2, 16, device=device), keys.new_keys(3, 2, device)
    columns = torch.arange(700, device=device).flip(0).expand(2, -1).contiguous()
    pool = best_token.Pool(columns, columns + 5)
    best_token.best_in_pool(logits[:, 0], x, pool, weight, found, 1)
    best_token.best_in_pool(logits[:, 2], x, pool, weight, found, 2)
    assert keys.tokens_of_keys(found).tolist() == [[0, 5, 0], [0, 305, 0]]


def test_what_corrected_rows_serve(device: torch.device) -> None:
    x, weight = torch.zeros(2, 24, device=device), torch.zeros(9, 24, device=device)
    assert not best_token.fits_corrected_rows(x, weight)  # no power of two
    assert not best_token.fits_corrected_rows(x[:, :16], torch.empty(0, device=device))
    many = torch.zeros(best_token.MAX_BATCH + 1, 16, device=device)
    assert not best_token.fits_corrected_rows(many, weight[:, :16].contiguous())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_convolution(rows: int, dtype: torch.dtype, device: torch.device) -> None:
    batch, size, taps, groups = 2, 48, 3, 6
    x = _random(batch, rows, size, device=device).to(dtype)
    base = _random(taps, size, device=device, seed=1).to(dtype)
    both = _random(batch, rows, 2, taps, groups, device=device, seed=2).to(dtype)
    for side in (0, 1):
        got, dynamic = convolve_rows(x, base, both[:, :, side]), both[:, :, side].double()
        want = torch.zeros(batch, rows, size, dtype=torch.float64, device=device)
        for i in range(rows):
            for tap in range(min(taps, i + 1)):
                kernel = base[tap].double() + dynamic[:, i, tap].repeat_interleave(
                    size // groups, -1
                )
                want[:, i] += kernel * x[:, i - tap].double()
        tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("inputs", "size", "batch"),
    some_of([(*sizes, batch) for sizes in ((40, 24), (144, 130)) for batch in (1, 3, 35)], 1, 2),
)
def test_gru(inputs: int, size: int, batch: int, dtype: torch.dtype, device: torch.device) -> None:
    """PyTorch's cell; from zeros, too, and with inputs that are looked up by tokens."""
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter multiplies no bfloat16 matrices")
    cell = torch.nn.GRUCell(inputs, size, bias=False).to(device, dtype)
    table = _random(50, inputs, device=device).to(dtype)
    first = torch.arange(batch, device=device)
    before, chosen = _random(batch, size, device=device, seed=1).to(dtype), (first * 7 + 3) % 50
    found = keys.new_keys(2, batch, device)
    found[1] = argmax_keys_ref(F.one_hot(chosen, 50).float(), 0)
    weights = cell.weight_ih, cell.weight_hh
    close = (
        {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    )
    for state in (before, None):
        for row, tokens in ((0, first % 50), (2, chosen)):
            x = table[tokens]
            with torch.no_grad():
                want = cell(x, state)
                place = keys.TokensBefore(first % 50, found, row)
                looked_up = gru.gru_step(table, state, *weights, place)
                torch.testing.assert_close(gru.gru_step(x, state, *weights), want, **close)
                torch.testing.assert_close(looked_up, want, **close)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 35])
def test_silu_of_state(batch: int, dtype: torch.dtype, device: torch.device) -> None:
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter multiplies no bfloat16 matrices")
    outputs, size = 20, 300
    base = _random(batch, 2, outputs, device=device).to(dtype)[:, 1]
    state = _random(batch, size, device=device, seed=1).to(dtype)
    weight = _random(outputs, size + 8, device=device, seed=2).to(dtype)[:, 8:]
    got = gru.silu_of_state(base, state, weight)
    want = F.silu(base.double() + state.double() @ weight.double().T)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=10 * tolerance)


# --- heads --------------------------------------------------------------------------------------

VOCAB, HIDDEN, ROWS, BATCH = 300, 32, 5, 3
LILICORR: dict[str, Any] = {
    "lilicorr_candidate_topk": 4,
    "lilicorr_hidden_size": 16,
    "lilicorr_num_layers": 1,
    "lilicorr_num_heads": 2,
    "lilicorr_mlp_ratio": 2.0,
    "lilicorr_factor_dim": 8,
    "lilicorr_vector_eps": 1e-6,
    "lilicorr_logit_scale": 10.0,
}
PRUNED = ", a third of the tokens"
HEADS: Mapping[str, tuple[HeadConfig, Mapping[str, Any]]] = {
    "selector": (selector.SelectorConfig(24, 2), {}),
    "domino": (domino.DominoConfig(24, 20, 1), {domino.POOL: 90}),
    "domino, all tokens": (domino.DominoConfig(24, 20, 1), {}),
    "lilicorr": (
        correlator.LiLiCorrConfig.read({"hidden_size": HIDDEN, **LILICORR}, "a test"),
        {},
    ),
    **{
        f"dspark {kind}": (markov.MarkovConfig(16, kind, True, True, None), {})
        for kind in markov.MARKOV_HEADS
    },
}


@pytest.mark.parametrize("name", [*HEADS, *(f"dspark {k}{PRUNED}" for k in markov.MARKOV_HEADS)])
@pytest.mark.parametrize("seed", [4, 0, 1, 2, 3])
def test_a_head_drafts_the_same_with_kernels(
    name: str, seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruned = name.endswith(PRUNED)
    config, options = HEADS[name.removesuffix(PRUNED)]
    columns = VOCAB // 3 if pruned else VOCAB
    sizes = BodySizes(HIDDEN, VOCAB, columns, ROWS, 1e-6)
    head: DraftHead = config.build(sizes, WeightPlacement(torch.float32, device), options)
    for i, weight in enumerate(head.weights().values()):
        weight.copy_(_random(*weight.shape, device=device, seed=10 + i) * 0.4)
    if device.type == "cuda" or not isinstance(head, markov.DSparkHead):
        head.prepare()  # which would pack W2 for kernels of the CPU
    if isinstance(head, markov.DSparkHead):
        assert head.markov_head.fuses(torch.empty(BATCH, 1, HIDDEN, device=device))
    embedding = _random(VOCAB, HIDDEN, device=device, seed=3)
    lm_head = _random(columns, HIDDEN, device=device, seed=4)
    d2t = torch.arange(columns, device=device) * 2 if pruned else None  # 0, 3, 6 ...
    vocabulary = Vocabulary(embedding, lm_head, d2t)

    def draw(scores: torch.Tensor, first: int, ids: torch.Tensor | None = None) -> torch.Tensor:
        return vocabulary.to_target_ids(best(scores, first, ids))

    block = Block(
        hidden=_random(BATCH, ROWS, HIDDEN, device=device, seed=100 + seed),
        first=1,
        depth=ROWS - 1,
        anchor=torch.tensor([3, 17, 250], device=device),
        before=None,
        greedy=True,
        context=_random(BATCH, HIDDEN, device=device, seed=200 + seed),
    )
    with monkeypatch.context() as patch:
        if seed == 4:  # `embed` is not a look-up
            patch.setattr(vocabulary, "embedding_rows", lambda: None)
        fused = head.propose(block, vocabulary, draw)
    with monkeypatch.context() as patch:
        for module in (selector, domino, correlator, markov, top_columns, gru):
            patch.setattr(module, "use_triton", lambda tensor: False)
        plain = head.propose(block, vocabulary, draw)
    assert torch.equal(fused.tokens, plain.tokens)
    assert (fused.confidence is None) == (plain.confidence is None)


def test_walks_take_the_first_of_equal_scores(device: torch.device) -> None:
    flat = torch.zeros(1, 2, 3, device=device)
    ids = torch.tensor([[[9, 4, 7], [8, 1, 2]]], device=device)
    table = torch.zeros(10, 4, device=device)
    anchor = torch.tensor([5], device=device)
    tokens = walk.selector_walk(
        anchor, flat, ids, torch.zeros(1, 2, 4, device=device), table, table
    )
    assert tokens.tolist() == [[9, 8]]
    vectors = torch.zeros(1, 2, 3, 4, device=device)
    start = torch.zeros(1, 4, device=device)
    assert walk.lattice_walk(start, vectors, vectors, ids, 2).tolist() == [[9, 8]]
