"""A GGUF file's metadata and names as a model folder of Hugging Face has them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from forerun.core.errors import ConfigError, shown
from forerun.models.gguf.reader import GgufFile

# Names of a layer's tensors in GGUF, and in checkpoints.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SANDWICH = {  # of layers with norms after attention and MLP too
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROPE_FACTORS = "rope_freqs.weight"  # what Llama 3.1 and later divide their frequencies by


@dataclass(frozen=True)
class Family:
    """A `general.architecture` that is served."""

    architecture: str
    model_type: str
    permuted: bool = False  # rows of q and k as pairs (llama.cpp's RoPE), not halves
    gemma: bool = False  # norms are stored as w, not w - 1; norms around each part


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", permuted=True),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3"),
    "gemma2": Family("Gemma2ForCausalLM", "gemma2", gemma=True),
    "gemma3": Family("Gemma3ForCausalLM", "gemma3_text", gemma=True),
}
GEMMA3_PERIOD = 6  # every sixth layer attends to the whole context


def family_of(file: GgufFile) -> Family:
    """
    Raises:
        ConfigError: another architecture.
    """
    name = file.metadata.get("general.architecture")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise ConfigError(
            f"{file.path}: architecture {shown(name)} is not supported as GGUF. Known:"
            f" {', '.join(FAMILIES)}; take the model's safetensors instead."
        )
    return family


def config_of(file: GgufFile) -> dict[str, Any]:
    """The keys of config.json that the metadata has.

    Raises:
        ConfigError: a part of a divided model, another architecture, experts, or a key is missing
            or of another type.
    """
    _check_whole(file)
    family, keys = family_of(file), _Keys(file)
    if any("_exps." in name for name in file.tensors):
        raise ConfigError(f"{file.path}: mixtures of experts are not supported as GGUF.")
    heads, hidden = keys.number("attention.head_count"), keys.number("embedding_length")
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_size": hidden,
        "intermediate_size": keys.number("feed_forward_length"),
        "num_hidden_layers": keys.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.number("attention.head_count_kv", heads),
        "head_dim": keys.number("attention.key_length", hidden // max(heads, 1)),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.real("rope.freq_base", 10000.0),
        "max_position_embeddings": keys.number("context_length"),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": _dtype(file),
    }
    for name in ("bos", "eos"):
        token = _token_id(file, name)
        config |= {} if token is None else {f"{name}_token_id": token}
    rotated = keys.number("rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        raise ConfigError(
            f"{file.path}: rope.dimension_count is {rotated}, and heads have {config['head_dim']}"
            " dimensions; what rotates a part of them is not supported as GGUF."
        )
    scaling = _rope_scaling(file, keys, config)
    config |= {} if scaling is None else {"rope_scaling": scaling}
    return config | (_gemma(file, keys, config) if family.gemma else {})


def stored_name(file: GgufFile, name: str) -> str | None:
    """The name that a tensor has in checkpoints; None: it is not a weight."""
    stem, _, kind = name.rpartition(".")
    if name == ROPE_FACTORS:
        return None
    if stem in WHOLE:
        return f"{WHOLE[stem]}.{kind}"
    layer = re.fullmatch(r"blk\.(\d{1,5})\.(\w+)", stem)
    parts = LAYER | (SANDWICH if family_of(file).gemma else {})
    if layer is None or layer[2] not in parts:
        return name  # no model has it: `Checkpoint.check` says so
    return f"model.layers.{layer[1]}.{parts[layer[2]]}.{kind}"


def as_in_checkpoints(file: GgufFile, name: str, tensor: Tensor) -> Tensor:
    """A tensor, blocks or values, with its rows and values as checkpoints have them."""
    family = family_of(file)
    if family.gemma and name.endswith("norm.weight"):
        return tensor - 1
    if not (family.permuted and re.search(r"\.attn_[qk]\.", name)):
        return tensor
    keys, heads = _Keys(file), "attention.head_count"
    if ".attn_k." in name:
        heads = "attention.head_count_kv"
    count = keys.number(heads, keys.number("attention.head_count"))
    if count < 1 or tensor.shape[0] % (2 * count):
        raise ConfigError(f"{file.path}: {name} cannot be divided among {count} heads.")
    pairs = tensor.reshape(count, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


class _Keys:
    """Keys of the architecture, checked."""

    def __init__(self, file: GgufFile) -> None:
        self._file, self._prefix = file, f"{file.metadata['general.architecture']}."

    def number(self, key: str, default: int | None = None) -> int:
        """An integer >= 0; of a list per layer, the one value that all have."""
        value = self._get(key, default)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
            values = sorted(set(map(int, value)))
            value = values[0] if len(values) == 1 else values
        if type(value) is not int or value < 0:
            raise self._wrong(key, value, "an integer")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float):
            raise self._wrong(key, value, "a number")
        return float(f"{value:.7g}")  # stored in float32

    def has(self, key: str) -> bool:
        return f"{self._prefix}{key}" in self._file.metadata

    def _get(self, key: str, default: Any) -> Any:
        value = self._file.metadata.get(f"{self._prefix}{key}", default)
        if value is None:
            raise ConfigError(f"{self._file.path} lacks {self._prefix}{key}. Download it again.")
        return value

    def _wrong(self, key: str, value: Any, expected: str) -> ConfigError:
        return ConfigError(
            f"{self._file.path}: {self._prefix}{key} is {shown(value)}, expected {expected}."
        )


def _check_whole(file: GgufFile) -> None:
    """
    Raises:
        ConfigError: the file is one of those that a model is divided among, or no model.
    """
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise ConfigError(f"{file.path} holds {shown(kind)} (general.type), expected a model.")
    parts = file.metadata.get("split.count")
    if type(parts) is int and parts > 1:
        raise ConfigError(
            f"{file.path} is one of {parts} files that a model is divided among; merge them"
            " (llama-gguf-split --merge FIRST MERGED) and give the merged one."
        )


def _token_id(file: GgufFile, name: str) -> int | None:
    """A special token, such as "eos"; None: it is not said."""
    key = f"tokenizer.ggml.{name}_token_id"
    token = file.metadata.get(key)
    if token is not None and type(token) is not int:
        raise ConfigError(f"{file.path}: {key} is {shown(token)}, expected an integer.")
    return token


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{file.path} lacks token_embd.weight. Download it again.")
    return embedding.shape[0]


def _dtype(file: GgufFile) -> str:
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return "float32" if kinds == {"F32"} else "bfloat16"


def _rope_scaling(file: GgufFile, keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any] | None:
    if ROPE_FACTORS in file.tensors:
        shape, pairs = file.tensors[ROPE_FACTORS].shape, config["head_dim"] // 2
        if shape != (pairs,):
            raise ConfigError(
                f"{file.path}: {ROPE_FACTORS} has shape {list(shape)}, expected [{pairs}], one"
                " factor for each pair of dimensions. Download it again."
            )
        factors = list(map(float, file.dequantized(ROPE_FACTORS)))
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": config["max_position_embeddings"],
        }
    kind = file.metadata.get(f"{file.metadata['general.architecture']}.rope.scaling.type", "none")
    if not isinstance(kind, str) or kind not in ("none", "linear", "yarn"):
        raise ConfigError(f"{file.path}: rope.scaling.type {shown(kind)} is not supported.")
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": keys.real("rope.scaling.factor")}
    if kind == "yarn":
        original = keys.number("rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = original
    return scaling


def _gemma(file: GgufFile, keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    """What Gemma's configs have besides."""
    layers, window = config["num_hidden_layers"], keys.number("attention.sliding_window")
    third = config["model_type"] == "gemma3_text"
    period = GEMMA3_PERIOD if third else 2
    kinds = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)]
    # Gemma 2 27B and Gemma 3 27B scale scores by hidden size / heads, the others by head dim.
    largest = (layers, config["num_attention_heads"]) in ((46, 32), (62, 32))
    scalar = config["hidden_size"] // config["num_attention_heads"]
    out: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": window,
        "layer_types": kinds,
        "query_pre_attn_scalar": scalar if largest else config["head_dim"],
    }
    if third:
        out["rope_theta"] = keys.real("rope.freq_base", 1_000_000.0)
        out["rope_local_base_freq"] = 10000.0
    else:
        out["attn_logit_softcapping"] = keys.real("attn_logit_softcapping", 50.0)
        out["final_logit_softcapping"] = keys.real("final_logit_softcapping", 30.0)
    return out
