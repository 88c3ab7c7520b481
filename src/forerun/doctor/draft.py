"""What `forerun doctor` says of a draft: how its files are read, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from forerun.config.json_files import read_json
from forerun.config.model_config import ModelConfig
from forerun.core.errors import ConfigError, OtherDraftError
from forerun.layers.communication import WeightPlacement
from forerun.models.dflash import check_dflash_files
from forerun.models.dflash_config import keys_not_read, load_dflash_config
from forerun.models.eagle3 import check_eagle3_files
from forerun.models.eagle3_config import Eagle3Config, Eagle3Keys, load_eagle3_config
from forerun.models.gemma4_assistant import check_assistant_files, load_assistant_config
from forerun.models.loader import check_target_files
from forerun.models.nextn import check_nextn_files, load_nextn_config
from forerun.speculative import dflash, eagle3, frozen_kv_mtp, nextn, standalone

FITS, NOT_HERE, AS_SAID = "yes", "not here", "as the config says"
LAST_STATE = "the target's hidden state after its final norm"


def explain_draft(folder: Path) -> dict[str, Any]:
    """What kind of draft it is, how it drafts and what it reads, as JSON values.

    Raises:
        ConfigError: its config is not that of a draft, or is not understood.
    """
    for explain in (_dflash, _eagle3, _assistant, _nextn):
        try:
            return explain(folder)
        except OtherDraftError:
            continue
    return _model(folder)


def fits_target(folder: Path, target: ModelConfig) -> str | None:
    """Whether a DFlash draft fits this target, as it is checked when they load; None: another."""
    try:
        dflash.check_fit(folder, load_dflash_config(folder), target)
    except OtherDraftError:
        return None
    except ConfigError as error:
        return str(error)
    return FITS


def is_usable(draft: Mapping[str, Any]) -> bool:
    """Whether an engine would take it, by what `explain_draft` and `fits_target` said."""
    return draft["weights"] in (NOT_HERE, AS_SAID) and draft.get("fits_the_target", FITS) == FITS


def _dflash(folder: Path) -> dict[str, Any]:
    config = load_dflash_config(folder)
    makes_trees = config.head is None or config.head.branches
    return {
        "kind": "block draft (DFlash)",
        "algorithms": ["DFLASH", "DDTREE"] if makes_trees else ["DFLASH"],
        "head": "none" if config.head is None else config.head.describe(),
        "layout": "anchor-first" if config.sample_from_anchor else "fill-in",
        "block_size": config.block_size,
        **_drafts(config.num_drafts, "one pass"),
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "causal": list(config.causal),
        "windows": list(config.windows),
        "attention_sinks": list(config.sinks),
        "value_scale": config.value_scale,
        "convolutions": config.convolution is not None,
        "reads": _outputs(config.target_layer_ids, config.target_hidden_size),
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token": config.mask_token_id if config.mask_token is None else config.mask_token,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "keys_not_read": keys_not_read(read_json(folder / "config.json")),
        "weights": _weights(folder, lambda: check_dflash_files(folder)),
    }


def _eagle3(folder: Path) -> dict[str, Any]:
    """EAGLE-3's and P-EAGLE's."""
    config = load_eagle3_config(folder)
    ids, mask = config.aux_layer_ids, config.mask_token_id
    states = "each draft's own hidden state" if mask is None else "a learned one for masks"
    return {
        "kind": "EAGLE-3 head" if mask is None else "P-EAGLE head",
        "algorithms": ["EAGLE3"],
        **_drafts(eagle3.default_steps(folder, config), _passes(mask)),
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "windows": list(config.model.windows),
        "norms": _norms(config),
        "reads": f"{_outputs(ids, config.target_hidden_size)}, and {states}",
        "target_layer_ids": None if ids is None else list(ids),
        "mask_token": mask,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "keys_not_read": _unknown_keys(folder),
        "weights": _weights(folder, lambda: check_eagle3_files(folder)),
    }


def _norms(config: Eagle3Config) -> list[str]:
    """What differs between EAGLE-3 drafts, as their keys call it."""
    names = ("qk_norm", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return [name for name in names if vars(config)[name]]


def _unknown_keys(folder: Path) -> list[str]:
    """Keys of `eagle_config` that mean nothing to Forerun."""
    inner = read_json(folder / "config.json").get("eagle_config") or {}
    return sorted(set(inner) - set(Eagle3Keys.__struct_fields__))


def _assistant(folder: Path) -> dict[str, Any]:
    config = load_assistant_config(folder)
    model = config.model
    heads = f"the best {config.chosen} of {config.centroids} centroids"
    return {
        "kind": "Gemma 4's assistant",
        "algorithms": ["FROZEN_KV_MTP"],
        "head": heads if config.centroids else "all tokens",
        **_drafts(frozen_kv_mtp.DEFAULT_STEPS, _passes(None)),
        "layers": model.num_layers,
        "layer_types": list(model.raw["layer_types"]),
        "hidden_size": model.hidden_size,
        "windows": list(model.windows),
        "reads": f"{LAST_STATE}, of {config.target_hidden_size}, and the target's K/V",
        "vocab_size": model.vocab_size,
        "weights": _weights(folder, lambda: check_assistant_files(folder, config)),
    }


def _nextn(folder: Path) -> dict[str, Any]:
    """A checkpoint's multi-token prediction (MTP) layers."""
    config = load_nextn_config(folder)
    place = WeightPlacement(torch.bfloat16, torch.device("meta"))
    each = "" if config.count == 1 else f", of layers 1 to {config.count} and of the last one again"
    return {
        "kind": f"multi-token prediction of {config.model.architecture}",
        "algorithms": ["NEXTN", "EAGLE"],
        **_drafts(nextn.default_steps(config), _passes(None) + each),
        "layers": config.count,
        "target_layers": config.model.num_layers,
        "hidden_size": config.model.hidden_size,
        "windows": [config.mask.window] * config.count,
        "reads": f"{LAST_STATE}, then each layer's own",
        "vocab_size": config.model.vocab_size,
        "weights": _weights(folder, lambda: check_nextn_files(folder, config, place)),
    }


def _model(folder: Path) -> dict[str, Any]:
    """A whole language model, or PARD's."""
    model = standalone.read_standalone(folder)
    mask = standalone.mask_token(folder, model)
    return {
        "kind": "a model of its own" if mask is None else "PARD's model",
        "algorithms": ["STANDALONE"],
        "architecture": model.architecture,
        **_drafts(standalone.default_steps(mask), _passes(mask)),
        "layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "windows": list(model.windows),
        "context_length": model.longest_context,
        "reads": "tokens alone: any target with the same tokenizer",
        "mask_token": mask,
        "vocab_size": model.vocab_size,
        "weights": _weights(folder, lambda: check_target_files(folder, model)),
    }


def _drafts(count: int, rows: str) -> dict[str, Any]:
    """`count`: by default."""
    return {"num_drafts": count, "num_verify_tokens": count + 1, "rows": rows}


def _passes(mask: int | None) -> str:
    """`mask`: the token that parallel drafts read."""
    return "a pass for each draft" if mask is None else "one pass over masks"


def _outputs(ids: tuple[int, ...] | None, size: int) -> str:
    layers = "a low, a middle and a high layer" if ids is None else f"layers {list(ids)}"
    return f"outputs of the target's {layers}, of {size} each"


def _weights(folder: Path, check: Callable[[], object]) -> str:
    if not any(folder.glob("*.safetensors")):
        return NOT_HERE
    try:
        check()
    except ConfigError as error:
        return str(error)
    return AS_SAID
