"""Model configs, read from Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.config.hf_config import normalised
from forerun.config.json_files import read_json
from forerun.config.rope_config import RopeConfig, parse_ropes
from forerun.config.schema import ConfigKeys, ModelOptKeys, checked
from forerun.core.errors import ConfigError, shown

# Families whose `sliding_window` needs no `use_sliding_window`.
ALWAYS_WINDOWED = ("MistralForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM")
# Families whose sliding window holds for every layer; Qwen2 and Qwen3 begin at a layer.
WINDOW_IN_ALL_LAYERS = (*ALWAYS_WINDOWED, "Qwen3MoeForCausalLM")
LAYER_TYPES = ("full_attention", "sliding_attention", "linear_attention")


@dataclass(frozen=True)
class ModelConfig:
    """Fields that all model families share."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # of most layers, as is head_dim
    head_dim: int
    rotary_dim: int  # of each head: head_dim, or the rope part of an MLA head
    rms_norm_eps: float
    rope: RopeConfig  # of the last layer, like which MTP layers are built
    layer_ropes: tuple[RopeConfig, ...]
    max_position: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    dtype: str  # of the checkpoint: "bfloat16", "float16", "float32"
    # Per layer: None for full attention, else the sliding window as Hugging Face counts it.
    windows: tuple[int | None, ...]
    layer_head_dims: tuple[int, ...]
    layer_kv_heads: tuple[int, ...]
    raw: Mapping[str, Any]  # the whole config in one spelling (`hf_config`), for keys of one family

    @property
    def layer_rotary_dims(self) -> tuple[int, ...]:
        """Rotated dims of every layer's heads; see `rotary_dim`."""
        if self.rotary_dim != self.head_dim:
            return (self.rotary_dim,) * self.num_layers
        return self.layer_head_dims

    @property
    def longest_context(self) -> int:
        """Positions that the model has: `max_position`, or those to which YaRN extends it.

        Files that were extended by hand, as model cards tell, keep the shorter length.
        """
        ropes = {rope for rope in self.layer_ropes if rope.scaling == "yarn"}
        extended = [int(rope.factor * rope.original_max_position) for rope in ropes]
        return max(self.max_position, min(extended, default=0))

    def need(self, key: str) -> int:
        """An integer that only some families have.

        Raises:
            ConfigError: it is missing.
        """
        if self.raw.get(key) is None:
            raise ConfigError(f"config.json of {self.architecture} lacks {key!r}. Add it.")
        return int(self.raw[key])


def load_model_config(folder: Path) -> ModelConfig:
    """Reads `config.json`.

    Raises:
        ConfigError: a file is missing or invalid.
    """
    raw = load_raw(folder)
    return parse_model_config(raw, where=str(folder / "config.json"))


def load_raw(folder: Path) -> dict[str, Any]:
    """`config.json`; its `quantization_config` may be in ModelOpt's own file.

    Raises:
        ConfigError: a file is missing or invalid.
    """
    raw, apart = read_json(folder / "config.json"), folder / "hf_quant_config.json"
    if raw.get("quantization_config") or not apart.exists():
        return raw
    keys = checked(ModelOptKeys, read_json(apart), str(apart)).quantization
    return {**raw, "quantization_config": {"quant_method": "modelopt", **keys}}


def parse_model_config(raw: Mapping[str, Any], where: str = "config") -> ModelConfig:
    """The common fields of a Llama-like config.

    Args:
        raw: `config.json`; of a multimodal model, the text model is taken.
        where: named in error messages.

    Raises:
        ConfigError: a key is missing, or a value of another type, out of range or not supported.
    """
    checked(ConfigKeys, raw, where)
    raw = {key: value for key, value in normalised(raw).items() if value is not None}

    def need(key: str) -> Any:
        if key not in raw or raw[key] == []:
            raise ConfigError(f"{where} lacks {key!r}. Is this a Hugging Face causal LM config?")
        return raw[key]

    architectures = need("architectures")
    hidden, heads, layers = (
        int(need("hidden_size")),
        int(need("num_attention_heads")),
        int(need("num_hidden_layers")),
    )
    kv_heads = int(raw.get("num_key_value_heads") or heads)
    layer_kv_heads = _per_layer(raw, "layer_kv_heads", kv_heads, where)
    for count in (kv_heads, *layer_kv_heads):
        if heads % count:
            raise ConfigError(
                f"{where}: {heads} query heads cannot be shared among {count} key-value heads."
            )
    attention_bias = bool(raw.get("attention_bias", False))
    head_dim = int(raw.get("head_dim") or hidden // heads)
    if head_dim == 0:
        raise ConfigError(f"{where}: hidden_size {hidden} is too small for {heads} heads.")
    ropes = parse_ropes(raw, layers, where)
    return ModelConfig(
        architecture=str(architectures[0]),
        vocab_size=int(need("vocab_size")),
        hidden_size=hidden,
        intermediate_size=int(need("intermediate_size")),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=int(raw.get("qk_rope_head_dim") or head_dim),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=ropes[-1],
        layer_ropes=ropes,
        max_position=int(raw.get("max_position_embeddings", 4096)),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias,
        o_bias=bool(raw.get("attention_out_bias", attention_bias)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
        windows=_parse_windows(raw, layers, where),
        layer_head_dims=_per_layer(raw, "layer_head_dims", head_dim, where),
        layer_kv_heads=layer_kv_heads,
        raw=raw,
    )


def _per_layer(raw: Mapping[str, Any], key: str, common: int, where: str) -> tuple[int, ...]:
    """Numbers that every layer has of its own; `common`: where they have not."""
    layers = int(raw["num_hidden_layers"])
    values = raw.get(key)
    if values is None:
        return (common,) * layers
    if len(values) != layers:
        raise ConfigError(f"{where}: {len(values)} {key} for {layers} layers; correct one.")
    return tuple(map(int, values))


def _parse_windows(raw: Mapping[str, Any], layers: int, where: str) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    types = raw.get("layer_types")
    if types is not None and len(types) != layers:
        raise ConfigError(f"{where}: {len(types)} layer_types for {layers} layers; correct one.")
    unknown = sorted(set(types or ()) - set(LAYER_TYPES))
    if unknown:
        raise ConfigError(
            f"{where}: layers of type {shown(unknown[0])} are not supported. Known:"
            f" {', '.join(LAYER_TYPES)}."
        )
    if types is not None:
        return tuple(int(window) if t == "sliding_attention" and window else None for t in types)
    architecture = str(raw["architectures"][0])
    used = raw.get("use_sliding_window", architecture in ALWAYS_WINDOWED)
    if not used or not window:
        return (None,) * layers
    in_all = architecture in WINDOW_IN_ALL_LAYERS
    first = 0 if in_all else int(raw.get("max_window_layers", 28))  # full attention below it
    return tuple(int(window) if i >= first else None for i in range(layers))
