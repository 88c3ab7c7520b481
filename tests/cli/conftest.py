"""A command line in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forerun.main import run
from tests.cli.support import Result


@pytest.fixture
def forerun(capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """`forerun("generate", "--json", ...)` → exit code and what was printed."""

    def call(*args: str) -> Result:
        capfd.readouterr()
        code = run(args)
        out, err = capfd.readouterr()
        return Result(code, out, err)

    return call
