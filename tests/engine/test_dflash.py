"""DFLASH in the engine: validation at start, both checkpoint formats, blocks and windows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.core.errors import ConfigError
from forerun.models.heads.base import Block
from forerun.scheduler.adaptive_width import FixedWidth
from forerun.speculative.base import Draft, ObserveInput, ProposeInput
from forerun.speculative.dflash import DFlash
from tests.golden_engine import CASES, GOLDEN, golden_llm, without_layout_check
from tests.models.dflash_oracle import Oracle

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


def keys(**given: Any) -> Edit:
    return lambda config: config.update(given)


def in_speculators_format(config: dict[str, Any]) -> None:
    config.update(SLIDING)
    speculators(anchor=False)(config)
    config["sliding_window_non_causal"] = True


# All layers slide, by less than a block, so that the pools are windowed.
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}
# Edits of the golden draft's config -> what they change in the reference. Its weights were trained
# otherwise, so that it drafts badly; what is held is what it drafts.
ATTENTION: dict[str, tuple[Edit, dict[str, Any]]] = {
    "causal": (keys(is_causal=True), {"causal": True}),
    "causal-windows": (
        keys(causal=True, layer_types=["sliding_attention", "full_attention"], sliding_window=14),
        {"causal": True, "windows": (14, None)},
    ),
    "windows-around-tokens": (
        keys(is_causal=False, **SLIDING),
        {"windows": (6, 6), "sliding": "row"},
    ),
    "windows-before-blocks": (in_speculators_format, {"windows": (6, 6), "sliding": "block"}),
    "rope-of-each-type": (
        keys(
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=14,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        ),
        {"windows": (14, None), "thetas": (100.0, 5e5)},
    ),
    "scaled-values-and-sinks": (
        keys(attention_value_scale=0.612, attention_sink_bias=True),
        {"value_scale": 0.612},
    ),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_every_draft_equals_the_reference(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Misread attention leaves the output right: each block's tokens are compared.

    With pages of 1 token, windowed pools keep nothing that is not needed.
    """
    edit, changes = ATTENTION[name]
    folder = Path(edited_draft(tmp_path, edit))
    weights = load_file(folder / "model.safetensors")
    if "sinks" in name:
        sink = torch.tensor([-1.0, 0.0, 1.0, 2.0, 3.0])
        weights |= {f"layers.{i}.self_attn.attention_sink_bias": sink + i for i in range(2)}
        save_file(weights, folder / "model.safetensors")
    steps, aux = recorded(monkeypatch)
    case = CASES[4]
    settings = {"speculative_draft_model_path": str(folder), "disable_cuda_graph": True}
    with golden_llm("DFLASH", page_size=1, **settings) as llm:
        assert bool(llm.engine.limits.window) == all(changes.get("windows", [None]))
        out = llm.generate(input_ids=case["prompt"], sampling_params=greedy(case))
    assert out.output_ids == case["output"] and len(steps) > 3

    oracle = Oracle(weights, 2, 5, 1, 32, 5e5, 1e-6, **{"windows": (None, None), **changes})
    table = load_file(GOLDEN / "target" / "model.safetensors")
    embed = table["model.embed_tokens.weight"]  # the LM head, too
    text = case["prompt"] + case["output"]
    for start, drafts in steps[:-1]:
        block = embed[[text[start]] + [258] * 9]
        hidden = oracle.block(block, torch.stack([aux[p] for p in range(start)]))
        assert drafts == (hidden[1:] @ embed.T).argmax(1).tolist(), f"at {start}"


def recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[list[tuple[int, list[int]]], dict[int, Tensor]]:
    """Of one request: start and drafts of every step, and the target's states by position."""
    steps: list[tuple[int, list[int]]] = []
    aux: dict[int, Tensor] = {}
    propose, observe = DFlash.propose, DFlash.observe

    def record_propose(self: DFlash, step: ProposeInput) -> Draft:
        draft = propose(self, step)
        steps.append((int(step.start[0]), draft.tokens[0].tolist()))
        return draft

    def record_observe(self: DFlash, step: ObserveInput) -> None:
        assert step.aux_hidden_states is not None
        count = step.num_committed
        committed = len(step.positions) if count is None else int(count[0])
        for i, position in enumerate(step.positions[:committed].tolist()):
            aux[position] = step.aux_hidden_states[i].clone()
        observe(self, step)

    monkeypatch.setattr(DFlash, "propose", record_propose)
    monkeypatch.setattr(DFlash, "observe", record_observe)
    return steps, aux


@pytest.mark.covering(0, 2)
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


# --- causal blocks --------------------------------------------------------------------------------


@pytest.mark.parametrize("anchor_first", [False, True])
def test_a_causal_block_is_cut_to_the_width(
    anchor_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer rows run, and they draft what they draft in a whole block."""
    keys = {"is_causal": True, "sample_from_anchor": anchor_first}
    draft = edited_draft(tmp_path, lambda config: config.update(keys))
    seen: list[tuple[int, int, list[int]]] = []  # rows, start, drafts
    run_block, propose = DFlash._run_block, DFlash.propose

    def counted(self: DFlash, step: ProposeInput) -> Block:
        block = run_block(self, step)
        seen.append((block.hidden.shape[1], int(step.start[0]), []))
        return block

    def recorded(self: DFlash, step: ProposeInput) -> Draft:
        draft = propose(self, step)
        seen[-1][2].extend(draft.tokens[0].tolist())
        return draft

    monkeypatch.setattr(DFlash, "_run_block", counted)
    monkeypatch.setattr(DFlash, "propose", recorded)
    found: dict[int, dict[int, list[int]]] = {}
    texts = []
    with without_layout_check(
        golden_llm("DFLASH", speculative_draft_model_path=draft, max_running_requests=1)
    ) as llm:
        whole = llm.engine.scheduler.widths.widths[-1]
        for width in (whole, 4):
            monkeypatch.setattr(llm.engine.scheduler, "widths", FixedWidth((1, width)))
            seen.clear()
            asked = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
            out = llm.generate(input_ids=CASES[0]["prompt"], sampling_params=asked)
            texts.append(out.output_ids)
            assert {rows for rows, *_ in seen} == {width - anchor_first}
            found[width] = {start: drafts for _, start, drafts in seen}
    assert texts[0] == texts[1]
    common = found[whole].keys() & found[4].keys()
    assert common
    for start in common:
        assert found[4][start] == found[whole][start][:3]
