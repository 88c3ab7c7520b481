"""Kernels run on the GPU if there is one, else in Triton's interpreter.

Triton decides at its first import. So on a machine without a GPU nothing else may import it, and
ahead-of-time compilation has a process of its own (`test_compile.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from forerun.kernels.cpu import library
from tests.kernels.cpu_levels import LEVELS
from tests.kernels.interpreter import multiply_row_by_row, quicken


@pytest.fixture(autouse=True)
def _interpreter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        return
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    quicken(interpreter, monkeypatch)
    if "fixed_order" in request.module.__name__:
        multiply_row_by_row(interpreter, monkeypatch)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["triton", "cpu"])
def each_device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> torch.device:
    """Where Triton's kernels run, then where the C++ kernels do: both have one reference."""
    if request.param == "triton":
        return device
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if library.library() is None:
        pytest.skip("no C++ compiler")
    return torch.device("cpu")


@pytest.fixture(scope="module")
def level(request: pytest.FixtureRequest) -> Iterator[None]:
    """The CPU kernels of a level of `cpu_levels` instead of those for this CPU."""
    target, _ = LEVELS[request.param]
    loaded = library.compiled(*target)
    assert loaded.library is not None, loaded.reason
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_load", lambda: loaded)
        yield
