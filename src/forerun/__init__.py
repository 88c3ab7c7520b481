"""Forerun: a speculation-first LLM inference engine.

    from forerun import LLM, SamplingParams

Importing this package imports nothing else; the first use of a name does.
"""

from __future__ import annotations

TYPE_CHECKING = False  # `typing`, which has one, is not imported: its import takes long

if TYPE_CHECKING:
    from typing import Any

    from forerun.core.errors import ConfigError, ForerunError, RequestError
    from forerun.core.sampling_params import SamplingParams
    from forerun.core.version import __version__
    from forerun.llm import LLM, EmbeddingOutput, PoolingParams, RequestOutput

__all__ = [
    "LLM",
    "ConfigError",
    "EmbeddingOutput",
    "ForerunError",
    "PoolingParams",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

_MODULES = {
    "LLM": "forerun.llm",
    "ConfigError": "forerun.core.errors",
    "EmbeddingOutput": "forerun.llm",
    "ForerunError": "forerun.core.errors",
    "PoolingParams": "forerun.llm",
    "RequestError": "forerun.core.errors",
    "RequestOutput": "forerun.llm",
    "SamplingParams": "forerun.core.sampling_params",
    "__version__": "forerun.core.version",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'forerun' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = vars(import_module(_MODULES[name]))[name]
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
