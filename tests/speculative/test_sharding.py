"""Whether ranks divide a draft, where the user has not said it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import ModelConfig, load_model_config
from forerun.core.errors import ConfigError
from forerun.layers.communication import UnreducedRank
from forerun.llm.bundled import bundled
from forerun.models.draft_base import dense_layout
from forerun.speculative.base import SpecCaps, SpeculativeAlgorithm
from forerun.speculative.sharding import MIN_DIVIDED_SIZE, resolve_draft

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@dataclass
class Drafter:
    """The part of an algorithm that is asked."""

    hidden_size: int = MIN_DIVIDED_SIZE
    shards_draft: bool = True
    heads: int = 8

    def resolve(self, config: EngineConfig, target: ModelConfig, dtype: torch.dtype) -> SpecCaps:
        if self.heads % config.draft_ranks:
            raise ConfigError("does not divide")
        return SpecCaps(draft_hidden_size=self.hidden_size)


def ranks(drafter: Drafter, device: torch.device = GPU, **settings: Any) -> int:
    target = load_model_config(bundled("target"))
    algorithm: SpeculativeAlgorithm = drafter  # type: ignore[assignment]
    config = EngineConfig(**{"tp_size": 2, **settings})
    config, caps = resolve_draft(config, algorithm, target, torch.float32, device)
    assert caps.draft_hidden_size == drafter.hidden_size
    return config.draft_ranks


def test_large_drafts_are_divided_on_gpus() -> None:
    assert ranks(Drafter()) == 2
    assert ranks(Drafter(), tp_size=4) == 4
    assert ranks(Drafter(MIN_DIVIDED_SIZE - 64)) == 1


@pytest.mark.parametrize("drafter", [Drafter(shards_draft=False), Drafter(heads=3)])
def test_a_draft_that_cannot_be_divided_stays_whole(drafter: Drafter) -> None:
    assert ranks(drafter) == 1


def test_a_setting_is_kept() -> None:
    assert ranks(Drafter(), speculative_draft_tp_size=1) == 1
    assert ranks(Drafter(64), CPU, speculative_draft_tp_size=2) == 2
    assert ranks(Drafter(), tp_size=1) == 1
    assert ranks(Drafter(), CPU) == 1


def test_a_draft_of_a_target_with_whole_experts_stays_whole() -> None:
    assert ranks(Drafter(), ep_size=2) == 1
    assert ranks(Drafter(), ep_size=2, speculative_draft_tp_size=2) == 2


def test_an_mlp_that_cannot_be_divided_is_known_before_loading() -> None:
    model = replace(load_model_config(bundled("target")), num_heads=4, num_kv_heads=4)
    odd = replace(model, intermediate_size=model.intermediate_size + 1)
    assert dense_layout(model, 1, torch.float32, UnreducedRank(0, 2)).paged
    assert dense_layout(odd, 1, torch.float32, UnreducedRank(0, 1)).paged
    with pytest.raises(ConfigError, match="intermediate size"):
        dense_layout(odd, 1, torch.float32, UnreducedRank(0, 2))
