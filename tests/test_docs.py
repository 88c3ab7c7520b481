"""What the documentation names exists: flags, parameters, figures, errors, links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import typer

import forerun
from forerun import SamplingParams
from forerun.cli.flags import engine_flags
from forerun.core.request import Request
from forerun.llm.output import meta_info
from forerun.main import COMMANDS, build_app, run
from forerun.speculative import registry
from forerun.speculative.registry import BUILT_IN, Registry

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "benchmarks/results/*.md",
        "*/README.md",
        "examples/*/README.md",
    )
    for path in ROOT.glob(pattern)
]
README, DESIGN, REFERENCE = (
    (ROOT / path).read_text(encoding="utf-8")
    for path in ("README.md", "docs/design.md", "docs/reference.md")
)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def listed(first_word: str) -> list[str]:
    """The words of the reference's lists in backticks that begin with `first_word`."""
    paragraph = REFERENCE[REFERENCE.index(f"{first_word}: `") :].partition("\n\n")[0]
    return [word for span in re.findall(r"`(.*?)`", paragraph, re.DOTALL) for word in span.split()]


def test_what_is_read_first_is_short() -> None:
    """README and design together take a quarter of an hour."""
    assert len(README.encode()) <= 9000
    assert DESIGN.count("\n") <= 250
    assert len(README.split()) + len(DESIGN.split()) <= 3500


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_lines_have_at_most_100_columns(page: Path) -> None:
    """Tables, pictures and code apart; support.md is generated, and dated files stay."""
    if page.name == "support.md" or "results" in page.parts:
        return
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    whole = re.compile(r" {4}| *[|<]| *!\[")
    assert not [line for line in text.splitlines() if len(line) > 100 and not whole.match(line)]


@cache
def flags_of(command: str) -> set[str]:
    def walk(node: object) -> Iterator[str]:
        yield from (name for p in vars(node)["params"] for name in p.opts if name[:2] == "--")
        for child in vars(node).get("commands", {}).values():
            yield from walk(child)

    return set(walk(typer.main.get_command(build_app(command))))


def test_the_reference_lists_every_engine_flag() -> None:
    spelled = {
        f"--no-{f.spelling[2:]}" if f.default is True else f.spelling for f in engine_flags()
    }
    assert sorted(listed("Flags")) == sorted(spelled)


def test_the_reference_lists_every_sampling_parameter() -> None:
    names = listed("Sampling parameters")
    assert sorted(names) == sorted(spec.name for spec in fields(SamplingParams))


def test_the_reference_lists_the_keys_of_meta_info() -> None:
    request = Request("r", (1,), SamplingParams(), seed=0, stop_ids=frozenset())
    assert sorted(listed("`meta_info`")) == sorted(["meta_info", *meta_info(request)])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_flags_in_commands_exist(page: Path) -> None:
    """Lines that begin with `forerun <command>`, in blocks, tables and sentences."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    known = {command: flags_of(command) for command in COMMANDS}
    for command, rest in re.findall(r"\bforerun (\w+)\b([^`\n#|]*)", text):
        if command in known and "--page-siz 4" not in rest:
            unknown = set(re.findall(r"(?<!\S)--[\w-]+", rest)) - known[command] - {"--help"}
            plugins = {flag for flag in unknown if "-lookback-" in flag}  # of the example package
            assert not unknown - plugins, f"forerun {command}{rest}"


def test_errors_in_the_reference_are_what_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without the algorithms that other tests have registered.
    monkeypatch.setattr(registry, "_registry", lambda: Registry(BUILT_IN, ()))
    (block,) = re.findall(r"```console\n(.*?)```", REFERENCE, re.DOTALL)
    for part in block.removeprefix("$ forerun ").split("$ forerun "):
        line, _, printed = part.partition("\n")
        assert run(line.split()) == 2
        assert capsys.readouterr().err == printed


def test_the_policy_names_all_that_is_public_in_python() -> None:
    policy = (ROOT / "docs" / "deprecation.md").read_text(encoding="utf-8")
    row = policy[policy.index("| `LLM`") :].partition(" of `forerun`;")[0]
    assert sorted(re.findall(r"`(\w+)`", row)) == sorted(forerun.__all__)


def anchors(page: Path) -> set[str]:
    """Of headings, as GitHub makes them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_changelog_has_the_form_that_it_names() -> None:
    """Releases newest first, each with a date and the sections of Keep a Changelog."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first, *releases = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert first == "Unreleased"
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", each) for each in releases)
    versions = [tuple(map(int, each.split(" ")[0].split("."))) for each in releases]
    assert versions == sorted(set(versions), reverse=True)
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    for section in text.split("\n## ")[1:]:
        heads = re.findall(r"^### (.*)$", section, re.MULTILINE)
        assert set(heads) <= kinds and len(heads) == len(set(heads))
