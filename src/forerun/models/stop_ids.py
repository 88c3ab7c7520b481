"""The token ids that end a generation, and which files name them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from forerun.config.engine_config import EngineConfig
from forerun.config.hf_config import normalised
from forerun.config.json_files import read_json
from forerun.core.errors import ConfigError, shown
from forerun.models.tokenizer import FILE, load_tokenizer

log = logging.getLogger("forerun")

TOKENIZER_FILES = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken")
GENERATION, CONFIG, TOKENIZER = "generation_config.json", "config.json", "tokenizer"

StopIds = Mapping[str, tuple[int, ...]]


def tokenizer_folder(config: EngineConfig, model_path: Path) -> Path:
    """Where the tokenizer is."""
    return Path(config.tokenizer_path) if config.tokenizer_path else model_path


def stop_ids(folder: Path, tokenizer: Path | None, vocab_size: int) -> StopIds:
    """The stop ids of a model folder, by what names them.

    They are the EOS ids of `generation_config.json`, of `config.json` and of the tokenizer, all
    of them: a fine-tune's config often keeps the base model's EOS, and only its tokenizer has the
    one that it writes. Ids outside of the vocabulary are left out, with a warning.

    Args:
        tokenizer: its folder, which may have none; None: it is not asked.

    Raises:
        ConfigError: a file is missing or invalid.
    """
    generation = folder / GENERATION
    said = read_json(generation).get("eos_token_id") if generation.exists() else None
    found = {
        GENERATION: _ids(said, generation),
        CONFIG: _ids(normalised(read_json(folder / CONFIG)).get("eos_token_id"), folder / CONFIG),
        TOKENIZER: _ids(_tokenizer_eos(tokenizer), tokenizer) if has_tokenizer(tokenizer) else (),
    }
    for name, ids in found.items():
        if outside := [i for i in ids if not 0 <= i < vocab_size]:
            listed = ", ".join(map(str, outside))
            text = "%s of %s: eos_token_id %s is outside the vocabulary of %d and ends nothing."
            log.warning(text, name, folder, listed, vocab_size)
    return {name: tuple(i for i in ids if 0 <= i < vocab_size) for name, ids in found.items()}


def has_tokenizer(folder: Path | None) -> TypeGuard[Path]:
    """Whether a folder has files of a tokenizer."""
    return folder is not None and any(any(folder.glob(name)) for name in TOKENIZER_FILES)


def union(ids: StopIds) -> tuple[int, ...]:
    """Each id once, those of `generation_config.json` first."""
    return tuple(dict.fromkeys(each for some in ids.values() for each in some))


def _ids(value: Any, where: Path) -> tuple[int, ...]:
    """One id, a list of them, or none.

    Raises:
        ConfigError: it is something else.
    """
    ids = value if isinstance(value, list | tuple) else () if value is None else (value,)
    if any(type(i) is not int for i in ids):
        raise ConfigError(
            f"{where}: eos_token_id must be a token id or a list of them, got {shown(value)};"
            " correct it."
        )
    return tuple(ids)


class _Token(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_Token] = []


def _tokenizer_eos(folder: Path) -> int | None:
    """The id of a tokenizer's `eos_token`, from its files alone where they say it plainly."""
    names = {_eos_name(folder / "tokenizer_config.json")}
    names |= {_eos_name(folder / "special_tokens_map.json")} - {None}
    if len(names) == 1 and (name := names.pop()) is not None and (folder / FILE).is_file():
        for token in _added_tokens(folder / FILE):
            if token.content == name:
                return token.id
    found: int | None = load_tokenizer(folder).eos_token_id
    return found


def _eos_name(path: Path) -> str | None:
    """The text of `eos_token` in a file; None: it is not said there."""
    value = read_json(path).get("eos_token") if path.is_file() else None
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _added_tokens(path: Path) -> Iterable[_Token]:
    """
    Raises:
        ConfigError: the file is not a tokenizer's.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=_TokenizerFile).added_tokens
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} is not a tokenizer: {error}. Download it again.") from None
