"""Heads over a DFlash body: known by name, so that none is served as plain DFlash.

A head corrects the logits of the body or chooses among them, and the body was trained to lean on
it. Without the head the text stays right and hardly a draft is accepted, so it must be refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from forerun.core.errors import ConfigError, shown


@dataclass(frozen=True)
class Head:
    """How the files of a head are recognised, whoever wrote them."""

    name: str
    names: tuple[str, ...]  # architectures, projector and speculators types, in lower case
    keys: str  # pattern of keys, at the top of config.json or in dflash_config
    tensors: str  # pattern
    switches: tuple[str, ...] = ()  # keys that can say that the head is not there

    def is_off(self, keys: Mapping[str, Any]) -> bool:
        """Whether the config says that only the body is there (`markov_rank: 0`)."""
        stated = [keys[name] for name in self.switches if keys.get(name) is not None]
        return bool(stated) and not any(stated)


HEADS = (
    Head(
        "LiLiCorr",
        ("lilicorr", "lilicorrdraftmodel", "lilicorrspeculator"),
        r"lilicorr_.*",
        r"(.*\.)?(lilicorr.*|factor_input_proj|pass_hidden_proj|slot_embedding|rank_embedding)\b.*",
        ("lilicorr_enabled",),
    ),
    Head(
        "XPress",
        ("xpress", "xpressdraftmodel", "xpressspeculator"),
        r"xpress_.*|num_jacobi_passes",
        r"refiner_head\..*|(w1|w2|down_h|down_g|in_proj|mix|mlp)\..*",
    ),
    Head(
        "DSpark",
        (
            "dspark",
            "qwen3dsparkmodel",
            "gemma4dsparkmodel",
            "dsparkdraftmodel",
            "dsparkspeculator",
        ),
        r"dspark_.*|markov_.*|enable_confidence_head|use_confidence_head|confidence_head_.*",
        r"(logit_head\.)?(markov_|confidence_|gate_proj\.|joint_proj\.).*",
        ("markov_rank", "enable_confidence_head", "use_confidence_head"),
    ),
    Head(
        "Domino",
        ("domino", "causal_v5", "dominodraftmodel", "dominospeculator"),
        r"shift_label|pure_draft_prefix_len|gru_hidden_dim|emb_dim",
        r"(logit_head\.)?(prefix_gru|embed_proj)\..*",
    ),
    Head(
        "DFlash2",
        (
            "dflash2",
            "dflash2draftmodel",
            "minimaxdflash2draftmodel",
            "dflash2beamdraftmodel",
            "dflash2speculator",
        ),
        r"conv_kernel_size|conv_group_size|selector_rank|selector_top_k",
        r"candidate_selector\..*|.*\.(attention|mlp)_conv\..*",
    ),
    Head("P-EAGLE", ("peagle", "peaglespeculator"), r"mask_hidden", r"mask_hidden"),
)
DSPARK = next(head for head in HEADS if head.name == "DSpark")


def names_of(keys: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a config calls its model: keys and names, in lower case."""
    for architecture in keys.get("architectures") or ():
        yield "architectures", str(architecture).lower()
    for key in ("projector_type", "speculators_model_type"):
        if keys.get(key) is not None:
            yield key, str(keys[key]).lower()


def is_headless(keys: Mapping[str, Any]) -> bool:
    """Of a config that has passed `refuse_heads`: whether it is a head's, and says there is none.

    So are DeepSpec's own DFlash drafts, DSpark files with `markov_rank: 0`.
    """
    named = any(name in DSPARK.names for _, name in names_of(keys))
    return named or any(key.startswith("dspark_") for key in keys)


def is_head_key(key: str) -> bool:
    """Whether a key is one of a head's, which `refuse_heads` knows."""
    return any(re.fullmatch(head.keys, key) for head in HEADS)


def refuse_heads(keys: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError where a config is that of a body with a head.

    `keys`: of config.json, those of `dflash_config` among them.
    """
    heads = [head for head in HEADS if not head.is_off(keys)]
    for key, name in names_of(keys):
        for head in heads:
            if name in head.names:
                raise _unsupported(head, where, f"{key} {shown(name)}")
    for head in heads:
        for key, value in keys.items():
            if value and re.fullmatch(head.keys, key):
                raise _unsupported(head, where, key)


def refuse_head_tensors(names: Iterable[str], where: str) -> None:
    """Raises ConfigError where a checkpoint holds a head's tensors, whatever its config says."""
    for name in names:
        for head in HEADS:
            if re.fullmatch(head.tensors, name):
                raise _unsupported(head, where, f"tensor {name}")


def _unsupported(head: Head, where: str, sign: str) -> ConfigError:
    return ConfigError(
        f"{where}: DFlash drafts with a {head.name} head ({sign}) are not supported yet. Use a"
        " plain DFlash draft of this target, or another speculative_algorithm."
    )
