"""Flags are made from settings, options and sampling parameters: none missing, none invented."""

from __future__ import annotations

import inspect
from dataclasses import fields
from importlib.metadata import EntryPoint
from typing import Annotated, Any

import pytest
import typer

from forerun.cli.flags import Flag, Values, engine_flags, sampling_flags, with_flags
from forerun.config.engine_config import EngineConfig
from forerun.core.sampling_params import SamplingParams
from forerun.speculative import registry
from forerun.speculative.base import Option
from tests.toy_algorithms import Toy


def call(command, *args: str) -> None:
    app = typer.Typer(add_completion=False)
    app.command()(command)
    app(args=list(args), standalone_mode=False)


@pytest.fixture
def toy():
    """A command with generated flags, and what it was called with."""
    seen: dict[str, Any] = {}

    @with_flags(engine=engine_flags, sampling=sampling_flags)
    def command(
        word: str, loud: Annotated[bool, typer.Option("--loud")] = False, *,
        engine: Values, sampling: Values,
    ) -> None:  # fmt: skip
        """A toy."""
        seen.update(word=word, loud=loud, engine=engine, sampling=sampling)

    def run(*args: str) -> dict[str, Any]:
        seen.clear()
        call(command, *args)
        return dict(seen)

    return run


def test_every_setting_and_option_is_a_flag() -> None:
    made = {flag.name for flag in engine_flags()}
    settings = {spec.name for spec in EngineConfig.settings()}
    assert made == settings | {option.name for option in registry.all_options()}


def test_every_sampling_parameter_is_a_flag_with_help() -> None:
    names = {field.name for field in fields(SamplingParams)}
    assert {flag.name for flag in sampling_flags()} == names
    assert all(flag.help for flag in sampling_flags())


def test_flags_are_keywords_with_dashes() -> None:
    assert Flag("page_size", int, 16, "", "Engine").spelling == "--page-size"


def test_only_what_was_changed_is_passed_on(toy) -> None:
    assert toy("w") == {"word": "w", "loud": False, "engine": {}, "sampling": {}}


def test_both_spellings_and_every_kind_of_value(toy) -> None:
    seen = toy(
        *("w", "--loud", "--page-size", "64", "--context-length=512", "--disable-radix-cache"),
        *("--dtype=float32", "--mem-fraction-static", "0.5", "--top-k", "-1"),
        *("--stop", "a", "--stop=b", "--stop-token-ids", "7", "--no-skip-special-tokens"),
        *("--sampling-seed", "0"),
    )
    assert seen["loud"]
    assert seen["engine"] == {
        "page_size": 64,
        "context_length": 512,
        "disable_radix_cache": True,
        "dtype": "float32",
        "mem_fraction_static": 0.5,
    }
    assert seen["sampling"] == {
        "stop": ["a", "b"],
        "stop_token_ids": [7],
        "skip_special_tokens": False,
        "sampling_seed": 0,
    }
    EngineConfig.of(seen["engine"], {})
    SamplingParams.of(seen["sampling"])


def test_an_option_that_an_algorithm_declares_is_a_flag(monkeypatch, capsys) -> None:
    option = Option("speculative_toy_depth", int, 3, "How deep the toy looks")
    monkeypatch.setattr(registry, "all_options", lambda: [option])
    seen: list[Values] = []

    @with_flags(engine=engine_flags)
    def command(*, engine: Values) -> None:
        seen.append(engine)

    call(command, "--speculative-toy-depth", "5")
    assert seen == [{"speculative_toy_depth": 5}]
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 200)  # one line a flag
    call(command, "--help")
    assert "How deep the toy looks" in capsys.readouterr().out


def test_help_names_the_algorithms_and_the_options_of_packages(monkeypatch, capsys) -> None:
    class Theirs(Toy):
        options = (Option("speculative_theirs_depth", int, 3, "How deep theirs looks"),)

    monkeypatch.setitem(globals(), "Theirs", Theirs)
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 300)
    points = [
        EntryPoint("THEIRS", f"{__name__}:Theirs", registry.GROUP),
        EntryPoint("BROKEN", "nowhere_to_be_found:X", registry.GROUP),
    ]
    table = registry.Registry(registry.BUILT_IN, points)
    monkeypatch.setattr(registry, "_registry", lambda: table)

    @with_flags(engine=engine_flags)
    def command(*, engine: Values) -> None: ...

    call(command, "--help")
    shown = capsys.readouterr().out
    assert "--speculative-theirs-depth" in shown and "How deep theirs looks" in shown
    (line,) = [line for line in shown.splitlines() if "--speculative-algorithm" in line]
    assert "THEIRS" in line and "NONE" in line and "BROKEN" not in line


def test_a_broken_package_is_an_error_only_if_selected(monkeypatch, forerun) -> None:
    broken = EntryPoint("BROKEN", "nowhere_to_be_found:X", registry.GROUP)
    table = registry.Registry(registry.BUILT_IN, [broken])
    monkeypatch.setattr(registry, "_registry", lambda: table)
    asked = forerun("generate", "hello", "--speculative-algorithm", "broken")
    *warnings, refusal = asked.err.splitlines()
    assert asked.code == 2 and refusal.startswith("forerun: error: Algorithm BROKEN")
    assert "No module named 'nowhere_to_be_found'" in refusal
    assert all("nowhere_to_be_found" in line for line in warnings)


def test_defaults_of_a_command_may_differ() -> None:
    made = {flag.name: flag.default for flag in sampling_flags(max_new_tokens=256)}
    assert made["max_new_tokens"] == 256
    assert made["temperature"] == SamplingParams().temperature


def test_the_groups_are_not_parameters_of_the_command() -> None:
    @with_flags(engine=engine_flags)
    def command(*, engine: Values) -> None: ...

    names = inspect.signature(command).parameters
    assert "engine" not in names
    assert "page_size" in names


def test_a_switch_that_is_decided_later_can_be_turned_on_and_off(toy) -> None:
    name = "enable_deterministic_inference"
    flag, off = "--enable-deterministic-inference", "--no-enable-deterministic-inference"
    given = ([], [flag], [off], [flag, off])
    assert [toy("w", *args)["engine"] for args in given] == [
        {}, {name: True}, {name: False}, {name: False},
    ]  # fmt: skip
    for values in ({}, {name: True}, {name: False}):
        assert EngineConfig.of(values, {}).enable_deterministic_inference == values.get(name)


def test_help_shows_the_no_form_of_a_switch_that_is_on(monkeypatch, capsys) -> None:
    seen: list[Values] = []

    @with_flags(sampling=sampling_flags)
    def command(*, sampling: Values) -> None:
        seen.append(sampling)

    for args in (
        [],
        ["--speculative"],
        ["--no-speculative"],
        ["--speculative", "--no-speculative"],
    ):
        call(command, *args)
    assert seen == [{}, {}, {"speculative": False}, {"speculative": False}]
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    call(command, "--help")
    out = capsys.readouterr().out
    assert "--no-skip-special-tokens" in out and "…" not in out
