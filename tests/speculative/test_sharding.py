"""Whether ranks divide a draft, where the user has not said it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import ModelConfig, load_model_config
from forerun.core.errors import ConfigError
from forerun.llm.bundled import bundled
from forerun.speculative.base import SpecCaps, SpeculativeAlgorithm
from forerun.speculative.sharding import MIN_DIVIDED_SIZE, with_draft_ranks

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


def ranks(drafter: Drafter, device: torch.device = GPU, **settings: Any) -> int | None:
    target = load_model_config(bundled("target"))
    algorithm: SpeculativeAlgorithm = drafter  # type: ignore[assignment]
    config = EngineConfig(**{"tp_size": 2, **settings})
    return with_draft_ranks(
        config, algorithm, target, torch.float32, device
    ).speculative_draft_tp_size


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
