"""Prompts for training and for held-out evaluation, generated without a download.

Word lists and templates, generated problems, and code and documentation of the standard library
and of installed packages. The splits are disjoint: each word, template, module and problem belongs
to one of them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from forerun.core.errors import ConfigError, nearest, shown
from forerun_train.prompts.code import code
from forerun_train.prompts.dialogue import dialogue
from forerun_train.prompts.draw import Draw
from forerun_train.prompts.instructions import instructions
from forerun_train.prompts.maths import maths
from forerun_train.prompts.sources import Sources
from forerun_train.prompts.summary import summary

TOPICS = ("dialogue", "code", "maths", "summary", "instructions")
TRAIN, HELD_OUT = "train", "heldout"
SPLITS = (TRAIN, HELD_OUT)
SIZE = (10, 2600)  # characters of a user's turns together
TRIES = 1000  # for a prompt that is new
BUCKETS = 8  # of hashes of prompts; one of them is held out


def generate(topics: Sequence[str], count: int, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Prompts, the topics in turn: {"id", "topic", "messages"}, with users' turns only.

    The same arguments give the same prompts where the same packages are installed.

    Raises:
        ConfigError: an unknown topic or split, or so many different prompts are not to be had.
    """
    for name, given, known in (("topic", topics, TOPICS), ("split", [split], SPLITS)):
        for each in given:
            if each not in known:
                raise ConfigError(
                    f"unknown {name} {shown(each)}.{nearest(each, known)}"
                    f" Known: {', '.join(known)}."
                )
    if count < 1 or not topics:
        raise ConfigError(f"count must be at least 1 and topics not empty, got {count}.")
    return _generate(topics, count, seed, split)


def _generate(topics: Sequence[str], count: int, seed: int, split: str) -> Iterator[dict[str, Any]]:
    held_out = split == HELD_OUT
    rng = random.Random(f"prompts {split} {seed}")
    makers = _makers(Draw(rng, held_out), Sources(held_out, seed))
    seen: set[bytes] = set()
    for at in range(count):
        topic = topics[at % len(topics)]
        turns = _new(makers[topic], held_out, seen)
        if turns is None:
            raise ConfigError(f"topic {topic} has no more than about {at // len(topics)} prompts.")
        yield {
            "id": f"{split}-{seed}-{at}",
            "topic": topic,
            "messages": [{"role": "user", "content": turn} for turn in turns],
        }


def _makers(draw: Draw, sources: Sources) -> dict[str, Callable[[], list[str]]]:
    return {
        "dialogue": lambda: dialogue(draw),
        "code": lambda: code(draw, sources),
        "maths": lambda: maths(draw),
        "summary": lambda: summary(draw, sources),
        "instructions": lambda: instructions(draw),
    }


def _new(make: Callable[[], list[str]], held_out: bool, seen: set[bytes]) -> list[str] | None:
    """Turns that belong to the split by their hash, and were not made before."""
    for _ in range(TRIES):
        turns = make()
        text = "\0".join(turns)
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        own = (digest[0] % BUCKETS == 0) == held_out
        if own and digest not in seen and SIZE[0] <= len(text) <= SIZE[1]:
            seen.add(digest)
            return turns
    return None
