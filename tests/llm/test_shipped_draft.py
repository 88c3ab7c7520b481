"""The draft that ships for a real model: found by the target's shape, small, without a head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun import LLM, SamplingParams
from forerun.config.engine_config import EngineConfig
from forerun.evals.acceptance import Acceptance
from forerun.evals.word_problems import TEST_SEED, problems
from forerun.llm import bundled as shipped
from forerun.llm.bundled import PAIR
from forerun.llm.setup import checked_config, with_models
from forerun.models.dflash import check_dflash_files
from forerun.models.dflash_config import load_dflash_config

needs_pair = pytest.mark.skipif(
    not all((PAIR / part / "config.json").exists() for part in ("target", "draft")),
    reason="the bundled pair is not there",
)

WEIGHTS = "model.safetensors"
LIMIT = 20 << 20  # bytes of weights in a wheel

TOY = {"model_path": str(PAIR / "target")}


def filled_in(**settings: str) -> str | None:
    config: EngineConfig = checked_config(settings)
    return with_models(config)[0].speculative_draft_model_path


@pytest.fixture
def toys_draft_ships(monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if the bundled pair were the real one."""
    monkeypatch.setattr(shipped, "REAL_DRAFT", PAIR / "draft")
    return PAIR / "draft"


@needs_pair
@pytest.mark.parametrize("algorithm", ["DFLASH", "DSPARK"])
def test_a_target_of_that_shape_gets_the_draft(toys_draft_ships: Path, algorithm: str) -> None:
    assert filled_in(**TOY, speculative_algorithm=algorithm) == str(toys_draft_ships)


@needs_pair
def test_what_is_given_or_needs_none_stays(toys_draft_ships: Path) -> None:
    given = {**TOY, "speculative_draft_model_path": str(PAIR / "eagle3")}
    assert filled_in(**given, speculative_algorithm="DFLASH") == str(PAIR / "eagle3")
    for algorithm in ("EAGLE3", "NGRAM"):
        assert filled_in(**TOY, speculative_algorithm=algorithm) is None
    assert filled_in(**TOY) is None


@needs_pair
def test_other_targets_get_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = json.loads((PAIR / "draft" / "config.json").read_text())
    for name, other in (("num_target_layers", 30), ("hidden_size", 512), ("vocab_size", 49152)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**config, name: other}))
        monkeypatch.setattr(shipped, "REAL_DRAFT", folder)
        assert filled_in(**TOY, speculative_algorithm="DFLASH") is None


@needs_pair
def test_a_pruned_draft_without_a_head_serves(tmp_path: Path) -> None:
    """The pair's draft without the last tokens: the target's rows, its texts, and acceptance."""
    config = json.loads((PAIR / "draft" / "config.json").read_text())
    ids = torch.arange(config["vocab_size"] - 64)
    (tmp_path / "config.json").write_text(json.dumps({**config, "draft_vocab_size": len(ids)}))
    offsets = {"d2t": ids - torch.arange(len(ids))}
    save_file(load_file(PAIR / "draft" / "model.safetensors") | offsets, tmp_path / WEIGHTS)
    params = SamplingParams(temperature=0, max_new_tokens=32)
    asked = problems(1, TEST_SEED)[0].question
    settings = {"device": "cpu", "dtype": "float32", "max_total_tokens": 1024}
    with LLM(**settings) as plain:
        expected = plain.chat([{"role": "user", "content": asked}], params)
    drafts: dict[str, Any] = {
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": str(tmp_path),
        "speculative_adaptive": False,
    }
    with LLM(**settings, **drafts) as llm:
        found = llm.chat([{"role": "user", "content": asked}], params)
    assert found.output_ids == expected.output_ids
    acceptance = Acceptance.of(found.meta_info)
    assert acceptance.accept_length is not None
    assert acceptance.accept_length > 4


def test_an_installation_without_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shipped, "REAL_DRAFT", tmp_path)
    assert shipped.real_draft() is None


@pytest.mark.skipif(shipped.real_draft() is None, reason="no draft ships")
def test_the_files_of_the_shipped_draft() -> None:
    folder = shipped.REAL_DRAFT
    check_dflash_files(folder)
    config = load_dflash_config(folder)
    assert (config.vocab_size, config.target_hidden_size) == (49152, 576)
    assert config.num_target_layers == 30
    assert sum(file.stat().st_size for file in folder.iterdir()) < LIMIT
    assert (folder / "README.md").is_file()
