"""Priorities and deadlines in the Python API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.core.errors import RequestError
from forerun.core.scheduling_params import SCHEDULING_KEYWORDS, SchedulingParams


def scheduling_params(keywords: Mapping[str, Any], count: int) -> list[SchedulingParams]:
    """Makes those of `count` prompts. A keyword is for all prompts, or a list with a value each.

    Raises:
        RequestError: a value is invalid, or their number is wrong.
    """
    columns = {}
    for name in SCHEDULING_KEYWORDS:
        value = keywords.get(name)
        values = list(value) if isinstance(value, list | tuple) else [value] * count
        if len(values) != count:
            raise RequestError(
                f"{len(values)} values of {name} for {count} prompts; give one, or one per prompt."
            )
        columns[name] = values
    return [
        SchedulingParams.of(dict(zip(columns, values, strict=True)))
        for values in zip(*columns.values(), strict=True)
    ]
