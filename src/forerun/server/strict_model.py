"""Bodies of requests: no conversions, no unknown fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from forerun.core.errors import nearest, shown

# Name → the values that change nothing and are accepted, and why others are refused.
Unsupported = Mapping[str, tuple[tuple[Any, ...], str]]


class StrictModel(BaseModel):
    """No conversions, no NaN, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    unsupported: ClassVar[Unsupported] = {}
    ignored: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if name in cls.model_fields:
                kept[name] = value
            elif name in cls.unsupported:
                _check_neutral(name, value, *cls.unsupported[name])
            elif name not in cls.ignored:
                message = f"Unknown parameter {shown(name)}.{nearest(name, cls.model_fields)}"
                raise invalid(message)
        return kept


def _check_neutral(name: str, value: Any, neutral: tuple[Any, ...], reason: str) -> None:
    if value is not None and value not in neutral:
        raise invalid(f"{name} is not supported yet, got {shown(value)}: {reason}.")


def invalid(message: str) -> PydanticCustomError:
    return PydanticCustomError("parameter", "{message}", {"message": message})
