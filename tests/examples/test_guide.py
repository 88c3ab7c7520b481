"""docs/add-an-algorithm.md: scripts run, snippets are the example's, tables name all fields."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import click
import pytest
import typer

from forerun.main import COMMANDS, build_app
from forerun.speculative import registry
from forerun.speculative.base import (
    Draft,
    DraftContext,
    HostTokens,
    ObserveInput,
    ProposeInput,
    SlotContext,
    SlotState,
    SpecCaps,
    SpeculativeAlgorithm,
)
from tests.examples.environment import EXAMPLES, ROOT

GUIDE = (ROOT / "docs" / "add-an-algorithm.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w*) ?(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(kind, what, text) for kind, what, text in FENCE.findall(GUIDE)]
FILES = sorted({what for _, what, _ in BLOCKS if "." in what})


def test_the_guide_builds_every_file_of_the_package() -> None:
    package = EXAMPLES / "forerun-lookback"
    sources = [p.relative_to(package).as_posix() for p in (package / "src").rglob("*.py")]
    assert sorted([*sources, "pyproject.toml"]) == FILES


@pytest.mark.parametrize("file", FILES)
def test_snippets_put_together_are_the_file(file: str) -> None:
    def code(text: str) -> list[str]:
        return [line for line in text.splitlines() if line.strip()]

    shown = "\n".join(text for _, what, text in BLOCKS if what == file)
    assert code(shown) == code((EXAMPLES / "forerun-lookback" / file).read_text(encoding="utf-8"))


RUN = [text for _, what, text in BLOCKS if what == "run"]


def test_every_python_snippet_is_run_or_compared() -> None:
    assert len(RUN) == 2
    assert all(what == "run" or what in FILES for kind, what, _ in BLOCKS if kind == "python")


def test_the_script_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = registry.Registry(registry.BUILT_IN, ())
    monkeypatch.setattr(registry, "_registry", lambda: table)
    exec(compile(RUN[0], "guide", "exec"), {"__name__": "guide"})
    assert float(capsys.readouterr().out) >= 1


@pytest.mark.exhaustive
def test_the_test_recipe_runs() -> None:
    names: dict[str, Any] = {"__name__": "guide"}
    exec(compile(RUN[1], "guide", "exec"), names)
    names["test_output_equals_plain_decoding"](1)


@pytest.mark.parametrize(
    ("kind", "section"),
    [
        (SpecCaps, "`SpecCaps`"),
        (DraftContext, "`DraftContext`"),
        (SlotContext, "`DraftContext`"),
        (ProposeInput, "`ProposeInput`"),
        (HostTokens, "`ProposeInput`"),
        (Draft, "`Draft`"),
        (ObserveInput, "`ObserveInput`"),
        (SlotState, "State per slot"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_sections_name_every_field(kind: Any, section: str) -> None:
    (text,) = [part for part in GUIDE.split("\n### ") if part.startswith(section)]
    named = {name.rpartition(".")[2] for name in re.findall(r"`([\w.]+)`", text)}
    assert {field.name for field in fields(kind)} <= named


def test_every_method_is_explained() -> None:
    methods = [n for n, f in vars(SpeculativeAlgorithm).items() if n[0] != "_" and callable(f)]
    for name in [*methods, "resolve"]:
        assert f"`{name}" in GUIDE, name


def commands() -> Iterator[list[str]]:
    for kind, _, text in BLOCKS:
        for line in text.splitlines() if kind == "bash" else ():
            if line.startswith("forerun "):
                yield shlex.split(line)[1:]


def flags(command: Any) -> set[str]:
    own = {flag for parameter in command.params for flag in parameter.opts}
    return own.union(*(flags(c) for c in getattr(command, "commands", {}).values()))


@pytest.mark.parametrize("line", list(commands()), ids=lambda line: " ".join(line[:2]))
def test_command_lines_have_flags_that_exist(line: list[str]) -> None:
    assert line[0] in COMMANDS
    group: click.Group = typer.main.get_command(build_app(line[0]))  # type: ignore[assignment]
    known = flags(group.commands[line[0]])
    known |= {"--speculative-lookback-min-match", "--speculative-lookback-max-drafts"}
    assert {word for word in line if word.startswith("--")} <= known
