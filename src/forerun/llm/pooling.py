"""Embeddings: which vector is asked for, and how it is made of what the engine has pooled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forerun.config.engine_config import EngineConfig
from forerun.core.checks import boolean, integer
from forerun.core.errors import RequestError, nearest, shown
from forerun.core.executor import ExecutorInfo
from forerun.core.pooling import POOLINGS, Pooling
from forerun.core.request import RequestRecord
from forerun.core.sampling_params import SamplingParams
from forerun.llm.prompts import encode
from forerun.models.embedding_layout import EmbeddingLayout, embedding_layout
from forerun.models.stop_ids import tokenizer_folder

# A request that is pooled generates nothing.
NO_TEXT = SamplingParams(max_new_tokens=0, temperature=0.0)
Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Which embedding is asked for; None: as the model's folder says.

    Raises:
        RequestError: a value is invalid.
    """

    pooling_type: Pooling | None = None  # "last", "mean" or "cls"
    normalize: bool | None = None  # to length 1
    # The first values only, of a model trained for it (Matryoshka); normalised after that.
    dimensions: int | None = None

    def __post_init__(self) -> None:
        given: Any = self.pooling_type
        if given is not None:
            kind = given.lower() if isinstance(given, str) else given  # vLLM's are upper case
            if kind not in POOLINGS:
                known = ", ".join(POOLINGS)
                raise RequestError(f"pooling_type must be one of {known}, got {shown(given)}.")
            object.__setattr__(self, "pooling_type", kind)
        if self.normalize is not None:
            boolean("normalize", self.normalize, RequestError)
        if self.dimensions is not None and integer("dimensions", self.dimensions, RequestError) < 1:
            raise RequestError(f"dimensions must be >= 1, got {shown(self.dimensions)}.")

    @classmethod
    def of(cls, given: PoolingParams | Mapping[str, Any] | None) -> PoolingParams:
        """Makes them from a mapping.

        Raises:
            RequestError: an unknown name, or a value is invalid.
        """
        if isinstance(given, PoolingParams):
            return given
        known = [spec.name for spec in fields(cls)]
        for name in given or {}:
            if name not in known:
                raise RequestError(f"Unknown parameter {shown(name)}.{nearest(str(name), known)}")
        return cls(**(given or {}))


class ResolvedPooling(NamedTuple):
    """An embedding that can be made."""

    pooling: Pooling
    normalize: bool
    dimensions: int

    def vector(self, record: RequestRecord) -> Vector:
        """[dimensions] float32, of a request that has ended."""
        out = np.sum([np.frombuffer(each, "<f8") for each in record.pooled], axis=0)
        if self.pooling == "mean":
            out = out / len(record.prompt)
        out = out[: self.dimensions]
        if self.normalize:
            out = out / max(float(np.linalg.norm(out)), 1e-12)
        return np.asarray(out, dtype=np.float32)


class Embedder:
    """What an engine's embeddings are made of: texts to token ids, pooled sums to vectors."""

    def __init__(self, layout: EmbeddingLayout, tokenizer: Any) -> None:
        """`tokenizer`: None: there are no texts."""
        self.layout, self._tokenizer = layout, tokenizer
        self._prefix: list[int] = []
        self._suffix: list[int] = []
        if tokenizer is not None:
            self._prefix, self._suffix = _special_ids(tokenizer)
            if layout.adds_eos and not self._suffix and tokenizer.eos_token_id is not None:
                self._suffix = [tokenizer.eos_token_id]
            self._longest_token = max(map(len, tokenizer.get_vocab()), default=1)  # characters

    @classmethod
    def of(cls, config: EngineConfig, target: Path, tokenizer: Any) -> Embedder:
        """
        Raises:
            ConfigError: a file of the model's folder is not what it should be.
        """
        layout = embedding_layout(target, tokenizer_folder(config, target))
        return cls(layout.with_pooling(config.pooling_type), tokenizer)

    @property
    def explain(self) -> str:
        """How embeddings are made, and what says so."""
        layout = self.layout
        if layout.problem is not None:
            return f"none: {layout.problem}"
        made = f"{layout.pooling}{', normalized' if layout.normalize else ''}"
        return f"{made} ({'sentence-transformers' if layout.is_embedding else 'default'})"

    def resolve(self, params: PoolingParams, info: ExecutorInfo) -> ResolvedPooling:
        """
        Raises:
            RequestError: the embedding cannot be made.
        """
        layout, size = self.layout, info.hidden_size
        if layout.problem is not None and params.pooling_type is None:
            raise RequestError(
                f"{layout.problem}; embeddings are the hidden state of the last token, of the first"
                " one (cls) or the mean: set pooling_type."
            )
        if params.dimensions is not None and params.dimensions > size:
            raise RequestError(
                f"dimensions must be at most the model's hidden size {size}, got"
                f" {shown(params.dimensions)}."
            )
        return ResolvedPooling(
            params.pooling_type or layout.pooling,
            layout.normalize if params.normalize is None else params.normalize,
            params.dimensions or size,
        )

    def text_ids(self, texts: Sequence[str], at_most: int | None = None) -> list[list[int]]:
        """Token ids of texts, with the special tokens that the model was trained with.

        Args:
            at_most: longer ones lose tokens at the end, but not the special ones there.

        Raises:
            RequestError: a text is empty or cannot be encoded in UTF-8.
        """
        return [self._ids(text, at_most) for text in texts]

    def _ids(self, text: str, at_most: int | None) -> list[int]:
        if not text:
            raise RequestError("The input is an empty text; give at least one character.")
        if at_most is not None:  # what is certainly too much need not be read
            text = text[: (at_most + 1) * self._longest_token]
        ids = encode(self._tokenizer, text, add_special_tokens=False)
        if at_most is not None:
            ids = ids[: max(at_most - len(self._prefix) - len(self._suffix), 0)]
        return [*self._prefix, *ids, *self._suffix][:at_most]


def _special_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens before and after every text."""
    bare, whole = encode(tokenizer, "a", add_special_tokens=False), encode(tokenizer, "a")
    for first in range(len(whole) - len(bare) + 1):
        if whole[first : first + len(bare)] == bare:
            return whole[:first], whole[first + len(bare) :]
    return [], []


def most_tokens(truncate_prompt_tokens: Any, context_length: int) -> int | None:
    """Tokens that an input is shortened to; None: it is not.

    Args:
        truncate_prompt_tokens: as in vLLM; -1: the context length.

    Raises:
        RequestError: it is out of range.
    """
    if truncate_prompt_tokens is None:
        return None
    count = integer("truncate_prompt_tokens", truncate_prompt_tokens, RequestError)
    if count != -1 and not 1 <= count <= context_length:
        raise RequestError(
            f"truncate_prompt_tokens must be in [1, {context_length}], the context length, or -1"
            f" for that, got {shown(count)}."
        )
    return context_length if count == -1 else count
