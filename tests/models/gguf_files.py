"""Writes GGUF files of small random models, with the package `gguf`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

from forerun.models.gguf.config import LAYER, SANDWICH, WHOLE

Names = Mapping[str, str]


def gguf_name(name: str, gemma: bool) -> str:
    """The name in GGUF of a checkpoint's tensor."""
    stem, _, kind = name.rpartition(".")
    whole = {theirs: ours for ours, theirs in WHOLE.items()}
    if stem in whole:
        return f"{whole[stem]}.{kind}"
    parts = {theirs: ours for ours, theirs in (LAYER | (SANDWICH if gemma else {})).items()}
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{parts[rest]}.{kind}"


def interleave(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of halves of heads as llama.cpp has them: pairs."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path, model: Any, kind: str | Names, extra: Mapping[str, Any] | None = None
) -> Any:
    """Writes a transformers model and changes its weights to those that the file has.

    `kind`: of all matrices, or of those whose names have a key, the first of these.
    """
    config = model.config
    arch = {"gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    gemma, writer = arch.startswith("gemma"), GGUFWriter(path, arch)
    keys = {
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
    }
    keys |= {"attention.sliding_window": config.sliding_window} if gemma else {}
    for key, value in keys.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    for key, value in (extra or {}).items():
        add = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}
        add[type(value)](f"{arch}.{key}", value)
    state = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values, heads = tensor.float(), None
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = interleave(values, heads)
        if gemma and name.endswith("norm.weight"):
            values = values + 1
        kinds = {"": kind} if isinstance(kind, str) else kind
        own = next(each for part, each in kinds.items() if part in name)
        own = own if values.dim() == 2 else "F32"
        number = GGMLQuantizationType[own]
        data = quantize(values.numpy(), number)
        writer.add_tensor(gguf_name(name, gemma), data, raw_dtype=number)
        read = torch.from_numpy(np.array(dequantize(data, number), np.float32))
        read = read.reshape(values.shape)
        if heads is not None:  # back to halves
            read = read.reshape(heads, -1, 2, read.shape[1]).transpose(1, 2).reshape(read.shape)
        state[name] = read - 1 if gemma and name.endswith("norm.weight") else read
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.load_state_dict(state, strict=False)
    return model
