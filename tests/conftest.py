"""Shared by all tests."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import time
from collections import defaultdict
from collections.abc import Iterator

# Two workers on two cores: one thread each, before torch reads it.
if "PYTEST_XDIST_WORKER" in os.environ:
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
# oneDNN and its wrapper keep the GEMMs of 1,024 shapes each, and tests have many shapes.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the network

import pytest
import torch

from tests import property_examples
from tests.covering import axes, covering, is_in_share, share

# GPU machines may not have the server's packages.
collect_ignore = ["server"] if importlib.util.find_spec("fastapi") is None else []


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


def pytest_configure(config: pytest.Config) -> None:
    """Before tests are imported, which ask for examples."""
    gc.disable()  # until they run: what is imported stays
    property_examples.quick = config.getoption("markexpr") == "not exhaustive"


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collector need not look at it again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _short_starts() -> Iterator[None]:
    """Engines measure few steps on a CPU, as no test depends on times, and check few layouts."""
    from forerun.executor import layout_check
    from forerun.executor.step import costs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "EAGER", costs.MeasurementBudget(0.0, 1, 2))
        patch.setattr(layout_check, "CHECKED_STEPS", 8)
        patch.setattr(layout_check, "EVERY", 1)
        yield


@pytest.fixture(scope="module")
def with_cpu_kernels() -> Iterator[None]:
    """As on a machine with a C++ compiler, whatever FORERUN_CPU_KERNELS is here."""
    from forerun.kernels.cpu import library

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_load", library.compiled)
        yield


@pytest.fixture
def without_cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain PyTorch, as on a machine without a C++ compiler."""
    from forerun.kernels.cpu import library

    monkeypatch.setattr(library, "_load", lambda: library.Loaded(None, "a test is without them"))


@pytest.fixture(autouse=True, scope="module")
def _free_engines() -> Iterator[None]:
    """Engines whose methods a test has replaced are in reference cycles and keep their K/V.

    What else has been imported or cached stays, and need not be looked at again; on a GPU it may
    hold an engine's memory, which must be free once nothing refers to it.
    """
    yield
    gc.collect()
    if not _gpu():
        gc.freeze()


if _gpu():
    ROOM = 12 << 30  # free bytes that are waited for: few tests take more
    KEPT = 2 << 30  # bytes that a worker may keep for its next test
    PATIENCE = 60.0  # seconds

    @pytest.fixture(autouse=True)
    def _room_on_the_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
        """Many workers share a GPU, and what large tests take or keep is not there for others."""
        if request.node.get_closest_marker("gpu"):
            until = time.monotonic() + PATIENCE
            while torch.cuda.mem_get_info()[0] < ROOM and time.monotonic() < until:
                time.sleep(0.5)
        yield
        if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > KEPT:
            torch.cuda.empty_cache()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share",
        type=share,
        default=(1, 1),
        metavar="N/M",
        help="run only the Nth of M shares of the exhaustive tests, and all others",
    )


def _cell(item: pytest.Item) -> tuple[tuple[int, ...], dict[str, str]]:
    """What a matrix covers, and a cell's values: 1 of its axes where no mark says more.

    Without that mark, cells that are `exhaustive` or `gpu` and tests of one axis are no matrix.
    """
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return (), {}
    values, mark = item.callspec.params, item.get_closest_marker("covering")
    if mark is not None:
        return mark.args, {name: repr(value) for name, value in values.items()}
    cell = axes(values, [mark.args[0] for mark in item.iter_markers("parametrize")])
    marked = any(item.get_closest_marker(name) for name in ("exhaustive", "gpu"))
    return () if marked or len(cell) < 2 else (1,), cell


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a matrix all cells but a covering set become `exhaustive`.

    With a second strength, only cells that cover this one become `exhaustive`; the others are
    dropped. Tests marked `gpu` are skipped where there is none, in quick runs without a word.
    """
    matrices = defaultdict(list)
    for item in items:
        strengths, values = _cell(item)
        if strengths:
            matrices[item.parent, item.originalname, strengths].append((item, values))
    dropped: set[pytest.Item] = set()
    for (_, _, (strength, *more)), matrix in matrices.items():
        cells, named = zip(*matrix, strict=True)
        rest = set(range(len(cells))) - covering(named, strength)
        for i in rest:
            cells[i].add_marker(pytest.mark.exhaustive)
        if more:
            dropped.update(cells[i] for i in rest - covering(named, *more))
    number, of = config.getoption("--share")
    gpu = set() if _gpu() else {item for item in items if item.get_closest_marker("gpu")}
    others = {
        item
        for item in items
        if item.get_closest_marker("exhaustive") and not is_in_share(item.nodeid, number, of)
    }
    left_out = others | dropped | (gpu if property_examples.quick else set())
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    # Training takes longest: begun last, it would leave the other worker without tests.
    items.sort(key=lambda item: not item.nodeid.startswith("tests/train/"))
    for item in gpu - left_out:
        item.add_marker(pytest.mark.skip(reason="needs a GPU"))
