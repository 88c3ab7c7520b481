"""Bodies of requests: no conversions, no unknown fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

from forerun.core.errors import RequestError, nearest, shown
from forerun.core.scheduling_params import SchedulingParams

T = TypeVar("T")
MAX_VARIABLES = 64  # of a chat template
# Name → the values that change nothing and are accepted, and why others are refused.
Unsupported = Mapping[str, tuple[tuple[Any, ...], str]]


@dataclass(frozen=True)
class FirstError:
    """A list whose validation ends with the first wrong item, or at the item past the limit.

    There may be millions, and an error for each would take 1 KB and 10 µs. (pydantic's `FailFast`
    cannot be part of a union: it has no hash.)
    """

    max_length: int | None = None

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        schema = cast(core_schema.ListSchema, handler(source))
        schema["fail_fast"] = True
        if self.max_length is not None:
            schema["max_length"] = self.max_length
        return schema


Many = Annotated[list[T], FirstError()]  # every list of a request


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


class Scheduled(StrictModel):
    """What all bodies that start generations have in common: when they run."""

    priority: int | None = Field(None, description="Goes before requests of a lower one; default 0")
    queue_timeout: float | None = Field(
        None, description="Most seconds that the request waits to start; then it ends with 503"
    )
    request_timeout: float | None = Field(
        None, description="Most seconds that the request takes; then it ends with 504"
    )

    @field_validator("priority", "queue_timeout", "request_timeout")
    @classmethod
    def _can_be_scheduled(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None:
            try:
                SchedulingParams.of({str(info.field_name): value})
            except RequestError as error:
                raise invalid(str(error)) from None
        return value

    @property
    def scheduling(self) -> SchedulingParams:
        return SchedulingParams.of(dict(self))


def _check_neutral(name: str, value: Any, neutral: tuple[Any, ...], reason: str) -> None:
    if value is not None and value not in neutral:
        raise invalid(f"{name} is not supported yet, got {shown(value)}: {reason}.")


def invalid(message: str) -> PydanticCustomError:
    return PydanticCustomError("parameter", "{message}", {"message": message})
