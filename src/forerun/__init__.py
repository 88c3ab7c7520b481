"""Forerun: a speculation-first LLM inference engine.

    from forerun import LLM, SamplingParams

Importing this package does not import torch; the first use of `LLM` does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from forerun.core.errors import ConfigError, ForerunError, RequestError
from forerun.core.sampling_params import SamplingParams
from forerun.core.version import __version__

if TYPE_CHECKING:
    from forerun.llm import LLM, RequestOutput

__all__ = [
    "LLM",
    "ConfigError",
    "ForerunError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in ("LLM", "RequestOutput"):
        return vars(import_module("forerun.llm"))[name]
    raise AttributeError(f"module 'forerun' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
