"""What `forerun doctor` says of a draft: how its files are read, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forerun.core.errors import ConfigError
from forerun.models.dflash import check_dflash_files
from forerun.models.dflash_config import load_dflash_config


def explain_draft(folder: Path) -> dict[str, Any]:
    """Returns body, head, row layout and windows of a DFLASH draft, as JSON values.

    Raises:
        ConfigError: its config is not that of such a draft, or is not understood.
    """
    config = load_dflash_config(folder)
    return {
        "head": "none" if config.head is None else config.head.describe(),
        "layout": "anchor-first" if config.sample_from_anchor else "fill-in",
        "block_size": config.block_size,
        "num_drafts": config.num_drafts,
        "num_verify_tokens": config.num_drafts + 1,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "causal": list(config.causal),
        "windows": list(config.windows),
        "attention_sinks": list(config.sinks),
        "value_scale": config.value_scale,
        "convolutions": config.convolution is not None,
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token": config.mask_token_id if config.mask_token is None else config.mask_token,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "weights": _weights(folder),
    }


def _weights(folder: Path) -> str:
    if not any(folder.glob("*.safetensors")):
        return "not here"
    try:
        check_dflash_files(folder)
    except ConfigError as error:
        return str(error)
    return "as the config says"
