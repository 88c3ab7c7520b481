"""A draft whose tokens have other ids than the target's is refused before it drafts nonsense."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM
from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.llm.bundled import bundled
from forerun.speculative.same_tokens import check_same_tokens

Vocabulary = dict[str, Any]


def exchanged(vocabulary: Vocabulary) -> None:
    first, second = list(vocabulary)[5:7]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]


def shorter(vocabulary: Vocabulary) -> None:
    """Without a token that no merge makes or needs."""
    del vocabulary[max(vocabulary, key=vocabulary.__getitem__)]


def with_tokenizer(folder: Path, edit: Callable[[Vocabulary], None]) -> Path:
    """The folder with the target's tokenizer, changed."""
    tokenizer = json.loads((bundled("target") / "tokenizer.json").read_text())
    edit(tokenizer["model"]["vocab"])
    if edit is shorter:
        tokenizer["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_other_ids_are_refused(tmp_path: Path) -> None:
    draft = Path(shutil.copytree(bundled("draft"), tmp_path / "draft"))
    with_tokenizer(draft, exchanged)
    with pytest.raises(ConfigError, match=r"is not the target's: '.+' is token \d+ there and"):
        LLM(
            bundled("target"),
            speculative_algorithm="DFLASH",
            speculative_draft_model_path=str(draft),
        )


@pytest.mark.parametrize("edit", [lambda _: None, shorter])
def test_what_means_the_same_is_served(edit: Callable[[Vocabulary], None], tmp_path: Path) -> None:
    config = EngineConfig(model_path=str(bundled("target")))
    check_same_tokens(config, with_tokenizer(tmp_path, edit))


def test_without_tokenizers_nothing_is_compared(tmp_path: Path) -> None:
    with_tokenizer(tmp_path, exchanged)
    skipping = EngineConfig(model_path=str(bundled("target")), skip_tokenizer_init=True)
    check_same_tokens(skipping, tmp_path)
    check_same_tokens(EngineConfig(model_path=str(bundled("draft"))), tmp_path)


def test_a_file_that_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is no tokenizer: "):
        check_same_tokens(EngineConfig(model_path=str(bundled("target"))), tmp_path)
