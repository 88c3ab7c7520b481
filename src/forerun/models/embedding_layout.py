"""How a model folder says that embeddings are made: the files of sentence-transformers.

`modules.json` lists what follows the model (Pooling, Normalize), and `1_Pooling/config.json` says
which hidden states are pooled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from forerun.config.json_files import check_regular, read_json
from forerun.core.errors import ConfigError, shown
from forerun.core.pooling import POOLINGS, Pooling

MODULES, POOLING, TOKENIZER = "modules.json", "1_Pooling", "tokenizer_config.json"
# By what sentence-transformers calls them, without `pooling_mode_` and `_tokens` or `_token`.
_MODES: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_FLAG = "pooling_mode_"


@dataclass(frozen=True)
class EmbeddingLayout:
    """How a folder's embeddings are made; the defaults are those of a folder that says nothing."""

    pooling: Pooling = "last"
    normalize: bool = True  # to length 1
    is_embedding: bool = False  # the folder says how hidden states are pooled
    adds_eos: bool = False  # texts end with EOS, whether or not the tokenizer adds it
    problem: str | None = None  # why its embeddings cannot be made as it says

    def with_pooling(self, name: str | None) -> EmbeddingLayout:
        """The same with what the user asks for, one of `POOLINGS`, if that is something."""
        kind = next((each for each in POOLINGS if each == name), None)
        return self if kind is None else replace(self, pooling=kind, problem=None)


class _Module(msgspec.Struct):
    type: str
    path: str = ""

    @property
    def kind(self) -> str:
        return self.type.rpartition(".")[2]


def embedding_layout(folder: Path, tokenizer: Path) -> EmbeddingLayout:
    """
    Args:
        tokenizer: its folder.

    Raises:
        ConfigError: a file is not what it should be.
    """
    adds_eos = (tokenizer / TOKENIZER).is_file() and bool(
        read_json(tokenizer / TOKENIZER).get("add_eos_token")
    )
    modules = _modules(folder / MODULES)
    path = next((each.path for each in modules if each.kind == "Pooling"), POOLING)
    pooling = folder / Path(path).name / "config.json"  # never outside of the folder
    if not modules and not pooling.is_file():
        return EmbeddingLayout(adds_eos=adds_eos)
    modes = _modes(read_json(pooling)) if pooling.is_file() else ["lasttoken"]
    problem = None
    if others := [each.kind for each in modules if each.kind not in _KINDS]:
        problem = f"{folder / MODULES} has a module {shown(others[0])}, which is not supported"
    elif len(modes) != 1 or modes[0] not in _MODES:
        problem = f"{pooling} asks for pooling by {' and '.join(modes) or 'nothing'}"
    normalizes = not modules or any(each.kind == "Normalize" for each in modules)
    mode = _MODES.get(modes[0], "last") if modes else "last"
    pools = pooling.is_file() or any(each.kind == "Pooling" for each in modules)
    return EmbeddingLayout(mode, normalizes, pools, adds_eos, problem)


_KINDS = ("Transformer", "Pooling", "Normalize")


def _modules(path: Path) -> list[_Module]:
    if not path.exists():
        return []
    check_regular(path)
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[_Module])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} is not readable: {error}. Download it again.") from None


def _modes(config: dict[str, Any]) -> list[str]:
    """The names of the kinds of pooling that a config asks for."""
    named = config.get("pooling_mode")
    names = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    names += [key for key, value in config.items() if key.startswith(_FLAG) and value is True]
    short = (str(each).removeprefix(_FLAG) for each in names)
    return [each.removesuffix("_tokens").removesuffix("_token") for each in short]
