"""A tokenizer with as many tokens as a model's vocabulary, for models with random weights.

Detokenization costs what it costs with a real byte-level BPE tokenizer; the texts mean nothing.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from string import ascii_lowercase
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPACE: Final = "\u0120"  # how byte-level BPE writes a space


def write_dummy_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json. `vocab_size`: at least 256.

    The tokens are all bytes, then words of two, three and four letters, with a space before them or
    not.
    """
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: list[tuple[str, str]] = []
    words = [SPACE, *ascii_lowercase]
    for word in words:  # grows
        new = islice(ascii_lowercase, max(0, vocab_size - len(tokens)))
        pairs = [(word, letter) for letter in new]
        if not pairs:
            break
        merges += pairs
        tokens += map("".join, pairs)
        words += map("".join, pairs)
    vocab = {token: at for at, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"), pretty=False)
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
