"""Models divided among two ranks, which are threads here, compared with transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.config.model_config import load_model_config
from forerun.core.errors import ConfigError
from forerun.layers.communication import SINGLE_RANK, Communicator, UnreducedRank, WeightPlacement
from forerun.layers.embedding import LMHead, VocabEmbedding
from forerun.layers.sharding import Shard, VocabShard, even_shard, kv_head_shard
from forerun.models.base import CausalLM
from forerun.models.loader import load_target_at
from forerun.models.registry import model_class
from tests.models.support import _COMMON, CPU, FAMILIES, Loop, random_hf, save
from tests.thread_ranks import on_ranks

LENGTH = 30


@dataclass
class Saved:
    folder: Path
    ids: Tensor  # [LENGTH]
    logits: Tensor  # [LENGTH, V], of transformers


QUICK = (
    *("qwen3", "phi3", "deepseek-v3", "qwen3-moe", "qwen3-next", "qwen3.5"),
    *("gpt-oss", "gemma4-moe", "gemma4-per-layer", "olmo3"),
)
NAMES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive) for name in FAMILIES
]


@pytest.fixture(scope="module", params=NAMES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    kind, changes = FAMILIES[request.param]
    if changes.get("moe_intermediate_size") == 24:  # half of it is no multiple of 8
        changes = {**changes, "moe_intermediate_size": 32}
    if request.param == "gpt-oss":
        changes = {**changes, "intermediate_size": 192}  # 128 columns and 64
    hf = random_hf(kind(**{**_COMMON, **changes}))
    folder = save(hf, tmp_path_factory.mktemp(request.param))
    ids = torch.randint(0, 96, (LENGTH,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logits = hf(ids[None]).logits[0]
    return Saved(folder, ids, logits)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=3e-5)


def of_rank(folder: Path, comm: Communicator) -> tuple[CausalLM, Loop]:
    model = load_target_at(WeightPlacement(torch.float32, CPU, comm, allocate=False), folder)
    heads = model.config.num_heads // comm.size
    layout = model.kv_layout(torch.float32)
    return model, Loop.over(model.forward, layout, model.layer_masks, heads, 2)


def test_logits_of_two_ranks(saved: Saved) -> None:
    """Prefill of two requests, then passes of 3 tokens."""

    def work(comm: Communicator) -> list[Tensor]:
        model, loop = of_rank(saved.folder, comm)
        starts = [5, 13]
        hidden, _ = loop.ragged([(0, saved.ids[:start]) for start in starts])
        out = [model.compute_logits(hidden)]
        for _ in range(2):
            ids = torch.cat([saved.ids[start : start + 3] for start in starts])
            hidden, _ = loop.fixed(starts, ids)
            out.append(model.compute_logits(hidden))
            starts = [start + 3 for start in starts]
        return out

    first, second = on_ranks(2, work)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)  # to the last bit: ranks must not part
    wanted = [torch.cat([saved.logits[:5], saved.logits[:13]])]
    for i in range(2):
        wanted.append(torch.cat([saved.logits[s + 3 * i : s + 3 * i + 3] for s in (5, 13)]))
    for got, want in zip(first, wanted, strict=True):
        close(got, want)


def test_greedy_tokens_need_no_logits(saved: Saved) -> None:
    def work(comm: Communicator) -> Tensor:
        model, loop = of_rank(saved.folder, comm)
        hidden, _ = loop.ragged([(0, saved.ids)])
        return model.compute_argmax(hidden)

    first, second = on_ranks(2, work)
    assert first.tolist() == second.tolist() == saved.logits.argmax(-1).tolist()


def test_each_rank_holds_about_half_of_the_matrices(saved: Saved) -> None:
    config = load_model_config(saved.folder)

    def matrices(comm: Communicator) -> int:
        place = WeightPlacement(torch.float32, torch.device("meta"), comm)
        weights = model_class(config)(config, place, max_positions=1).weights()
        return sum(weight.numel() for weight in weights.values() if weight.dim() > 1)

    whole = matrices(SINGLE_RANK)
    both = [matrices(UnreducedRank(rank, 2)) for rank in range(2)]
    # Routers, latent projections and K/V heads of which there is one are on both.
    assert whole <= sum(both) <= 1.4 * whole
    assert max(both) <= 0.72 * whole


# --- parts of the vocabulary ------------------------------------------------------------------


def test_a_vocabulary_that_the_ranks_do_not_divide(vocab_size: int = 45) -> None:
    """Embedding and head of 3 ranks; the last one pads."""
    table = torch.randn(vocab_size, 8, generator=torch.Generator().manual_seed(0))
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    ids = torch.arange(vocab_size)

    def work(comm: Communicator) -> tuple[Tensor, Tensor, Tensor]:
        place = WeightPlacement(torch.float32, CPU, comm)
        embedding = VocabEmbedding(vocab_size, 8, place)
        head = LMHead(vocab_size, 8, place, tied=None)
        for module in (embedding, head):
            shard = module.shards("a.")["a.weight"]
            module.weights("a.")["a.weight"].copy_(shard.take(table))
            module.prepare()
        tied = LMHead(vocab_size, 8, place, tied=embedding)
        tied.prepare()
        close(tied(x), head(x))
        return embedding(ids), head(x), head.argmax(-x)

    for embedded, logits, best in on_ranks(3, work):
        assert torch.equal(embedded, table)
        close(logits, x @ table.T)
        assert best.tolist() == (-x @ table.T).argmax(-1).tolist()


def test_greedy_ties_and_invalid_logits_across_ranks() -> None:
    """The lowest id of equal logits; a NaN, +inf, or -inf alone is invalid."""
    inf, nan = torch.inf, torch.nan
    rows = [
        ([1.0] * 24, 0),
        ([0.0] * 7 + [2.0] * 17, 7),
        ([-0.0] * 8 + [0.0] * 16, 0),
        ([0.0] * 20 + [nan] + [5.0] * 3, -1),
        ([0.0, inf] + [5.0] * 22, -1),
        ([-inf] * 24, -1),
        ([-inf] * 23 + [-3.0], 23),
    ]
    wanted = torch.tensor([row for row, _ in rows])

    def work(comm: Communicator) -> Tensor:
        head = LMHead(24, 8, WeightPlacement(torch.float32, CPU, comm), tied=None)
        part = head.vocab.shard.take(wanted.T).T
        head.gemm = lambda x: part  # type: ignore[assignment]
        return head.argmax(torch.zeros(len(rows), 8))

    for best in on_ranks(3, work):
        assert best.tolist() == [token for _, token in rows]


# --- who has what -----------------------------------------------------------------------------


def test_shards_of_all_ranks_are_the_whole() -> None:
    whole = torch.arange(24.0).view(12, 2)
    ranks = [UnreducedRank(rank, 3) for rank in range(3)]
    parts = [even_shard(12, comm, "rows").take(whole) for comm in ranks]
    assert torch.equal(torch.cat(parts), whole)
    pairs = [Shard.joined(*[even_shard(6, comm, "rows")] * 2) for comm in ranks]
    assert [pair.ranges for pair in pairs][1] == (range(2, 4), range(8, 10))
    assert torch.equal(pairs[2].take(whole), whole[[4, 5, 10, 11]])
    vocab = [VocabShard.of(45, comm) for comm in ranks]
    assert [(v.first, v.count, v.rows) for v in vocab] == [(0, 16, 16), (16, 16, 16), (32, 13, 16)]


def test_kv_heads_are_shared_by_ranks_where_there_are_fewer() -> None:
    heads = [kv_head_shard(2, UnreducedRank(rank, 4)).ranges for rank in range(4)]
    assert heads == [(range(1),), (range(1),), (range(1, 2),), (range(1, 2),)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda comm: even_shard(40, comm, "attention heads"), "attention heads, 40.*: 1, 2, 4, 5"),
        (lambda comm: kv_head_shard(2, comm), "K/V heads, 2; take one that does: 1, 2"),
        (lambda comm: VocabShard.of(12, comm), "too many for a vocabulary of 12"),
    ],
)
def test_sizes_that_cannot_be_divided(make: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"tp_size 3.*{message}"):
        make(UnreducedRank(0, 3))
