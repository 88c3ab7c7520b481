"""Text split into verify steps, with drafts highlighted; and bar charts of fractions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

Decode = Callable[[Sequence[int]], str]  # token ids → text

# Neighbouring blocks differ, or a bonus that is only a space would join two of them.
DRAFT_STYLES = ("bold cyan", "bold green")


@dataclass(frozen=True, slots=True)
class Block:
    """What one step added: the accepted drafts, then the bonus token sampled by the target."""

    drafts: str
    bonus: str


def cut(decode: Decode, ids: Sequence[int], at: Sequence[int]) -> list[str]:
    """The text of `ids` in pieces that end at the token counts `at` (ascending).

    A character whose bytes span a cut belongs to the later piece.
    """
    pieces: list[str] = []
    shown = ""
    for end in at:
        text = decode(ids[:end])
        if end < len(ids):
            text = text.rstrip("\ufffd")
        if not text.startswith(shown):  # a cleaned-up space or an unfinished character
            text = shown
        pieces.append(text[len(shown) :])
        shown = text
    return pieces


def per_token(decode: Decode, ids: Sequence[int]) -> list[Block]:
    """Plain decoding: each token is a block without drafts."""
    return [Block("", piece) for piece in cut(decode, ids, range(1, len(ids) + 1))]


def per_step(
    decode: Decode, ids: Sequence[int], accept_lengths: Sequence[int], correct: int
) -> list[Block]:
    """The first token, from the prefill; then a block for each verify step.

    `accept_lengths[i]` is what step i committed and `correct` the accepted drafts of all steps.
    Every step ends in a bonus token, except a last one that was cut within its accepted drafts.
    """
    ends = [0, min(1, len(ids))]  # of the drafts and of the bonus, in turn
    for length in accept_lengths:
        ends += [ends[-1] + max(length - 1, 0), ends[-1] + length]
    if accept_lengths and correct > sum(length - 1 for length in accept_lengths):
        ends[-2] = ends[-1]
    pieces = cut(decode, ids, ends)
    return [Block(*pair) for pair in zip(pieces[::2], pieces[1::2], strict=True)]


def render(blocks: Sequence[Block], console: Console) -> Text:
    """Accepted drafts in colour, or in brackets where the console has no colour."""
    coloured = has_colour(console)
    before, after = ("", "") if coloured else brackets(console)
    text = Text()
    for i, block in enumerate(blocks):
        if block.drafts:
            style = DRAFT_STYLES[i % len(DRAFT_STYLES)] if coloured else ""
            text.append(f"{before}{block.drafts}{after}", style=style)
        text.append(block.bonus)
    return text


def brackets(console: Console) -> tuple[str, str]:
    return ("⟦", "⟧") if _unicode(console) else ("{", "}")


def has_colour(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


def bars(console: Console, shares: Sequence[tuple[str, float]], width: int = 30) -> Table:
    """A bar for every (label, fraction in [0, 1]); a fraction above 0 has at least one cell."""
    cell = "█" if _unicode(console) else "#"
    grid = Table.grid(padding=(0, 1))
    grid.add_column(justify="right")
    grid.add_column(justify="right")
    grid.add_column()
    for label, share in shares:
        cells = max(round(share * width), 1 if share > 0 else 0)
        grid.add_row(label, f"{share:.1%}", Text(cell * cells, style="green"))
    return grid


def _unicode(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")
