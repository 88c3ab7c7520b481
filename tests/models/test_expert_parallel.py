"""Experts divided whole among groups of ranks, which are threads here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forerun.core.errors import ConfigError
from forerun.kernels.moe.align import of_experts
from forerun.kernels.moe.experts import expert_partials
from forerun.kernels.moe.routing import Routing, align_ref, route_ref
from forerun.layers.communication import Communicator, UnreducedRank, WeightPlacement
from forerun.layers.moe import Experts
from forerun.models.base import CausalLM
from forerun.models.loader import load_target_at
from tests.models.support import _COMMON, CPU, FAMILIES, Loop, random_hf, save
from tests.thread_ranks import on_ranks

LENGTH = 20
META = torch.device("meta")


@pytest.fixture(
    scope="module", params=["qwen3-moe", "deepseek-v3", "qwen3-next", "gpt-oss", "gemma4-moe"]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, changes = FAMILIES[request.param]
    changes = {**changes, "moe_intermediate_size": 32}
    return save(random_hf(kind(**{**_COMMON, **changes})), tmp_path_factory.mktemp("moe"))


def load(folder: Path, comm: Communicator, ep_size: int) -> CausalLM:
    place = WeightPlacement(torch.float32, CPU, comm, ep_size=ep_size, allocate=False)
    return load_target_at(place, folder)


def logits(folder: Path, ranks: int, ep_size: int) -> list[Tensor]:
    """Of every rank."""
    ids = torch.randint(0, 96, (LENGTH,), generator=torch.Generator().manual_seed(3))

    def work(comm: Communicator) -> Tensor:
        model = load(folder, comm, ep_size)
        heads = model.config.num_heads // comm.size
        layout = model.kv_layout(torch.float32)
        loop = Loop.over(model.forward, layout, model.layer_masks, heads, 1)
        hidden, _ = loop.ragged([(0, ids)])
        return model.compute_logits(hidden)

    return on_ranks(ranks, work)


def test_logits(folder: Path) -> None:
    (want,) = logits(folder, 1, 1)
    first, second = logits(folder, 2, 2)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, want, rtol=1e-5, atol=3e-5)


def test_experts_of_a_rank_are_divided_by_columns_within_its_group() -> None:
    """4 ranks in 2 groups: names, shapes, and all of the weights on somebody."""
    seen: dict[str, int] = {}
    for rank in range(4):
        place = WeightPlacement(torch.float32, META, UnreducedRank(rank, 4), ep_size=2)
        experts = Experts(6, 16, 32, place)
        assert experts.part == (range(3) if rank < 2 else range(3, 6))
        shards = experts.shards("e.")
        assert len(experts.other_ranks("e.")) == 9
        for name, view in experts.weights("e.").items():
            assert shards[name].ranges == (range(rank % 2 * 16, rank % 2 * 16 + 16),)
            seen[name] = seen.get(name, 0) + view.numel()
    assert len(seen) == 18 and set(seen.values()) == {16 * 32}


def test_partials_of_a_part_of_the_experts() -> None:
    """Other choices are zeros, whatever memory held; the parts add up to the whole."""
    draw = torch.Generator().manual_seed(0)
    x, w13 = torch.randn(7, 16, generator=draw), torch.randn(6, 16, 16, generator=draw)
    w2 = torch.randn(6, 16, 8, generator=draw)
    routed = route_ref(torch.randn(7, 6, generator=draw), None, Routing(6, 3))
    whole = expert_partials(x, w13, w2, routed)
    parts = [
        expert_partials(x, w13[part.start : part.stop], w2[part.start : part.stop],
                        of_experts(routed, part))
        for part in (range(2), range(2, 5), range(5, 6))
    ]  # fmt: skip
    torch.testing.assert_close(torch.stack(parts).sum(0), whole)
    for part, got in zip((range(2), range(2, 5), range(5, 6)), parts, strict=True):
        outside = (routed.experts < part.start) | (routed.experts >= part.stop)
        assert not got[outside.t()].any()


def test_tiles_of_other_ranks_have_no_rows() -> None:
    ids = torch.tensor([[0, 3], [1, 3], [2, 0]], dtype=torch.int32)
    routed = route_ref(torch.zeros(3, 4), None, Routing(4, 2))
    routed = of_experts(replace(routed, experts=ids, tiles=align_ref(ids, 4, 2)), range(2, 4))
    assert routed.is_part and routed.tiles is not None
    owner, first, rows = routed.tiles.tiles
    assert owner.tolist() == [0, 1, 0, 0, 0] and rows.tolist() == [1, 2, 0, 0, 0]
    assert first[:2].tolist() == [3, 4]


def test_numbers_that_do_not_divide_the_experts() -> None:
    place = WeightPlacement(torch.float32, META, UnreducedRank(0, 8), ep_size=4)
    with pytest.raises(
        ConfigError, match=r"ep_size 4 does not divide the model's 6 experts.* 1, 2"
    ):
        Experts(6, 16, 64, place)
