"""`forerun bench` where the package of the benchmarks is not installed."""

from __future__ import annotations

import builtins
from types import ModuleType
from typing import Any

import pytest

from forerun.main import run


def test_it_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, whatever follows `bench`."""
    load = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> ModuleType:
        if name.startswith("forerun_bench"):
            raise ModuleNotFoundError(f"No module named {name!r}", name="forerun_bench")
        return load(name, *args, **kwargs)

    monkeypatch.setattr("forerun.main.import_module", missing)
    for arguments in (["bench"], ["bench", "one-batch", "--batch-size", "1"], ["bench", "--help"]):
        assert run(arguments) == 2
        message = capsys.readouterr().err
        assert "pip install 'forerun[bench]', or pip install ./bench in a checkout" in message
        assert message.count("\n") == 1
