"""Kernels run on the GPU where there is one, else in Triton's interpreter.

Triton decides at its first import. So on a machine without a GPU nothing else may import it, and
ahead-of-time compilation has a process of its own (`test_compile.py`).
"""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
