"""The table of algorithms: built-in ones, those of packages, and the names that are refused."""

from __future__ import annotations

import logging
import multiprocessing
import sys
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path
from typing import Any

import pytest

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.speculative import registry
from forerun.speculative.base import Option
from forerun.speculative.registry import Registry
from tests.toy_algorithms import Toy

BUILT_IN = {
    "NONE": "forerun.speculative.plain:Plain",
    "NGRAM": "forerun.speculative.ngram:Ngram",
}


class Other(Toy):
    options = (Option("speculative_other_depth", int, 3, "How deep it looks"),)


class Another(Toy):
    options = (Option("speculative_other_depth", int, 4, "How deep it looks"),)


class _Package(Distribution):
    def __init__(self, name: str) -> None:
        self._text = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        raise AssertionError(path)


def point(name: str, value: str, package: str = "acme-drafts") -> EntryPoint:
    found = EntryPoint(name, value, registry.GROUP)
    return found._for(_Package(package))  # type: ignore[attr-defined,no-any-return]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`module(source)` is the name of a new module."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[str] = []

    def make(source: str) -> str:
        name = f"acme_{abs(hash((tmp_path, source)))}"
        (tmp_path / f"{name}.py").write_text(source)
        made.append(name)
        return name

    yield make
    for name in made:
        sys.modules.pop(name, None)


def with_points(*points: EntryPoint) -> Registry:
    return Registry(BUILT_IN, points)


def here(name: str) -> str:
    return f"{Other.__module__}:{name}"


def test_a_class_is_registered_by_hand() -> None:
    table = with_points()
    table.register("Mine-2", Other)
    assert table.get("mine-2") is table.get("MINE-2") is Other
    assert "MINE-2" in table.names()
    assert Other.options[0] in table.options()


def test_a_package_is_found_by_its_entry_point(module: Any) -> None:
    name = module("from tests.toy_algorithms import Toy\nclass Theirs(Toy): pass\n")
    table = with_points(point("Theirs", f"{name}:Theirs"))
    assert table.names() == ["NONE", "NGRAM", "THEIRS"]
    assert name not in sys.modules
    assert table.get("theirs").__name__ == "Theirs"


@pytest.mark.parametrize("name", ["", "2fast", "a b", "-a", "a-", "a--b", "a/b", "é", 7, None])
def test_names_are_words(name: Any) -> None:
    with pytest.raises(ConfigError, match="a name is letters and digits"):
        with_points().register(name, Other)


@pytest.mark.parametrize(
    "name", [*registry.BUILT_IN, "none", "DFlash", "eagle", "Eagle3", "NextN", "standalone"]
)
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="reserved"):
        registry.register_algorithm(name, Other)
    with pytest.raises(ConfigError, match="reserved"):
        with_points().register(name, Other)


def test_a_registered_name_cannot_be_reused() -> None:
    table = with_points(point("THEIRS", "nowhere:Theirs"))
    table.register("MINE", Other)
    with pytest.raises(ConfigError, match=r"Other has an algorithm named MINE already"):
        table.register("mine", Toy)
    with pytest.raises(ConfigError, match=r"acme-drafts 1\.0 has an algorithm named THEIRS"):
        table.register("theirs", Other)
    assert table.get("MINE") is Other


def test_two_packages_with_one_name(caplog: pytest.LogCaptureFixture) -> None:
    table = with_points(point("TWIN", "a:A"), point("twin", "b:B", "evil-drafts"))
    both = r"package evil-drafts 1\.0: package acme-drafts 1\.0 has an algorithm named TWIN already"
    with pytest.raises(ConfigError, match=both):
        table.get("twin")
    assert "TWIN" not in table.names()
    assert [r.levelno for r in caplog.records] == [logging.WARNING]


def test_a_package_cannot_take_a_built_in_name(caplog: pytest.LogCaptureFixture) -> None:
    table = with_points(point("ngram", "nowhere:Theirs"))
    assert "the name NGRAM is reserved" in caplog.text
    assert table.get("NGRAM").__module__ == "forerun.speculative.ngram"


BROKEN = {
    "import nowhere_to_be_found": "ModuleNotFoundError: No module named 'nowhere_to_be_found'",
    "class X(": "SyntaxError",
    "raise RuntimeError('no licence')": "RuntimeError: no licence",
    "import sys; sys.exit(3)": "SystemExit: 3",
    "Y = 1": "has no attribute 'X'",
    "X = 1": "1 is not a subclass of SpeculativeAlgorithm",
    "class X: pass": "is not a subclass of SpeculativeAlgorithm",
}


@pytest.mark.parametrize("source", BROKEN)
def test_a_broken_package_is_an_error_only_if_selected(
    source: str, module: Any, caplog: pytest.LogCaptureFixture
) -> None:
    table = with_points(point("BROKEN", f"{module(source)}:X"))
    for _ in range(2):
        assert [o.name for o in table.options()] == [o.name for o in table.get("NGRAM").options]
    assert len(caplog.records) == 1 and caplog.records[0].levelno == logging.WARNING
    assert table.names() == ["NONE", "NGRAM"]
    with pytest.raises(ConfigError) as refused:
        table.get("broken")
    assert BROKEN[source] in str(refused.value) and "\n" not in str(refused.value)
    assert str(refused.value) in caplog.text


@pytest.mark.parametrize("value", ["nowhere", "nowhere:", "nowhere:a.b", "a b:X", "sys:x.y"])
def test_an_entry_point_that_names_no_class(value: str) -> None:
    with pytest.raises(ConfigError, match=r"BROKEN of package acme-drafts 1\.0 .* does not import"):
        with_points(point("BROKEN", value)).get("BROKEN")


def test_an_option_of_two_algorithms_is_one_flag(caplog: pytest.LogCaptureFixture) -> None:
    table = with_points(point("A", here("Other")), point("B", here("Another")))
    assert Other.options[0] in table.options()
    assert "'speculative_other_depth' is declared by another algorithm too" in caplog.text
    with pytest.raises(ConfigError, match="choose another name"):
        table.get("B")
    with pytest.raises(ConfigError, match="declared by another algorithm too"):
        table.register("C", Another)
    table.register("D", type("Same", (Other,), {}))


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'NGRAM'\? Known: NONE, NGRAM, THEIRS\."):
        with_points(point("THEIRS", "nowhere:Theirs")).get("n-gram")


def test_an_unknown_name_in_another_process_says_where_to_register(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank's process imports the user's script, but does not run its main block."""
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    with pytest.raises(ConfigError, match="call register_algorithm outside of `if __name__ =="):
        Registry(BUILT_IN, []).get("MINE")


def test_every_built_in_algorithm_passes_the_checks() -> None:
    for name in registry.BUILT_IN:
        assert registry.get_algorithm(name.lower()) is registry.get_algorithm(name)
    settings = {setting.name for setting in EngineConfig.settings()}
    names = [option.name for option in registry.all_options()]
    assert len(names) == len(set(names)) and not settings & set(names)


@pytest.mark.parametrize("name", ["DSPARK", "domino"])
def test_names_of_the_field_for_one_algorithm(name: str) -> None:
    """Accepted, not listed, and no package may take them."""
    table = Registry(registry.BUILT_IN, ())
    assert table.get(name) is table.get("DFLASH")
    assert name.upper() not in table.names()
    with pytest.raises(ConfigError, match="reserved"):
        table.register(name.upper(), Toy)


def test_joined_algorithms_treat_the_draft_as_the_first_does() -> None:
    joined, first = map(registry.get_algorithm, ("DFLASH,SUFFIX", "DFLASH"))
    for name in ("bundled_draft", "shards_draft", "quantizes_draft"):
        assert getattr(joined, name) == getattr(first, name)
