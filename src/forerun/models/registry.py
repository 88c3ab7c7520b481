"""The model families, by the architecture name in `config.json`."""

from __future__ import annotations

from pathlib import Path

from forerun.config.model_config import ModelConfig, load_model_config
from forerun.config.rope_config import RopeConfig
from forerun.core.errors import ConfigError, nearest
from forerun.layers.rope import rotary_dims
from forerun.models.base import CausalLM
from forerun.models.deepseek import DeepseekForCausalLM
from forerun.models.formats.registry import weight_format
from forerun.models.gemma import GemmaForCausalLM
from forerun.models.gemma4 import Gemma4ForCausalLM
from forerun.models.glm4 import Glm4ForCausalLM
from forerun.models.glm4_moe import Glm4MoeForCausalLM
from forerun.models.gpt_oss import GptOssForCausalLM
from forerun.models.granite import GraniteForCausalLM
from forerun.models.llama import LlamaForCausalLM
from forerun.models.mixtral import MixtralForCausalLM
from forerun.models.olmo2 import Olmo2ForCausalLM
from forerun.models.phi3 import Phi3ForCausalLM
from forerun.models.qwen2 import Qwen2ForCausalLM
from forerun.models.qwen3 import Qwen3ForCausalLM
from forerun.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM
from forerun.models.qwen3_moe import Qwen3MoeForCausalLM
from forerun.models.qwen3_next import Qwen3NextForCausalLM
from forerun.models.transformers_model import TransformersForCausalLM, load_transformers_config

TRANSFORMERS = "transformers"  # of the setting `model_impl`

# LlamaForCausalLM serves those that differ in the config alone (biases, windows, layers' RoPE).
ARCHITECTURES: dict[str, type[CausalLM]] = {
    "DeepseekV2ForCausalLM": DeepseekForCausalLM,
    "DeepseekV3ForCausalLM": DeepseekForCausalLM,
    "Gemma2ForCausalLM": GemmaForCausalLM,
    "Gemma3ForCausalLM": GemmaForCausalLM,
    "Gemma4ForCausalLM": Gemma4ForCausalLM,
    "Glm4ForCausalLM": Glm4ForCausalLM,
    "Glm4MoeForCausalLM": Glm4MoeForCausalLM,
    "GptOssForCausalLM": GptOssForCausalLM,
    "GraniteForCausalLM": GraniteForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "MixtralForCausalLM": MixtralForCausalLM,
    "Olmo2ForCausalLM": Olmo2ForCausalLM,
    "Olmo3ForCausalLM": Olmo2ForCausalLM,
    "Phi3ForCausalLM": Phi3ForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
    "Qwen3NextForCausalLM": Qwen3NextForCausalLM,
    "Qwen3_5ForCausalLM": Qwen3_5ForCausalLM,
    "Qwen3_5MoeForCausalLM": Qwen3_5MoeForCausalLM,
    "SeedOssForCausalLM": LlamaForCausalLM,
    "SmolLM3ForCausalLM": LlamaForCausalLM,
}


def target_config(folder: Path, model_impl: str) -> ModelConfig:
    """Reads the config of a target. `model_impl`: the setting.

    Raises:
        ConfigError: a file is missing or invalid, or transformers does not know the model.
    """
    if model_impl == TRANSFORMERS:
        return load_transformers_config(folder)
    return load_model_config(folder)


def target_class(config: ModelConfig, model_impl: str) -> type[CausalLM]:
    """`model_class`, or transformers' own modules."""
    return TransformersForCausalLM if model_impl == TRANSFORMERS else model_class(config)


def model_class(config: ModelConfig) -> type[CausalLM]:
    """The class of a target.

    Raises:
        ConfigError: a family, activation or weight format that Forerun does not have.
    """
    if config.architecture not in ARCHITECTURES:
        raise ConfigError(
            f"Architecture {config.architecture!r} is not supported."
            f"{nearest(config.architecture, ARCHITECTURES)} Known: {', '.join(ARCHITECTURES)};"
            " or set model_impl transformers, which runs transformers' own modules, slower."
        )
    if config.raw.get("is_causal") is False:
        raise ConfigError("is_causal false is not supported: attention of a causal LM is causal.")
    family = ARCHITECTURES[config.architecture]
    check_layers(config, family)
    return family


def check_layers(
    config: ModelConfig, family: type[CausalLM] = CausalLM, partial_rotary: bool = False
) -> None:
    """Refuses what the layers do not compute, rather than compute something else.

    Args:
        family: of a target; drafts are made of the shared layers.
        partial_rotary: a draft may rotate part of a head.
    """
    raw = config.raw
    activation = raw.get("hidden_act", "silu")
    if activation not in family.activations:
        raise ConfigError(
            f"hidden_act {activation!r} is not supported; Forerun has {family.activations[0]} only."
        )
    weight_format(config)  # refuses other quantizations
    for dim in config.layer_rotary_dims:
        if dim % 2:
            name = "qk_rope_head_dim" if raw.get("qk_rope_head_dim") else "head_dim"
            raise ConfigError(f"{name} {dim} is odd; rotary embedding needs an even one.")
    for rope, dim in set(zip(config.layer_ropes, config.layer_rotary_dims, strict=True)):
        _check_rope(rope, dim, partial_rotary or family.partial_rotary)


def _check_rope(rope: RopeConfig, dim: int, may_be_partial: bool) -> None:
    partial, rotary = rope.partial_rotary_factor, rotary_dims(rope, dim)
    if partial != 1.0 and not may_be_partial:
        raise ConfigError(
            f"partial_rotary_factor {partial} is not supported; it must be 1 (and rope_dim, if"
            f" there is one, {dim})."
        )
    if not 0 < rotary <= dim or rotary % 2:
        raise ConfigError(
            f"partial_rotary_factor {partial} of head_dim {dim} rotates {rotary}"
            " dims; it must be an even number of them."
        )
    factors = 0 if rope.longrope is None else len(rope.longrope.short_factor)
    if factors and factors != rotary // 2:
        raise ConfigError(
            f"longrope has {factors} factors for {rotary // 2} pairs of dims; correct config.json."
        )
