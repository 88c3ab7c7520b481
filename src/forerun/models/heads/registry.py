"""The heads that are known: which of them a checkpoint has, and what belongs to it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from forerun.core.errors import ConfigError
from forerun.models.heads.base import HeadConfig, HeadFiles
from forerun.models.heads.correlator import LiLiCorrConfig
from forerun.models.heads.gru import DominoConfig
from forerun.models.heads.markov import MarkovConfig
from forerun.models.heads.refiner import XPressConfig
from forerun.models.heads.selector import SelectorConfig

# Of two that a config shows, the first is meant: XPress and LiLiCorr may sit on another's body.
HEADS: tuple[type[HeadConfig], ...] = (
    LiLiCorrConfig,
    XPressConfig,
    MarkovConfig,
    DominoConfig,
    SelectorConfig,
)
# Speculators' types of a body with these heads or none; and of all drafts, with what serves them.
SPECULATORS = ("dflash", *(head.files.names[0] for head in HEADS))
SERVED_BY = dict.fromkeys(SPECULATORS, "DFLASH") | {"eagle3": "EAGLE3", "peagle": "EAGLE3"}
HEAD_KEYS = frozenset(key for head in HEADS for key in head.keys_read.__struct_fields__)
HEAD_OPTIONS = [option for head in HEADS for option in head.options]
REFUSED = (HeadFiles("P-EAGLE", ("peagle", "peaglespeculator"), r"mask_hidden", r"mask_hidden"),)


def read_head(keys: Mapping[str, Any], where: str) -> HeadConfig | None:
    """The head that a config describes; None: there is only a body.

    Args:
        keys: of config.json, those of `dflash_config` among them.

    Raises:
        ConfigError: it is not supported, incomplete, or there are two.
    """
    for files in REFUSED:
        sign = files.sign(keys)
        if sign is not None:
            raise ConfigError(
                f"{where}: this is a {files.name} draft ({sign}); set speculative_algorithm EAGLE3,"
                " which serves it."
            )
    signs = {head: sign for head in HEADS if (sign := head.files.sign(keys)) is not None}
    if not signs:
        return None
    if len(signs) > 1:
        names = " and ".join(f"{head.files.name} ({sign})" for head, sign in signs.items())
        raise ConfigError(f"{where} has signs of several heads: {names}. Remove the wrong ones.")
    return next(iter(signs)).read(keys, where)


def named_head(keys: Mapping[str, Any]) -> type[HeadConfig] | None:
    """The head that a config is named after, which may be off (`markov_rank: 0`)."""
    return next((head for head in HEADS if head.files.name_in(keys) is not None), None)


def predicts_from_anchor(keys: Mapping[str, Any], head: HeadConfig | None) -> bool:
    """The row layout of a config that does not state it: whether row 0 predicts, too."""
    # DeepSpec's own DFlash drafts are DSpark files with `markov_rank: 0`.
    kind = named_head(keys) if head is None else head
    return kind is not None and kind.anchor_first


def looks_like_head_key(key: str) -> bool:
    """Whether a key begins as those of a head do, whether it is known or not."""
    return any(files.is_key(key) for files in (*REFUSED, *(head.files for head in HEADS)))


def refuse_other_tensors(names: Iterable[str], head: HeadConfig | None, where: str) -> None:
    """Raises ConfigError where a checkpoint holds tensors of a head that its config lacks.

    Served without it, the text stays right and hardly a draft is accepted.
    """
    others = [*REFUSED, *(kind.files for kind in HEADS if not isinstance(head, kind))]
    for name in names:
        for files in others:
            if re.fullmatch(files.tensors, name):
                raise ConfigError(
                    f"{where}: tensor {name} belongs to a {files.name} head, which config.json"
                    " does not describe. Restore the keys of the head in config.json."
                )
