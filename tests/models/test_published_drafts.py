"""Published drafts by their names: what a config of their form resolves to is what the docs say.

Sizes are small; the keys are those that each publisher writes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from forerun.core.errors import ConfigError
from forerun.models.dflash_config import load_dflash_config

DOCS = Path(__file__).resolve().parent.parent.parent / "docs" / "draft-checkpoints.md"
Config = dict[str, Any]

LAYERS: Config = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "layer_types": ["full_attention", "full_attention"],
}
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 256}
BODY = {"mask_token_id": 300, "target_layer_ids": [0, 2]}
MARKOV = {"markov_rank": 16, "markov_head_type": "vanilla"}
CONVOLVED = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 16,
    "selector_top_k": 8,
}


def z_lab(architecture: str, block: int, inner: Config, **top: Any) -> Config:
    """The layers' keys at the top, the draft's in `dflash_config`."""
    own = {"dflash_config": {**BODY, **inner}, "num_target_layers": 4, "block_size": block}
    return {**LAYERS, "architectures": [architecture], **own, **top}


def deepseek(architecture: str, rank: int, **top: Any) -> Config:
    """All keys at the top; no key says the layout."""
    head = {**MARKOV, "markov_rank": rank, "enable_confidence_head": rank > 0}
    own = {**BODY, **head, "confidence_head_with_markov": rank > 0, "num_anchors": 512}
    return {**LAYERS, "architectures": [architecture], "block_size": 7, **own, **top}


def speculators(kind: str, **top: Any) -> Config:
    """The layers' keys in `transformer_layer_config`, layers of the target counted from 1."""
    draft = {"mask_token_id": 300, "aux_hidden_state_layer_ids": [1, 3], "block_size": 8}
    own = {"speculators_model_type": kind, "transformer_layer_config": LAYERS, **draft}
    return {"architectures": ["DSparkSpeculator"], "draft_vocab_size": 512, **own, **top}


DSPARK = deepseek("Qwen3DSparkModel", 16)
PUBLISHED: dict[str, Config] = {
    "z-lab/Qwen3-8B-DFlash-b16": z_lab("DFlashDraftModel", 16, {}),
    "deepseek-ai/dflash_qwen3_8b_block7": deepseek("Qwen3DSparkModel", 0),
    "deepseek-ai/dspark_qwen3_4b_block7": DSPARK,
    "deepseek-ai/dspark_qwen3_8b_block7": DSPARK,
    "deepseek-ai/dspark_qwen3_14b_block7": DSPARK,
    "deepseek-ai/dspark_gemma4_12b_block7": deepseek(
        "Gemma4DSparkModel", 16, hidden_act="gelu_pytorch_tanh", final_logit_softcapping=30.0
    ),
    "RedHatAI/GLM-5.2-speculator.dspark": speculators(
        "dspark", **MARKOV, sample_from_anchor=False, enable_confidence_head=True
    ),
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16-DSpark": z_lab(
        "DFlashDraftModel",
        8,
        {
            **MARKOV,
            "projector_type": "dspark",
            "sample_from_anchor": False,
            "has_embed_tokens": True,
            "has_lm_head": False,
            "eagle_aux_hidden_state_layer_ids": [1, 3],
            "causal": True,
            "attention_sink_bias": True,
            "use_confidence_head": True,
        },
        **SLIDING,
    ),
    "z-lab/Qwen3.8-27B-DFlash2": z_lab("DFlash2DraftModel", 8, CONVOLVED, **SLIDING),
    "z-lab/Muse-Glimmer-30B-DFlash2": z_lab("DFlash2DraftModel", 8, CONVOLVED, **SLIDING),
    "Huang2020/Qwen3-8B-Domino-b16": z_lab(
        "DFlashDraftModel",
        16,
        {
            "projector_type": "domino",
            "shift_label": True,
            "pure_draft_prefix_len": 1,
            "gru_hidden_dim": 32,
            "emb_dim": 24,
        },
        emb_dim=24,
    ),
    "JetSpec/jetspec-qwen3-8b": z_lab("DFlashDraftModel", 16, {"causal": True}, is_causal=True),
    "JetSpec/jetspec-gpt-oss-20b": z_lab("DFlashDraftModel", 16, {"causal": True}, is_causal=True),
}


def rows() -> dict[str, list[str]]:
    """The rows of the table in the docs by their names."""
    table = re.findall(r"^\| ([\w.-]+/[\w.-]+) \| (.*) \|$", DOCS.read_text(), re.M)
    return {name: [cell.strip() for cell in rest.split("|")] for name, rest in table}


def test_every_row_has_a_config() -> None:
    assert list(rows()) == list(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_a_config_resolves_to(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    head, layout, block = rows()[name]
    if head == "refused":
        with pytest.raises(ConfigError, match="Gemma4DSparkModel"):
            load_dflash_config(tmp_path)
        return
    found = load_dflash_config(tmp_path)
    assert head == ("none" if found.head is None else found.head.files.name)
    assert layout == ("anchor-first" if found.sample_from_anchor else "fill-in")
    assert block == ("causal" if all(found.causal) else "not causal")
    assert all(found.causal) == any(found.causal)
