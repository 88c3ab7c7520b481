"""Progress lines without a terminal, a bar on a terminal, no output for quick operations."""

from __future__ import annotations

import io
import threading
import time

import pytest
from rich.console import Console

from forerun.platform import progress as module
from forerun.platform.progress import Stage, progress


def pipe(**options: object) -> Console:
    return Console(file=io.StringIO(), soft_wrap=True, width=200, **options)  # type: ignore[arg-type]


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def wait_for(console: Console, text: str) -> None:
    end = time.monotonic() + 20
    while text not in written(console) and time.monotonic() < end:
        time.sleep(0.005)


def test_the_line_of_a_stage() -> None:
    stage = Stage("capturing graphs", 36)
    assert stage.line() == "capturing graphs: 0 of 36"
    stage.advance(detail="8 x 16 [sampled]")
    stage.advance(detail="4 x 16 [sampled]")
    assert stage.line() == "capturing graphs: 2 of 36 (4 x 16 [sampled])"
    weights = Stage("loading weights", 16.4e9, "B", done=3.21e9)
    assert weights.line() == "loading weights: 3.2 of 16.4 GB"
    assert Stage("profiling run").line() == "profiling run"
    weights.inner.append(Stage("compiling gemm_sm90.cu"))
    assert weights.line().endswith(" GB (compiling gemm_sm90.cu)")


def test_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS_PER_LINE", 0.01)
    console = pipe()
    with progress("capturing graphs", 3, console=console) as stage:
        wait_for(console, "0 of 3")
        stage.advance(detail="[8 x 16]")  # no markup
        wait_for(console, "1 of 3 ([8 x 16])")
        with progress("compiling", console=console):
            wait_for(console, "1 of 3 (compiling)")
        stage.advance(2)
        wait_for(console, "3 of 3")
    lines = written(console).splitlines()
    assert all(line.startswith("forerun: capturing graphs: ") for line in lines)
    for part in ("0 of 3, 0 s", "1 of 3 ([8 x 16]), 0 s", "1 of 3 (compiling), 0 s", "3 of 3, 0 s"):
        assert any(line.endswith(part) for line in lines), part


def test_quick_operations_print_nothing() -> None:
    console = pipe()
    with progress("loading weights", 10, console=console) as stage:
        stage.advance(10)
    assert written(console) == ""


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BAR_AFTER", 0.0)
    console = pipe(force_terminal=True)
    with progress("capturing graphs", 3, console=console) as stage:
        stage.advance(detail="8 x 16")
        wait_for(console, "1 of 3 (8 x 16)")
    assert "capturing graphs" in written(console)
    assert "forerun:" not in written(console)


def test_progress_ends_if_the_block_raises() -> None:
    before = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError), progress("a", console=pipe()), progress("b"):
        1 / 0  # noqa: B018
    assert set(threading.enumerate()) <= before  # a thread of an earlier test may end meanwhile
    assert not module._active
    console = pipe()
    with progress("next", console=console) as stage:
        assert module._active == [stage]
