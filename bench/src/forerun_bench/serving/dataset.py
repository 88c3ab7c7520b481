"""Prompts of a load test: bundled skills, random tokens, files in ShareGPT's format."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final

from forerun.core.errors import ConfigError
from forerun.evals.prompts import held_out
from forerun.evals.word_problems import TEST_SEED, problems
from forerun_bench.serving.config import LoadConfig
from forerun_bench.serving.vocabulary import Vocabulary

OUTPUT_LEN: Final = 128  # new tokens of the bundled prompts
WORD_PROBLEMS: Final = 200  # as many as ship
MIN_TOKENS: Final = 2  # of a recorded prompt and of its answer; SGLang drops shorter ones as well


@dataclass(frozen=True, slots=True)
class Prompt:
    """Text, or token ids; and the new tokens to ask for."""

    content: str | tuple[int, ...]
    output_len: int


def load_prompts(
    config: LoadConfig, vocabulary: Callable[[], Vocabulary], run: int = 0
) -> list[Prompt]:
    """`config.num_prompts` prompts, the same for the same seed.

    Random prompts of every run of a sweep are new ones. Of the others there are only so many, so
    they repeat; empty the prefix cache before a run (`--flush-cache`) where that matters.

    Args:
        vocabulary: called only where token ids or counts are needed.

    Raises:
        ConfigError: no such file, no usable conversation, or no tokenizer where one is needed.
    """
    rng = random.Random(f"{config.seed}/{run}")
    if config.dataset_name == "random":
        return _random(config, vocabulary(), rng)
    if config.dataset_name == "sharegpt":
        found = _sharegpt(config, vocabulary, rng)
    else:
        texts = (
            [row["prompt"] for row in held_out()]
            if config.dataset_name == "python"
            else [problem.question for problem in problems(WORD_PROBLEMS, TEST_SEED)]
        )
        rng.shuffle(texts)
        found = [Prompt(text, config.output_len or OUTPUT_LEN) for text in texts]
    return list(islice(cycle(found), config.num_prompts))


def _random(config: LoadConfig, vocabulary: Vocabulary, rng: random.Random) -> list[Prompt]:
    """Lengths as SGLang's `random`: uniform in [max(1, ratio * most), most]."""

    def length(most: int) -> int:
        return rng.randint(max(1, int(most * config.random_range_ratio)), most)

    as_text = config.backend == "openai-chat"  # its messages hold no token ids
    prompts = []
    for _ in range(config.num_prompts):
        ids = vocabulary.random_ids(rng, length(config.random_input_len))
        content = vocabulary.decode(ids) if as_text else tuple(ids)
        prompts.append(Prompt(content, length(config.random_output_len)))
    return prompts


def _sharegpt(
    config: LoadConfig, vocabulary: Callable[[], Vocabulary], rng: random.Random
) -> list[Prompt]:
    """The first question of every conversation, and the length of the first answer."""
    assert config.dataset_path is not None
    pairs = list(read_sharegpt(Path(config.dataset_path)))
    rng.shuffle(pairs)
    if config.output_len is not None:
        prompts = [Prompt(question, config.output_len) for question, _ in pairs]
    else:
        prompts = list(islice(_recorded(pairs, vocabulary().count), config.num_prompts))
    if not prompts:
        raise ConfigError(f"{config.dataset_path} has no conversation with a question and answer.")
    return prompts


def _recorded(pairs: list[tuple[str, str]], count: Callable[[str], int]) -> Iterator[Prompt]:
    """Tokens are counted only as far as prompts are taken: the files are large."""
    for question, answer in pairs:
        new = count(answer)
        if new >= MIN_TOKENS and count(question) >= MIN_TOKENS:
            yield Prompt(question, new)


@lru_cache(maxsize=1)
def read_sharegpt(path: Path) -> tuple[tuple[str, str], ...]:
    """First question and first answer of the conversations that have both.

    A conversation is an object with "conversations" or "conversation": turns with "value" or
    "content".

    Raises:
        ConfigError: the file cannot be read, or is not a JSON list of objects.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--dataset-path {path}: {error.strerror}.") from None
    except ValueError as error:  # UnicodeDecodeError too
        raise ConfigError(f"--dataset-path {path} is not JSON: {error}.") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"--dataset-path {path} must hold a JSON list of conversations.")
    found = []
    for row in rows:
        turns = row.get("conversations") or row.get("conversation") or []
        texts = _texts(turns)
        if len(texts) == 2 and all(texts):
            found.append((texts[0], texts[1]))
    return tuple(found)


def _texts(turns: Any) -> Sequence[str]:
    """Of the first two turns; fewer where a turn is not text."""
    if not isinstance(turns, list):
        return ()
    said = [turn.get("value", turn.get("content")) for turn in turns[:2] if isinstance(turn, dict)]
    return [text for text in said if isinstance(text, str)]
