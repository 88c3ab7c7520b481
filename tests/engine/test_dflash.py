"""DFLASH in the engine: validation at start, both checkpoint formats, blocks and windows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun.core.errors import ConfigError
from tests.golden_engine import CASES, GOLDEN, golden_llm

Edit = Callable[[dict[str, Any]], None]


def greedy(case: dict[str, Any]) -> dict[str, Any]:
    keys = ("max_new_tokens", "stop_token_ids")
    return {"temperature": 0.0, "ignore_eos": True, **{k: case[k] for k in keys}}


def edited_draft(folder: Path, edit: Edit) -> str:
    """A copy of the golden draft with an edited `config.json`."""
    draft = folder / "draft"
    shutil.copytree(GOLDEN / "draft", draft)
    config = json.loads((draft / "config.json").read_text())
    edit(config)
    (draft / "config.json").write_text(json.dumps(config))
    return str(draft)


def speculators(anchor: bool) -> Edit:
    """Converts z-lab's config to speculators' format."""

    def edit(config: dict[str, Any]) -> None:
        inner = dict(config)
        dflash = inner.pop("dflash_config")
        config.clear()
        config.update(
            speculators_model_type="dflash",
            transformer_layer_config=inner,
            draft_vocab_size=inner["vocab_size"],
            block_size=inner.pop("block_size"),
            aux_hidden_state_layer_ids=[i + 1 for i in dflash["target_layer_ids"]],
            mask_token_id=dflash["mask_token_id"],
            sample_from_anchor=anchor,
        )

    return edit


def run(**settings: Any) -> list[Any]:
    with golden_llm("DFLASH", **settings) as llm:
        outs: list[Any] = llm.generate(
            input_ids=[c["prompt"] for c in CASES], sampling_params=[greedy(c) for c in CASES]
        )
        llm.engine.check()
    return outs


@pytest.mark.usefixtures("float32_drafts")
def test_speculators_format_gives_the_same_steps(tmp_path: Path) -> None:
    folder = edited_draft(tmp_path, speculators(anchor=False))
    for out, case in zip(run(speculative_draft_model_path=folder), CASES, strict=True):
        lengths = out.meta_info["spec_accept_lengths"]
        assert out.output_ids == case["output"]
        assert lengths[:-1] == case["accept"][: max(len(lengths) - 1, 0)]


def test_sampling_from_the_anchor_verifies_one_token_more(tmp_path: Path) -> None:
    """The weights were not trained for it, so little is accepted; the output is the same."""
    folder = edited_draft(tmp_path, speculators(anchor=True))
    outs = run(speculative_draft_model_path=folder)
    assert [o.output_ids for o in outs] == [c["output"] for c in CASES]
    info = outs[4].meta_info
    assert info["spec_num_proposed_drafts"] == 10 * info["spec_verify_ct"]


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("settings", "drafts"),
    [
        ({"speculative_dflash_block_size": 4}, 3),
        ({"speculative_num_draft_tokens": 6}, 5),
        ({"speculative_draft_window_size": 16}, 9),
        ({"speculative_dflash_block_size": 2, "speculative_num_draft_tokens": 2}, 1),
    ],
)
def test_blocks_and_windows_do_not_change_the_output(settings: dict[str, Any], drafts: int) -> None:
    outs = run(**settings)
    assert [o.output_ids for o in outs] == [c["output"] for c in CASES]
    info = outs[4].meta_info
    assert info["spec_num_proposed_drafts"] == drafts * info["spec_verify_ct"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"speculative_draft_model_path": "/no/such/folder"}, "not a folder"),
        ({"speculative_dflash_block_size": 0}, "positive"),
        ({"speculative_dflash_block_size": 11}, "trained at 10"),
        (
            {"speculative_dflash_block_size": 8, "speculative_num_draft_tokens": 6},
            "disagree",
        ),
        ({"speculative_draft_window_size": 9}, "below the block size 10"),
    ],
)
def test_settings_that_do_not_fit_the_draft_are_refused(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        golden_llm("DFLASH", **settings)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda c: c["dflash_config"].update(mask_token_id=320), "outside the vocabulary of 320"),
        (lambda c: c["dflash_config"].update(target_layer_ids=[1, 6]), "reads layer 6"),
        (lambda c: c.update(num_target_layers=36), "trained for layers: 36"),
        (lambda c: c.update(hidden_size=128), "hidden size 160"),
        (lambda c: c.update(vocab_size=512), "vocabulary is 512"),
        (lambda c: c["dflash_config"].pop("mask_token_id"), "names no mask token"),
        (lambda c: c["dflash_config"].update(target_layer_ids=[1, 2, 3]), "fc.weight"),
    ],
)
def test_a_draft_for_another_target_is_refused(tmp_path: Path, edit: Edit, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        golden_llm("DFLASH", speculative_draft_model_path=edited_draft(tmp_path, edit))
