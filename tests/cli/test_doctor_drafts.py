"""`forerun doctor --speculative-draft-model-path`: what a draft is, and what is wrong with it.

Gemma 4's assistant is in tests/engine/test_gemma4_assistant.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.config.engine_config import EngineConfig
from forerun.config.model_config import load_model_config
from forerun.core.errors import ConfigError
from forerun.doctor.draft import explain_draft
from forerun.speculative.registry import BUILT_IN, get_algorithm
from tests import chain_models as models
from tests.golden_engine import GOLDEN

HEADS = GOLDEN.parent / "heads"


def test_a_block_draft(forerun) -> None:
    folder = HEADS / "dspark-speculators-fillin-pruned-b6"
    draft = json.loads(
        forerun("doctor", "--speculative-draft-model-path", str(folder), "--json").out
    )["draft"]
    assert draft["head"] == "DSpark head (vanilla Markov, rank 16, confidence head)"
    assert draft["algorithms"] == ["DFLASH", "DDTREE"]
    assert explain_draft(HEADS / "dflash2-zlab-b8")["algorithms"] == ["DFLASH"]  # no trees
    assert (draft["layout"], draft["num_drafts"], draft["num_verify_tokens"]) == ("fill-in", 5, 6)
    assert (draft["vocab_size"], draft["draft_vocab_size"]) == (512, 96)
    assert draft["weights"] == "as the config says"
    shown = forerun("doctor", "--speculative-draft-model-path", str(HEADS / "dflash2-zlab-b8")).out
    assert "draft       head: candidate selector (best 8, rank 16)" in shown
    assert "draft       convolutions: True" in shown


def test_whether_a_draft_fits_its_target(forerun, tmp_path: Path) -> None:
    def fits(draft: Path) -> tuple[int, Any]:
        given = (
            "--speculative-draft-model-path",
            str(draft),
            "--model-path",
            str(HEADS / "target"),
        )
        result = forerun("doctor", *given, "--json")
        return result.code, json.loads(result.out)["draft"].get("fits_the_target")

    name = "dspark-speculators-b5"
    assert fits(HEADS / name) == (0, "yes")
    shutil.copytree(HEADS / name, tmp_path / name)
    config = json.loads((tmp_path / name / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"][-1] < 77
    config["aux_hidden_state_layer_ids"][-1] = 77
    (tmp_path / name / "config.json").write_text(json.dumps(config))
    code, reason = fits(tmp_path / name)
    assert code == 1 and "does not fit the target: it reads layer 76" in reason  # from 1 there
    assert fits(HEADS / "target") == (0, None)  # a model of its own


EXPECTED: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "eagle3": (
        models.eagle3,
        {
            "kind": "EAGLE-3 head",
            "algorithms": ["EAGLE3"],
            "num_drafts": 5,
            "rows": "a pass for each draft",
            "target_layer_ids": [1, 3, 4],
            "mask_token": None,
            "draft_vocab_size": models.PRUNED,
        },
    ),
    "speculators": (
        partial(models.eagle3, whole=True),
        {
            "kind": "EAGLE-3 head",
            "num_drafts": 2,
            "num_verify_tokens": 3,
            "target_layer_ids": [1, 3, 4],
            "draft_vocab_size": models.VOCAB,
        },
    ),
    "p-eagle": (
        models.peagle,
        {
            "kind": "P-EAGLE head",
            "algorithms": ["EAGLE3"],
            "layers": 2,
            "num_drafts": 8,
            "rows": "one pass over masks",
            "mask_token": models.MASK,
        },
    ),
    "mtp": (
        models.nextn,
        {
            "kind": "multi-token prediction of LlamaForCausalLM",
            "algorithms": ["NEXTN", "EAGLE"],
            "layers": 1,
            "target_layers": models.LAYERS,
            "num_drafts": 3,
            "reads": "the target's hidden state after its final norm, then each layer's own",
        },
    ),
    "mtp-layers": (
        partial(models.nextn, layers=4),
        {
            "layers": 4,
            "num_drafts": 4,
            "rows": "a pass for each draft, of layers 1 to 4 and of the last one again",
        },
    ),
    "standalone": (
        models.standalone,
        {
            "kind": "a model of its own",
            "algorithms": ["STANDALONE"],
            "layers": models.LAYERS,
            "num_drafts": 4,
            "mask_token": None,
        },
    ),
    "pard": (
        models.pard,
        {
            "kind": "PARD's model",
            "algorithms": ["STANDALONE"],
            "num_drafts": 8,
            "rows": "one pass over masks",
            "mask_token": models.MASK,
        },
    ),
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_every_kind_is_told_by_its_files(kind: str, tmp_path: Path) -> None:
    """With weights, without one of them, with one too many, and from the config alone."""
    make, expected = EXPECTED[kind]
    folder = tmp_path / kind
    make(folder)
    found = explain_draft(folder)
    assert {name: found[name] for name in expected} == expected
    assert found["weights"] == "as the config says"
    assert set(found["algorithms"]) <= set(BUILT_IN)
    assert json.loads(json.dumps(found)) == found
    path = folder / "model.safetensors"
    weights = load_file(path)
    last = max(name for name in weights if "mlp" in name)
    save_file({name: w for name, w in weights.items() if name != last}, path)
    assert last in explain_draft(folder)["weights"]
    unknown = last.partition("mlp")[0] + "gru.weight"
    save_file({**weights, unknown: torch.ones(3)}, path)
    assert unknown in explain_draft(folder)["weights"]
    path.unlink()
    assert explain_draft(folder) == {**found, "weights": "not here"}


def test_an_eagle3_head_under_another_name(tmp_path: Path) -> None:
    """Community files say LlamaForCausalLM; keys without a meaning are listed."""
    models.eagle3(tmp_path)
    path = tmp_path / "config.json"
    config = {**models.EAGLE3, "architectures": ["LlamaForCausalLM"]}
    config["eagle_config"] = {**config["eagle_config"], "use_aux_hidden_state": True, "tap": 3}
    path.write_text(json.dumps(config))
    found = explain_draft(tmp_path)
    assert (found["kind"], found["keys_not_read"]) == ("EAGLE-3 head", ["tap"])


def test_keys_of_a_block_draft_that_are_not_read(tmp_path: Path) -> None:
    """None of published files, and all that a body does not compute."""
    for folder in HEADS.glob("*-b?"):
        assert explain_draft(folder)["keys_not_read"] == []
    config = json.loads((HEADS / "causal-zlab-full-b8" / "config.json").read_text())
    added = {"hyper_gate": True, "num_experts": 8, "attention_multiplier": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(config | added | {"num_heads": None}))
    assert explain_draft(tmp_path)["keys_not_read"] == sorted(added)
    config = json.loads((HEADS / "dspark-speculators-b5" / "config.json").read_text())
    config["transformer_layer_config"]["num_experts"] = 8
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert explain_draft(tmp_path)["keys_not_read"] == ["transformer_layer_config.num_experts"]


def test_speculators_types(tmp_path: Path) -> None:
    """One that nothing serves, and one that is no model of its own."""
    config = json.loads((HEADS / "dspark-speculators-b5" / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "speculators_model_type": "dflash3"}))
    with pytest.raises(ConfigError, match=r"'dflash3' is not known.*'dflash'.*Known: .*dspark"):
        explain_draft(tmp_path)
    path.write_text(json.dumps(config))
    settings = EngineConfig(speculative_draft_model_path=str(tmp_path))
    target = load_model_config(HEADS / "target")
    for name in ("STANDALONE", "NEXTN", "EAGLE"):
        with pytest.raises(ConfigError, match="'dspark' draft; set speculative_algorithm DFLASH"):
            get_algorithm(name).resolve(settings, target, torch.float32)


def test_what_is_no_draft(tmp_path: Path) -> None:
    config = {**models.CONFIG, "architectures": ["MedusaModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="Architecture 'MedusaModel' is not supported"):
        explain_draft(tmp_path)
    with pytest.raises(ConfigError, match="is not a folder"):
        explain_draft(tmp_path / "none")


def test_what_is_wrong_with_a_draft(forerun, tmp_path) -> None:
    source = HEADS / "domino-zlab-shift-b7"
    config = json.loads((source / "config.json").read_text())
    shutil.copy(source / "model.safetensors", tmp_path)
    config["dflash_config"]["gru_hidden_dim"] = 16
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = forerun("doctor", "--speculative-draft-model-path", str(tmp_path), "--json")
    assert "prefix_gru.weight_ih_l0" in json.loads(result.out)["draft"]["weights"]
    assert result.code == 1
    config["dflash_config"]["gru_layers"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = forerun("doctor", "--speculative-draft-model-path", str(tmp_path))
    assert result.code == 2
    assert "dflash_config has the unknown gru_layers" in result.error.replace("'", "")
