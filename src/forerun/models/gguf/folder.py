"""A GGUF file as a model folder, so that all else reads config, tokenizer and weights as ever."""

from __future__ import annotations

import json
import os
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

from forerun.config.model_config import parse_model_config
from forerun.core.errors import ConfigError, first_line
from forerun.core.version import __version__
from forerun.models.gguf import GGUF, NO_TOKENIZER
from forerun.models.gguf.config import config_of
from forerun.models.gguf.reader import MAGIC, GgufFile, read_gguf
from forerun.models.gguf.tokenizer import tokenizer_of
from forerun.platform.cache import cache_folder

SUFFIX, TOKENIZER = ".gguf", "tokenizer.json"


def is_gguf(path: Path) -> bool:
    """Whether a path that exists is meant as a GGUF file: by its name, or, as Ollama's files have
    no suffix, by how it begins.
    """
    if path.suffix.lower() == SUFFIX or not path.is_file():
        return path.suffix.lower() == SUFFIX
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def gguf_folder(file: Path) -> Path:
    """A folder with config.json, the tokenizer's files and a link to the weights.

    It is made once for a file as it is, in the cache.

    Raises:
        ConfigError: the file is broken or not supported, or the cache cannot be written.
    """
    file = file.absolute()
    gguf = read_gguf(file)
    state = file.stat()
    mark = f"{__version__} {file} {state.st_size} {state.st_mtime_ns}"
    try:
        parent = cache_folder() / "gguf"
        folder = parent / sha256(mark.encode()).hexdigest()[:24]
        if (folder / TOKENIZER).exists():
            return folder
        config, (tokenizer, reason) = config_of(gguf), _tokenizer(gguf)
        parse_model_config(config, where=f"{file} (metadata)")  # refuses what is out of range
        if folder.is_dir():
            return folder
        parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".making-", dir=parent))
        (made / "config.json").write_text(json.dumps(config, indent=2))
        if tokenizer is not None:
            tokenizer[0].save(str(made / TOKENIZER))
            (made / "tokenizer_config.json").write_text(json.dumps(tokenizer[1], indent=2))
        else:
            (made / NO_TOKENIZER).write_text(reason, encoding="utf-8")
        (made / GGUF).symlink_to(file)
        _publish(made, folder)
    except OSError as error:
        raise ConfigError(
            f"{file} needs a folder in the cache, which cannot be written: {first_line(error)}. Set"
            " XDG_CACHE_HOME to one that can."
        ) from None
    return folder


def _tokenizer(gguf: GgufFile) -> tuple[tuple[Any, dict[str, Any]] | None, str]:
    """What `tokenizer_of` gives; None, and why, if the file has none that can be used."""
    try:
        return tokenizer_of(gguf), ""
    except ConfigError as error:
        return None, str(error)


def _publish(made: Path, folder: Path) -> None:
    """Moves it to its name, unless another process was faster."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        for name in os.listdir(made):
            (made / name).unlink()
        made.rmdir()
