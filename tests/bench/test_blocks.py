"""Text cut into verify steps: nothing lost, drafts and bonus told apart."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from forerun.cli.blocks import Block, bars, cut, per_step, per_token, render

TEXT = "naïve 🙂 code — done"
BYTES = list(TEXT.encode())


def decode(ids: Sequence[int]) -> str:
    """A byte-level tokenizer: characters span tokens."""
    return bytes(ids).decode(errors="replace")


def words(ids: Sequence[int]) -> str:
    return "".join(f"<{i}>" for i in ids)


@given(st.lists(st.integers(1, 6), max_size=40))
def test_pieces_join_to_the_text_and_hold_whole_characters(lengths: list[int]) -> None:
    ends = [min(sum(lengths[: i + 1]), len(BYTES)) for i in range(len(lengths))]
    pieces = cut(decode, BYTES, [*ends, len(BYTES)])
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 5), max_size=10))
def test_steps_are_drafts_then_a_bonus(accepted: list[int]) -> None:
    ids = list(range(1 + sum(a + 1 for a in accepted)))
    blocks = per_step(words, ids, [a + 1 for a in accepted], sum(accepted))
    assert blocks[0] == Block("", "<0>")
    assert [block.drafts.count("<") for block in blocks[1:]] == accepted
    assert all(block.bonus.count("<") == 1 for block in blocks)
    assert "".join(block.drafts + block.bonus for block in blocks) == words(ids)


def test_a_last_step_cut_inside_its_run_has_no_bonus() -> None:
    # Steps of 2 + bonus and of 3 drafts, where the third ended the text.
    blocks = per_step(words, range(7), [3, 3], 2 + 3)
    assert blocks == [
        Block("", "<0>"),
        Block("<1><2>", "<3>"),
        Block("<4><5><6>", ""),
    ]


def test_plain_tokens_are_never_drafts() -> None:
    assert per_token(words, range(3)) == [Block("", "<0>"), Block("", "<1>"), Block("", "<2>")]


def console(**options: object) -> Console:
    return Console(file=io.StringIO(), width=80, **options)  # type: ignore[arg-type]


def test_drafts_are_coloured_or_bracketed() -> None:
    blocks = [Block("", "a"), Block("bc", "d"), Block("ef", "g")]
    coloured = render(blocks, console(force_terminal=True, color_system="standard"))
    assert coloured.plain == "abcdefg"
    spans = [(coloured.plain[s.start : s.end], s.style) for s in coloured.spans]
    assert [text for text, _ in spans] == ["bc", "ef"]
    assert spans[0][1] != spans[1][1]  # neighbours differ

    plain = render(blocks, console())
    assert plain.plain in ("a⟦bc⟧d⟦ef⟧g", "a{bc}d{ef}g")
    assert not plain.spans


def test_markup_in_generated_text_is_text() -> None:
    screen = console()
    screen.print(render([Block("", "x[red]"), Block("[/b]", "[0]")], screen))
    assert isinstance(screen.file, io.StringIO)
    assert "x[red]" in screen.file.getvalue()


@pytest.mark.parametrize(("share", "cells"), [(0.0, 0), (0.001, 1), (0.5, 15), (1.0, 30)])
def test_bars_are_as_long_as_the_share(share: float, cells: int) -> None:
    screen = console()
    screen.print(bars(screen, [("1", share)]))
    assert isinstance(screen.file, io.StringIO)
    shown = screen.file.getvalue()
    assert shown.count("█") + shown.count("#") == cells
    assert f"{share:.1%}" in shown
