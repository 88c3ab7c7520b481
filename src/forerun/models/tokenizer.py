"""Tokenizers of model folders: what `tokenizer.json` says, whichever class its config names."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forerun.core.errors import ConfigError, first_line
from forerun.models.gguf import GGUF, NO_TOKENIZER, as_given

log = logging.getLogger("forerun")

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
JSON_FILES = FILE, CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.json"
PLAIN = "PreTrainedTokenizerFast", "TokenizersBackend"  # classes that do what `tokenizer.json` says
MAX_PROBED_TOKENS = 64  # special tokens with which a tokenizer is checked
PROBES = (
    "", " ", "Hello, world!", "It's 5 o'clock; don't they'll I'VE.", "  two  spaces   and more    ",
    "\n\n\tline\r\n  next \n", "0 7 12 123 1234 12345 1234567890", "in 2024, 3.14159 and 1,000,000",
    "a1b22c333 x4444y v1.2.3 0xFF 1e-5 ½ ²³ ٣٤٥", "def f(x: int) -> str:\n    return f'{x:>8}'\n",
    "if (a[i] != b->c && !d) { return (a<<2)|0x1F; } // ok?", "snake_case camelCase x://a.b/c?d=e&f#g",
    "naïve café Ångström Straße", "e\u0301 ﬁ Ⅳ ｆｕｌｌ", "Привет, мир! Γειά σου",
    "你好，世界。1234年", "日本語のテキスト 123 と かな", "한국어 문장 42개", "שלום مرحبا नमस्ते ไทย",
    "👍🏽 👨‍👩‍👧‍👦 🇩🇪 ❤️",
    "\u200b\u00a0\u3000\ufeff\x00\x07", "!!!???...---***###", "THE END the end The End",
)  # fmt: skip


def stored_vocabulary(file: Path) -> dict[str, int]:
    """The ids of a `tokenizer.json`, added tokens included.

    Raises:
        ConfigError: it cannot be read.
    """
    from tokenizers import Tokenizer

    try:
        return dict(Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True))
    except Exception as error:  # noqa: BLE001  the library raises no class of its own
        raise ConfigError(f"{file} is no tokenizer: {first_line(error)}.") from None


def load_tokenizer(folder: Path, advice: str = "Download it again.") -> Any:
    """The tokenizer of a model folder, which any thread may use.

    transformers rebuilds the tokenizer where `tokenizer_class` names one of its classes, and loses
    what that class does not know. Its ids and texts are compared with those of `tokenizer.json`,
    which is what the model was trained with, and which is used where they differ.

    Args:
        advice: ends the error's message.

    Raises:
        ConfigError: no tokenizer loads.
    """
    weights = folder / GGUF
    if weights.exists() and not (folder / FILE).exists():
        why = folder / NO_TOKENIZER
        reason = f" {why.read_text(encoding='utf-8')}" if why.exists() else ""
        raise ConfigError(
            f"{as_given(weights)} has no tokenizer that can be used.{reason} {advice}"
        )
    from transformers import PreTrainedTokenizerFast

    logging.getLogger("transformers.configuration_utils").addFilter(_is_not_of_vocabulary)
    if (folder / FILE).is_file() and _names_no_class(folder):
        return _load(PreTrainedTokenizerFast, folder, advice)
    from transformers import AutoTokenizer

    tokenizer = _load(AutoTokenizer, folder, advice)
    if not tokenizer("a b")["input_ids"]:  # without files transformers makes an empty one
        raise ConfigError(f"{folder} holds no {FILE} and no other tokenizer's files. {advice}")
    if type(tokenizer) is PreTrainedTokenizerFast or not (folder / FILE).is_file():
        return tokenizer
    plain = _load(PreTrainedTokenizerFast, folder, advice)
    differs = _difference(tokenizer, plain)
    if differs is None:
        return tokenizer
    log.warning(
        "tokenizer: transformers' %s differs from %s, for example in %r; the file is used.",
        type(tokenizer).__name__,
        folder / FILE,
        differs,
    )
    return plain


def _names_no_class(folder: Path) -> bool:
    """Whether transformers has no class to look for, for which it imports much else.

    That takes 2 s and 100 MB.
    """
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("tokenizer_class") in PLAIN


def _is_not_of_vocabulary(record: logging.LogRecord) -> bool:
    """False for what transformers says of token ids in config.json; `stop_ids` has own words."""
    return "an integer within the vocabulary" not in record.getMessage()


def _load(kind: Any, folder: Path, advice: str) -> Any:
    try:
        tokenizer = kind.from_pretrained(str(folder), local_files_only=True)
        tokenizer("")  # resets truncation and padding, so that later calls are thread-safe
        return tokenizer
    except Exception as error:  # the tokenizers library raises nothing more specific
        reason = first_line(error)
        raise ConfigError(
            f"No tokenizer loads from {_damaged(folder)}: {reason}. {advice}"
        ) from error


def _damaged(folder: Path) -> Path:
    """The first file of a tokenizer that is not what it should be; the folder: none is known."""
    from tokenizers import Tokenizer

    for path in (folder / name for name in JSON_FILES):
        try:
            if path.is_file():
                json.loads(path.read_bytes())
        except ValueError:
            return path
    try:
        if (folder / FILE).is_file():
            Tokenizer.from_file(str(folder / FILE))
    except Exception:  # noqa: BLE001  the library raises nothing more specific
        return folder / FILE
    return folder


def _difference(tokenizer: Any, plain: Any) -> str | None:
    """A text of which two tokenizers have different ids, or whose ids have different texts."""
    for text in _probes(plain):
        ids = plain(text)["input_ids"]
        if tokenizer(text)["input_ids"] != ids or tokenizer.decode(ids) != plain.decode(ids):
            return text
    return None


def _probes(tokenizer: Any) -> Iterator[str]:
    yield from PROBES
    for token in list(tokenizer.get_added_vocab())[:MAX_PROBED_TOKENS]:
        yield f"a{token}b {token} c\n{token}{token}"
