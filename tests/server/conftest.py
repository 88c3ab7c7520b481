"""One server and one engine in this process, for all tests of the folder."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import routing, utils
from fastapi.dependencies import utils as dependencies
from fastapi.dependencies.models import Dependant

from forerun import LLM
from tests.cli.conftest import forerun
from tests.server.support import ENGINE, LiveServer, flags

__all__ = ["forerun", "llm", "server"]
FOLDER = Path(__file__).parent
WITHOUT_CLIENTS = ("server", "test_equality.py")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """GPU machines may have the server's packages, but not the clients of most tests."""
    without = importlib.util.find_spec("openai") is None
    return True if without and collection_path.name not in WITHOUT_CLIENTS else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of this folder come first: workers take others' last ones, one server is enough."""
    items.sort(key=lambda item: not item.path.is_relative_to(FOLDER))


@pytest.fixture(autouse=True, scope="session")
def _parameters_once() -> Iterator[None]:
    """Endpoints of every application take the same bodies and parameters.

    FastAPI looks at them twice, for a router and when a request first reaches it; tests have
    hundreds of applications.
    """
    make_field, fields = utils.create_model_field, dict[tuple[Any, str], Any]()
    make, made = dependencies.get_dependant, dict[tuple[Any, str], Dependant]()

    def field(name: str, type_: Any, **how: Any) -> Any:
        key = (type_, repr((name, how)))
        if key not in fields:
            fields[key] = make_field(name, type_, **how)
        return fields[key]

    def dependant(*, call: Any, **how: Any) -> Dependant:
        """Of an endpoint: the same function, for another service."""
        key = (call.__code__, repr(how))
        if key not in made:
            made[key] = make(call=call, **how)
            assert not made[key].dependencies
        return replace(made[key], call=call, dependencies=[])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "create_model_field", field)
        patch.setattr(dependencies, "create_model_field", field)
        patch.setattr(routing, "get_dependant", dependant)
        yield


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The bundled template takes no calls; grammars can make the model write some."""
    more = {"log_level": "info", "log_format": "json", "tool_call_parser": "hermes"}
    profiles = tmp_path_factory.mktemp("profiles")
    with LiveServer(*flags(**ENGINE, **more, torch_profiler_dir=profiles)) as live:
        yield live


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """What the server's answers must be equal to."""
    with LLM(**ENGINE) as made:
        yield made
