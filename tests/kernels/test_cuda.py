"""CUDA C++ kernels compile with NVRTC, with or without a GPU, and without register spills."""

from __future__ import annotations

import ctypes
import re

import pytest
import torch

from forerun.kernels.gemm.dispatch import SILU_MANY, TABLE
from forerun.kernels.gemm.gemm_sm90 import (
    ARCHITECTURE,
    SHARED,
    Form,
    Sm90Config,
    shared_bytes,
    source,
    stages,
)
from forerun.kernels.runtime import nvrtc

FORMS = [
    Form(),
    Form(paired=True, scaled_in=True, bias=True),
    Form(partials=True),
    Form(best=True, bias=True),
    Form(best=True, scaled_in=True),
    Form(scaled_in=True, add=True, scaled_out=True, bias=True),
]
CHOICES = {
    choice
    for products in TABLE.values()
    for choices in products.values()
    for choice in choices.values()
}
CONFIGS = {SILU_MANY} | {choice for choice in CHOICES if isinstance(choice, Sm90Config)}

pytestmark = pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC")


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("config", sorted(CONFIGS, key=str), ids=str)
def test_products_for_hopper_compile(config: Sm90Config, form: Form) -> None:
    code, log = nvrtc.compile_source(source(config, form), ARCHITECTURE, verbose=True)
    assert code.startswith(b"\x7fELF")
    assert "warning" not in log and "serialized" not in log, log
    stack, stores, loads = map(
        int, re.search(r"(\d+) bytes stack frame, (\d+) .*stores, (\d+) ", log).groups()
    )
    assert stack == stores == loads == 0, log
    assert stages(config, form) > 2 and shared_bytes(config, form) <= SHARED


def test_a_mistake_is_told_with_its_line() -> None:
    with pytest.raises(nvrtc.CudaError, match=r"kernel\.cu\(2\).*nonsense"):
        nvrtc.compile_source("__global__ void f() {\n nonsense; }", ARCHITECTURE)


def test_arguments_lie_where_the_driver_looks_for_them() -> None:
    tensor = torch.zeros(3)
    _kept, address = nvrtc._pack_arguments((tensor, None, -7, 1.5))
    places = (ctypes.c_uint64 * 4).from_address(address)
    assert ctypes.c_uint64.from_address(places[0]).value == tensor.data_ptr()
    assert ctypes.c_uint64.from_address(places[1]).value == 0
    assert ctypes.c_int.from_address(places[2]).value == -7
    assert ctypes.c_float.from_address(places[3]).value == 1.5
