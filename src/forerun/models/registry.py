"""The model families, by the architecture name in `config.json`."""

from __future__ import annotations

from forerun.config.model_config import ModelConfig
from forerun.core.errors import ConfigError, nearest
from forerun.models.base import CausalLM
from forerun.models.deepseek import DeepseekForCausalLM
from forerun.models.llama import LlamaForCausalLM
from forerun.models.quantization import fp8_blocks
from forerun.models.qwen2 import Qwen2ForCausalLM
from forerun.models.qwen3 import Qwen3ForCausalLM
from forerun.models.qwen3_moe import Qwen3MoeForCausalLM

ARCHITECTURES: dict[str, type[CausalLM]] = {
    "DeepseekV2ForCausalLM": DeepseekForCausalLM,
    "DeepseekV3ForCausalLM": DeepseekForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,  # the sliding window is in the config
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
}


def model_class(config: ModelConfig) -> type[CausalLM]:
    """The class of a target.

    Raises:
        ConfigError: a family, activation or weight format that Forerun does not have.
    """
    if config.architecture not in ARCHITECTURES:
        raise ConfigError(
            f"Architecture {config.architecture!r} is not supported."
            f"{nearest(config.architecture, ARCHITECTURES)} Supported: {', '.join(ARCHITECTURES)}."
        )
    check_layers(config)
    return ARCHITECTURES[config.architecture]


def check_layers(config: ModelConfig) -> None:
    """Refuses what the shared layers do not compute, rather than compute something else."""
    raw = config.raw
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"hidden_act {activation!r} is not supported; Forerun has silu only.")
    fp8_blocks(config)  # refuses other quantizations
    rope = raw.get("rope_parameters") or {}
    partial = rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if float(partial) != 1.0:
        raise ConfigError(f"partial_rotary_factor {partial} is not supported; it must be 1.")
    if config.rotary_dim % 2:
        name = "qk_rope_head_dim" if raw.get("qk_rope_head_dim") else "head_dim"
        raise ConfigError(f"{name} {config.rotary_dim} is odd; rotary embedding needs an even one.")
