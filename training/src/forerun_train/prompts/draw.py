"""Random choices of one split: words and templates that are held out never appear in training."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forerun_train.prompts import words

SHARED = ("day", "month", "language")  # too few words to hold some out
HELD_OUT_EVERY = 5  # of a list's entries one in so many is held out
WORDS: Mapping[str, Sequence[str]] = {
    "concept": words.CONCEPTS, "activity": words.ACTIVITIES, "place": words.PLACES,
    "job": words.JOBS, "animal": words.ANIMALS, "food": words.FOODS, "feeling": words.FEELINGS,
    "event": words.EVENTS, "things": words.THINGS, "purpose": words.PURPOSES, "form": words.FORMS,
    "tone": words.TONES, "listener": words.LISTENERS, "object": words.OBJECTS,
    "person": words.PEOPLE, "day": words.DAYS, "month": words.MONTHS, "language": words.LANGUAGES,
}  # fmt: skip
_SLOT = re.compile(r"\{(\w+?)(\d?)(?::(\d+)-(\d+))?\}")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeio])")  # "a" that must be "an"


@dataclass(frozen=True)
class Draw:
    """Choices for one prompt."""

    rng: random.Random
    held_out: bool

    def one(self, items: Sequence[str]) -> str:
        """One of those entries of a list that belong to the split."""
        while True:
            at = self.rng.randrange(len(items))
            if self.held_out == _is_held_out(at):
                return items[at]

    def some(self, items: Sequence[str], count: int) -> list[str]:
        """Different entries that belong to the split, `count` of them or as many as there are."""
        own = [each for at, each in enumerate(items) if self.held_out == _is_held_out(at)]
        return self.rng.sample(own, min(count, len(own)))

    def any(self, items: Sequence[str]) -> str:
        """One of all entries, where both splits share them."""
        return self.rng.choice(items)

    def number(self, low: int, high: int) -> int:
        """From low to high, both included."""
        return self.rng.randint(low, high)

    def chance(self, share: float) -> bool:
        """Whether something happens that does in this share of cases."""
        return self.rng.random() < share

    def word(self, kind: str) -> str:
        """A word of a kind."""
        return self.any(WORDS[kind]) if kind in SHARED else self.one(WORDS[kind])

    def fill(self, template: str) -> str:
        """Fills in slots: {place}, {place2} (another one), {n:3-9} (a number).

        A slot that appears twice has one value. Unknown names stay as they are.
        """
        values: dict[str, str] = {}

        def value(match: re.Match[str]) -> str:
            name, _, low, high = match.groups()
            if low is None and name not in WORDS and name not in values:
                return match[0]
            key = match[0].partition(":")[0].strip("{}")
            while key not in values:
                found = str(self.number(int(low), int(high))) if low else self.word(name)
                if low or found not in values.values():
                    values[key] = found
            return values[key]

        return _ARTICLE.sub(r"\1n ", _SLOT.sub(value, template))


def _is_held_out(at: int) -> bool:
    return at % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
