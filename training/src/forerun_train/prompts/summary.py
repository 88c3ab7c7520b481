"""Prompts that ask for a summary of a text."""

from __future__ import annotations

from forerun_train.prompts.draw import Draw
from forerun_train.prompts.sources import Sources
from forerun_train.prompts.stories import story

ASKS = (
    "Summarize the following text in one sentence.\n\n{text}",
    "Summarize this text in {n:2-4} sentences:\n\n{text}",
    "{text}\n\nSummarize this for {listener}.",
    "What is the main point of this text?\n\n{text}",
    "Give the {n:2-5} most important points of the text as a list.\n\n{text}",
    "Shorten the following text to half its length.\n\n{text}",
    "TL;DR:\n\n{text}",
    "Write a title and a summary of one sentence for this text.\n\n{text}",
    "Explain the following in simple words.\n\n{text}",
    "Read this and tell me what I need to know.\n\n{text}",
    "Write a summary of at most {n:20-60} words.\n\n{text}",
    "Here is a text. Rewrite it so that it is easier to understand.\n\n{text}",
    "Text:\n{text}\n\nSummary:",
    "Which facts does this text state? Answer with a short list.\n\n{text}",
    "A {job} has to know what is in this text. Summarize it.\n\n{text}",
)


def summary(draw: Draw, sources: Sources) -> list[str]:
    """The user's turns: one."""
    ask = draw.fill(draw.one(ASKS))
    made = draw.chance(0.35)
    text = story(draw, draw.number(4, 14)) if made else sources.text(draw.rng).text
    return [ask.replace("{text}", text)]
