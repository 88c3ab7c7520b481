"""Drafts in the layout of vLLM's speculators (0.9): other keys, and mostly the same tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from forerun.config.model_config import ModelConfig
from forerun.core.errors import ConfigError

ARCHITECTURES = {
    "dflash": "DFlashSpeculator",
    "dspark": "DSparkSpeculator",
    "dflash2": "DFlash2Speculator",
    "eagle3": "Eagle3Speculator",
}
# Keys of heads and convolutions, which stand at the top there.
OF_HEADS = (
    "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
    "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k",
)  # fmt: skip
NOT_OF_LAYERS = (
    "architectures", "dflash_config", "eagle_config", "speculators_config", "draft_vocab_size",
    "num_target_layers", "block_size", "target_hidden_size", "sample_from_anchor", *OF_HEADS,
)  # fmt: skip
PREFIXES = {"midlayer.": "layers.0."}  # of EAGLE-3's layer


def check_kind(kind: str) -> None:
    """
    Raises:
        ConfigError: speculators has no such draft.
    """
    if kind not in ARCHITECTURES:
        raise ConfigError(
            f"layout speculators has no {kind} drafts; known: {', '.join(ARCHITECTURES)}. Leave"
            " layout out."
        )


def speculators_config(
    kind: str, raw: Mapping[str, Any], target: ModelConfig, where: str
) -> dict[str, Any]:
    """`config.json` of speculators.

    Args:
        raw: `config.json` in the layout of z-lab, or for EAGLE-3 of SpecForge.
        where: the target, a path or a name.
    """
    inner = raw.get("dflash_config") or {}
    layers = {key: value for key, value in raw.items() if key not in NOT_OF_LAYERS}
    keys: dict[str, Any]
    if kind == "eagle3":
        read = raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        drafts = raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
        keys = {
            "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in read],
            "norm_before_residual": False,
            "target_hidden_size": raw["target_hidden_size"],
        }
    else:
        anchor_first = bool(inner.get("sample_from_anchor", False))
        rows = int(inner["block_size"])
        drafts = rows if anchor_first else rows - 1
        keys = {
            "block_size": rows,
            "aux_hidden_state_layer_ids": [layer + 1 for layer in inner["target_layer_ids"]],
            "mask_token_id": inner["mask_token_id"],
            "sample_from_anchor": anchor_first,
            **{key: inner[key] for key in OF_HEADS if key in inner},
        }
    return {
        "architectures": [ARCHITECTURES[kind]],
        "speculators_model_type": kind,
        "transformer_layer_config": layers,
        "draft_vocab_size": raw.get("draft_vocab_size", raw["vocab_size"]),
        **keys,
        "speculators_config": _proposals(kind, drafts, target, where),
        "tie_word_embeddings": False,
    }


def _proposals(kind: str, drafts: int, target: ModelConfig, where: str) -> dict[str, Any]:
    """How vLLM is to use it."""
    return {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafts}],
        "verifier": {"name_or_path": where, "architectures": [target.architecture]},
    }


def speculators_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under speculators' names."""
    out = {}
    for name, tensor in tensors.items():
        old = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
        out[PREFIXES.get(old, "") + name.removeprefix(old)] = tensor
    return out
