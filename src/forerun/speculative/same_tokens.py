"""Whether a draft's token ids mean what the target's do: tokenizers are compared."""

from __future__ import annotations

import filecmp
from pathlib import Path

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.models.tokenizer import FILE, stored_vocabulary


def check_same_tokens(config: EngineConfig, folder: Path) -> None:
    """Compares the tokenizers of target and draft, where the draft's folder has one.

    The draft's may lack tokens, or add a mask.

    Raises:
        ConfigError: a token has another id in the draft's tokenizer than in the target's.
    """
    target = config.tokenizer_path or config.model_path
    if config.skip_tokenizer_init or target is None:
        return
    there, here = folder / FILE, Path(target).expanduser() / FILE
    if not (there.is_file() and here.is_file()) or filecmp.cmp(there, here, shallow=False):
        return
    theirs, ours = stored_vocabulary(there), stored_vocabulary(here)
    moved = [token for token, i in theirs.items() if ours.get(token, i) != i]
    if moved:
        token = min(moved, key=theirs.__getitem__)
        raise ConfigError(
            f"The tokenizer of the draft {folder} is not the target's: {token!r} is token"
            f" {theirs[token]} there and {ours[token]} here. Use the draft that was trained for"
            " this target."
        )
