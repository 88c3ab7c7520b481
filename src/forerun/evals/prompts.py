"""Prompts of evaluations and benchmarks: word problems and held-out Python, as token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Protocol

from forerun.core.errors import ConfigError
from forerun.evals.word_problems import TEST_SEED, TEST_SEEDS, problems

WORDS, PYTHON = "word-problems", "python"
Encode = Callable[[str], list[int]]  # text → token ids


@dataclass(frozen=True)
class Prompt:
    """`text` is for display; `ids` are the model's input, with the chat template around a chat."""

    name: str
    skill: str
    text: str
    ids: tuple[int, ...]
    answer: int | None = None  # of a word problem


class Tokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that are used."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


def need(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise ConfigError("This needs a tokenizer; drop skip_tokenizer_init.")
    return tokenizer


def encoder(tokenizer: Tokenizer | None) -> Encode:
    """Encodes text that the model continues."""
    tokenizer = need(tokenizer)
    return lambda text: tokenizer.encode(text)


def chat_encoder(tokenizer: Tokenizer | None) -> Encode:
    """Encodes a user message as a conversation, up to the generation prompt."""
    from forerun.llm.prompts import chat_ids  # with torch, which `forerun bench serving` is without

    tokenizer = need(tokenizer)

    def encode(text: str) -> list[int]:
        (ids,), _ = chat_ids(tokenizer, [{"role": "user", "content": text}])
        return ids

    return encode


def decoder(tokenizer: Tokenizer | None) -> Callable[[Sequence[int]], str]:
    tokenizer = need(tokenizer)
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)


def word_prompts(encode: Encode, count: int, seed: int = TEST_SEED) -> list[Prompt]:
    """Word problems that training never saw, as one-turn chats."""
    check_seed(seed)
    return [
        Prompt(f"word problem {i}", WORDS, p.question, tuple(encode(p.question)), p.answer)
        for i, p in enumerate(problems(count, seed), start=1)
    ]


def check_seed(seed: int) -> None:
    """Raises ConfigError for a seed whose problems training may have used."""
    if seed not in TEST_SEEDS:
        raise ConfigError(
            f"seed {seed} may have been trained on; choose one of"
            f" {TEST_SEEDS.start} to {TEST_SEEDS.stop - 1}."
        )


def python_prompts(encode: Encode, count: int | None = None) -> list[Prompt]:
    """Held-out Python prompts: `count` of them spread evenly, or all."""
    rows = held_out()
    if count is None:
        count = len(rows)
    if not 1 <= count <= len(rows):
        raise ConfigError(f"there are {len(rows)} held-out Python prompts; {count} were asked for.")
    spread = [rows[i * len(rows) // count] for i in range(count)]
    return [
        Prompt(f"python {i}", PYTHON, row["prompt"], tuple(encode(row["prompt"])))
        for i, row in enumerate(spread, start=1)
    ]


def held_out() -> list[dict[str, str]]:
    """Held-out Python: "prompt" is the beginning of a file, class or function."""
    return _rows("python_heldout.jsonl")


def _rows(name: str) -> list[dict[str, str]]:
    text = (files("forerun.evals") / "data" / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def chat_prompts(encode: Encode) -> list[Prompt]:
    """One-turn chats for a model of some size: dialogue, code, maths and summaries."""
    rows = _rows("chat_prompts.jsonl")
    return [
        Prompt(row["name"], row["skill"], row["text"], tuple(encode(row["text"]))) for row in rows
    ]


def windows(ids: Sequence[int], count: int, length: int) -> list[list[int]]:
    """`count` prompts of exactly `length` tokens, spread evenly over one long text.

    The text is repeated where it is too short for the windows to differ by at least a token.
    """
    if not ids:
        raise ConfigError("There is no text to cut prompts from.")
    long = list(ids)
    while len(long) < length + count:
        long += ids
    stride = (len(long) - length) // count
    return [long[i * stride : i * stride + length] for i in range(count)]
