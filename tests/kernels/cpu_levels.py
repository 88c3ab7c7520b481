"""The CPU kernels compiled for other CPUs too, and run where this one has their instructions.

Users have all of them, and what holds for one holds for another only if it has been tried.
"""

from __future__ import annotations

import platform

import pytest

from forerun.platform.device import cpu_flags

_V2 = frozenset({"cx16", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}

# Name -> the compiler's flags, and the CPU features that running it takes.
LEVELS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "native": ((), frozenset()),
    "x86-64": (("-march=x86-64",), frozenset()),
    "x86-64-v2": (("-march=x86-64-v2",), _V2),
    "x86-64-v3": (("-march=x86-64-v3",), _V3),
    # AVX2 without AVX-512. For these CPUs GCC does not fuse sums that wait for each other, where
    # fusing is left to it: code for one row and for several then differ in their bits.
    "zen3": (("-march=x86-64-v3", "-mtune=znver3"), _V3),
    "x86-64-v4": (("-march=x86-64-v4",), _V4),
}


def runs_here(level: str) -> bool:
    """Whether this CPU has the instructions of a level."""
    _, features = LEVELS[level]
    return level == "native" or (platform.machine() == "x86_64" and features <= cpu_flags())


def at_levels(*always: str) -> pytest.MarkDecorator:
    """For `pytestmark`, with the fixture `level`: `make test` runs these levels, else all."""
    return pytest.mark.parametrize(
        "level",
        [
            pytest.param(name, marks=() if name in always else pytest.mark.exhaustive)
            for name in LEVELS
            if runs_here(name)
        ],
        indirect=True,
    )
