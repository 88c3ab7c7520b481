"""The `config.json` of a draft to be trained: the target's shape, and what the options say.

It is read by the engine's own parsers, so a draft is trained as it will be served.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.config.json_files import read_json
from forerun.config.model_config import ModelConfig
from forerun.core.errors import ConfigError
from forerun.models.eagle3_config import default_target_layers
from forerun.models.further_layers import COUNT
from forerun_train.trainer.options import TrainOptions

DEFAULT_FEATURES = 5  # layers of the target that a draft reads
PARTIAL = ("partial_rotary_factor", "rope_dim")  # keys of a rope that rotates part of a head
CONVOLUTION = {"conv_kernel_size": 2, "conv_group_size": 16}


def spread_layers(num_layers: int, count: int = DEFAULT_FEATURES) -> tuple[int, ...]:
    """Layers of the target to read, as z-lab's drafts do: from layer 1 to the third from the end.

    Fewer than `count` where the target has no more.
    """
    if num_layers < 5 or count == 1:
        return tuple(dict.fromkeys((num_layers // 2, max(0, num_layers - 2))))
    places = (round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))
    return tuple(dict.fromkeys(places))


def check_layers(options: TrainOptions, target: ModelConfig) -> None:
    """
    Raises:
        ConfigError: the target has no such layers.
    """
    for layer in options.target_layer_ids or ():
        if not 0 <= layer < target.num_layers:
            raise ConfigError(
                f"target_layer_ids {list(options.target_layer_ids or ())} must lie between 0 and"
                f" {target.num_layers - 1}, the target's last layer."
            )


def dflash_config(
    options: TrainOptions, target: ModelConfig, mask_token: int, draft_vocab: int | None = None
) -> dict[str, Any]:
    """`config.json` in z-lab's layout, with keys that SGLang and vLLM read.

    Args:
        mask_token: id that stands for the unknown tokens of a block.
        draft_vocab: size of a pruned vocabulary.
    """
    layers = options.target_layer_ids or spread_layers(target.num_layers)
    inner: dict[str, Any] = {
        "block_size": options.block_size,
        "mask_token_id": mask_token,
        "target_layer_ids": list(layers),
    }
    top, of_head = HEAD_KEYS[options.kind](options)
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **_layers(options, target, options.num_layers),
        **({} if draft_vocab is None else {"draft_vocab_size": draft_vocab}),
        "num_target_layers": target.num_layers,
        "block_size": options.block_size,
        **top,
        "dflash_config": inner | of_head,
    }


def eagle3_config(
    options: TrainOptions, target: ModelConfig, draft_vocab: int | None = None
) -> dict[str, Any]:
    """`config.json` in SpecForge's layout."""
    layers = options.target_layer_ids
    if layers is None and target.num_layers >= 6:
        layers = default_target_layers(target.num_layers)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **_layers(options, target, 1),
        "draft_vocab_size": draft_vocab or target.vocab_size,
        "target_hidden_size": target.hidden_size,
        "mlp_bias": False,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(layers or spread_layers(target.num_layers)),
            "use_aux_hidden_state": True,
        },
        "speculators_config": {
            "proposal_methods": [{"speculative_tokens": options.block_size - 1}]
        },
    }


def mtp_config(target: Path) -> dict[str, Any]:
    """The target's `config.json` with one more layer, which predicts further ahead."""
    return {**read_json(target / "config.json"), COUNT: 1}


def mtp_prefix(target: ModelConfig) -> str:
    """What the names of its tensors begin with: the layer after the target's last one."""
    return f"model.layers.{target.num_layers}."


Keys = tuple[dict[str, Any], dict[str, Any]]  # at the top, and in dflash_config


def _dflash(options: TrainOptions) -> Keys:
    return {}, {}


def _dspark(options: TrainOptions) -> Keys:
    """Both as DeepSpec writes them, at the top, and as SpecForge does, inside."""
    keys = {
        "sample_from_anchor": True,
        "markov_rank": options.head_rank,
        "markov_head_type": options.markov_head_type,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return {"architectures": ["Qwen3DSparkModel"], **keys}, {"projector_type": "dspark", **keys}


def _dflash2(options: TrainOptions) -> Keys:
    selector = {"selector_rank": options.head_rank, "selector_top_k": options.selector_top_k}
    return {"architectures": ["DFlash2DraftModel"]}, CONVOLUTION | selector


def _domino(options: TrainOptions) -> Keys:
    return {}, {
        "projector_type": "domino",
        "shift_label": True,
        "pure_draft_prefix_len": 1,
        "gru_hidden_dim": options.head_rank,
        "emb_dim": options.head_rank,
    }


HEAD_KEYS = {"dflash": _dflash, "dspark": _dspark, "dflash2": _dflash2, "domino": _domino}


def _layers(options: TrainOptions, target: ModelConfig, count: int) -> dict[str, Any]:
    """Keys of the draft's layers: the target's sizes."""
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": options.intermediate_size or target.intermediate_size,
        "num_hidden_layers": count,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": target.rms_norm_eps,
        "max_position_embeddings": target.max_position,
        "rope_theta": target.rope.theta,
        "rope_parameters": _rope(target),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "layer_types": ["full_attention"] * count,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": count,
        "tie_word_embeddings": False,
        "use_cache": True,
    }


def _rope(target: ModelConfig) -> dict[str, Any]:
    """The target's rotary embedding where all of a head is rotated, else a plain one."""
    stated = target.raw.get("rope_parameters")
    if isinstance(stated, Mapping) and "rope_type" in stated and target.rope.scaling != "yarn":
        return {k: v for k, v in stated.items() if k not in PARTIAL}
    return {"rope_type": "default", "rope_theta": target.rope.theta}
