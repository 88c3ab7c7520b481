"""Shared by all tests."""

from __future__ import annotations

import contextlib
import os

# Two workers on two cores: one thread each, before torch reads it.
if "PYTEST_XDIST_WORKER" in os.environ:
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the network

import pytest
import torch


def _gpu() -> bool:
    return torch.cuda.is_available()


if not _gpu():
    # Triton asks once, when it is imported, whether it is to interpret: torch.compile in some
    # test must not be the first to import it. Only tests that set the variable again (those of
    # the kernels) then use it on CPU tensors.
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ImportError):
        import triton  # noqa: F401
    del os.environ["TRITON_INTERPRET"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
