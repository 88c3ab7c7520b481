"""Output of the commands: JSON, streams, summaries, progress."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from forerun.evals.acceptance import Acceptance

if TYPE_CHECKING:
    from forerun.llm import RequestOutput

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object")]


def print_json(value: Any) -> None:
    """One object on one line."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def print_stream(outputs: Iterable[RequestOutput]) -> RequestOutput | None:
    """Writes the text as it is generated, then a newline. Returns the last output, if any."""
    written, last = "", None
    for last in outputs:
        sys.stdout.write(last.text[len(written) :])
        sys.stdout.flush()
        written = last.text
    if last is not None and not last.text and last.output_ids:  # no tokenizer
        sys.stdout.write(shown(last))
    if not written.endswith("\n"):
        sys.stdout.write("\n")
    sys.stdout.flush()
    return last


def shown(output: RequestOutput) -> str:
    """The text, or the ids without a tokenizer."""
    return output.text if output.text else " ".join(map(str, output.output_ids))


def summary(outputs: list[RequestOutput], seconds: float) -> str:
    """`"120 tokens in 0.4 s, 300.0 tok/s, accept length 5.10"`."""
    tokens = sum(len(output.output_ids) for output in outputs)
    parts = [f"{tokens} tokens in {seconds:.2f} s", f"{tokens / max(seconds, 1e-9):.1f} tok/s"]
    acceptance = Acceptance.total(Acceptance.of(output.meta_info) for output in outputs)
    if acceptance.proposed:
        parts.append(f"accept length {acceptance.accept_length:.2f}")
    return ", ".join(parts)


def print_error(message: str) -> None:
    print(f"forerun: error: {message}", file=sys.stderr)


def fail_if_aborted(outputs: Iterable[RequestOutput], what: str = "requests") -> None:
    """Prints an error line per reason, after everything else was printed.

    Raises:
        typer.Exit: with code 1, if one of them was aborted.
    """
    outputs = list(outputs)
    counts = Counter(output.error for output in outputs)
    del counts[None]
    for error, count in counts.items():
        which = f"{count} of {len(outputs)} {what} were" if len(outputs) > 1 else "the request was"
        print_error(f"{which} aborted: {error}")
    if counts:
        raise typer.Exit(1)


def dim(line: str) -> None:
    """Prints a remark to stderr, so that stdout holds the text alone."""
    Console(stderr=True, highlight=False).print(line, style="dim", markup=False, soft_wrap=True)


def progress_bar(quiet: bool) -> Progress:
    """Draws a bar on standard error, only if that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    hidden = quiet or not console.is_terminal
    return Progress(*columns, console=console, transient=True, disable=hidden)
