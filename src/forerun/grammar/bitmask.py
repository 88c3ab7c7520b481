"""Bitmasks over the vocabulary: bit t % 32 of word t // 32 says whether token t is allowed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def num_words(vocab_size: int) -> int:
    """int32 words of a row."""
    return -(-vocab_size // 32)


def new_bitmask(rows: int, vocab_size: int, pinned: bool = False) -> Tensor:
    """[rows, words] int32 on the host, not initialised."""
    return torch.empty(rows, num_words(vocab_size), dtype=torch.int32, pin_memory=pinned)


def allows_any(row: Tensor) -> bool:
    """Whether a row [words] on the host allows any token."""
    return bool(row.count_nonzero())


def forbid(row: Tensor, tokens: Sequence[int]) -> None:
    """Clears the bits of tokens, in place; unless then none is left: the row stays as it is."""
    kept = row.clone()
    for token in tokens:
        word = int(row[token // 32])
        row[token // 32] = _signed(word & ~(1 << token % 32))
    if not allows_any(row):
        row.copy_(kept)


def _signed(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word
