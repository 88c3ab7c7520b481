"""Token ids and counts on the client's side, without torch."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
from tokenizers import Tokenizer

from forerun.core.errors import ConfigError

TOKENIZER, CONFIG = "tokenizer.json", "config.json"
HINT: Final = "Give --tokenizer: a folder or Hub name with tokenizer.json (or config.json)."


@dataclass(frozen=True)
class Vocabulary:
    """`ids` may stand in a prompt; `tokenizer` is None where only a config was found."""

    ids: tuple[int, ...]
    tokenizer: Tokenizer | None = None

    @classmethod
    def load(cls, source: str | None) -> Vocabulary:
        """From a local folder or a Hub repository.

        Raises:
            ConfigError: neither a tokenizer nor a config is there.
        """
        if source is None:
            raise ConfigError(f"The server does not say where its tokenizer is. {HINT}")
        path = _find(source, TOKENIZER)
        if path is not None:
            return cls._of_tokenizer(path)
        path = _find(source, CONFIG)
        if path is None:
            raise ConfigError(f"There is no tokenizer at {source!r}. {HINT}")
        return cls(tuple(range(_vocab_size(path))))

    @classmethod
    def _of_tokenizer(cls, path: Path) -> Vocabulary:
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:
            # The library raises plain `Exception` for a file it cannot read.
            raise ConfigError(f"{path} is not a tokenizer: {error}.") from error
        special = {id for id, token in tokenizer.get_added_tokens_decoder().items()}
        ids = tokenizer.get_vocab(with_added_tokens=False).values()
        return cls(tuple(sorted(set(ids) - special)), tokenizer)

    def random_ids(self, rng: random.Random, length: int) -> list[int]:
        return rng.choices(self.ids, k=length)

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self._need().encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        return self._need().decode(ids)

    def _need(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ConfigError(f"This dataset needs a tokenizer, not only a config. {HINT}")
        return self.tokenizer


def _find(source: str, name: str) -> Path | None:
    folder = Path(source)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    try:
        return Path(hf_hub_download(source, name))
    except (HFValidationError, HfHubHTTPError, EntryNotFoundError, OSError):
        return None  # no Hub name, no such file, no access or no network


def _vocab_size(path: Path) -> int:
    try:
        size = json.loads(path.read_text(encoding="utf-8")).get("vocab_size")
    except (ValueError, AttributeError):
        size = None
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"{path} has no vocab_size. {HINT}")
    return size
