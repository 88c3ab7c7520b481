"""Pooling: a request's prompt becomes one vector instead of text. No torch."""

from __future__ import annotations

from typing import Literal, get_args

# The hidden state of the last token or of the first one, or the mean of all.
Pooling = Literal["last", "mean", "cls"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
