"""Kernels that import Triton when they are first launched."""

from __future__ import annotations

import threading
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest

from forerun.kernels.runtime import jit as module
from forerun.kernels.runtime.jit import LazyKernel, jit


def test_threads_that_load_a_kernel_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them gets a kernel whose module still names kernels that are not loaded."""
    entered, go_on = threading.Event(), threading.Event()

    def slow(fn: FunctionType, **options: Any) -> SimpleNamespace:
        if fn.__name__ == "called":
            entered.set()
            assert go_on.wait(20)
        return SimpleNamespace(fn=fn)

    monkeypatch.setattr(module, "triton", SimpleNamespace(jit=slow))
    scope: dict[str, Any] = {}

    def define(name: str) -> LazyKernel:
        code = compile(f"def {name}(): pass", "kernels", "exec").co_consts[0]
        scope[name] = jit(FunctionType(code, scope, name))
        return scope[name]  # type: ignore[no-any-return]

    kernel, _ = define("launched"), define("called")
    unready: list[bool] = []

    def load() -> None:
        kernel.load()
        unready.append(any(isinstance(value, LazyKernel) for value in scope.values()))

    threads = [threading.Thread(target=load) for _ in range(2)]
    threads[0].start()
    assert entered.wait(20)  # the first thread is between the two kernels
    assert all(isinstance(scope[name], LazyKernel) for name in ("launched", "called"))
    threads[1].start()
    threads[1].join(0.2)
    go_on.set()
    for thread in threads:
        thread.join()
    assert unready == [False, False]
