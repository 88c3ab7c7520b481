"""Layers behind a model's last one, which predict further ahead (MTP), as checkpoints store them.

DeepSeek-V3 numbers them on: `model.layers.{num_hidden_layers}.`. Qwen3-Next and Qwen3.5 have them
under `mtp.`, with one projection and norms for all; these names are mapped to DeepSeek's, those of
the common parts to the first layer's.
"""

from __future__ import annotations

from forerun.config.model_config import ModelConfig

COUNT = "num_nextn_predict_layers"
WITHOUT = ("Gemma4ForCausalLM",)  # its layers differ, and none says what a further one is like
# Qwen3-Next's config.json does not say that there is one.
HYBRIDS = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")


def count_layers(model: ModelConfig) -> int:
    """How many of them the checkpoint holds, or may hold."""
    if model.architecture in WITHOUT:
        return 0
    if model.architecture in HYBRIDS and COUNT not in model.raw:
        return int(model.raw.get("mtp_num_hidden_layers", 1) or 0)
    return int(model.raw.get(COUNT) or 0)


def share_ends(model: ModelConfig) -> bool:
    """Returns whether all have the same projection and norms around their decoder layers."""
    return model.architecture in HYBRIDS


def prefixes(model: ModelConfig) -> tuple[str, ...]:
    """Returns the prefix of each one's tensors."""
    first = model.num_layers
    return tuple(f"model.layers.{first + i}." for i in range(count_layers(model)))


def prefixes_to_rename(model: ModelConfig) -> dict[str, str]:
    """Beginnings of tensors' names, and what DeepSeek has instead."""
    layers = prefixes(model)
    if model.architecture not in HYBRIDS or not layers:
        return {}
    layer = layers[0]
    return {
        "mtp.fc.": f"{layer}eh_proj.",
        "mtp.pre_fc_norm_embedding.": f"{layer}enorm.",
        "mtp.pre_fc_norm_hidden.": f"{layer}hnorm.",
        **{f"mtp.layers.{i}.": name for i, name in enumerate(layers)},
        "mtp.norm.": f"{layer}shared_head.norm.",
    }
