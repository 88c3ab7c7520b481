"""The example packages, installed with pip: their own tests, run where nothing else is new."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.environment import EXAMPLES, Environment

PACKAGES = sorted(path.parent.name for path in EXAMPLES.glob("*/pyproject.toml"))


def test_there_are_examples() -> None:
    assert PACKAGES == ["forerun-lookback", "forerun-twohead"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("package", PACKAGES)
def test_package(package: str, tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    environment.install(package)
    environment.run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / package))
