"""Type checks of user input.

Each check takes the name of the value and the error class to raise, and returns the value as a
built-in Python type. NumPy integers and floats are accepted. A float is not an integer, and a bool
is neither an integer nor a number.
"""

from __future__ import annotations

import json
import math
from numbers import Integral, Real
from typing import Any

from forerun.core.errors import ForerunError, shown

Error = type[ForerunError]


def boolean(name: str, value: Any, error: Error) -> bool:
    if not isinstance(value, bool):
        raise error(f"{name} must be true or false, got {shown(value)}.")
    return value


def integer(name: str, value: Any, error: Error) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise error(f"{name} must be an integer, got {shown(value)}.")
    return int(value)


def number(name: str, value: Any, error: Error) -> float:
    """A finite int or float, as a float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise error(f"{name} must be a number, got {shown(value)}.")
    try:
        converted = float(value)
    except OverflowError:
        converted = math.inf
    if not math.isfinite(converted):
        raise error(f"{name} must be finite, got {shown(value)}.")
    return converted


def text(name: str, value: Any, error: Error) -> str:
    if not isinstance(value, str):
        raise error(f"{name} must be a string, got {shown(value)}.")
    return value


def half_character(value: Any) -> str | None:
    """The half of a pair of surrogates, as an escape, that a JSON value has; None: it has none."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(error.object[error.start]):04x}"
    return None


def of_type(kind: type, name: str, value: Any, error: Error) -> Any:
    """Checks a value against its declared type: bool, int, float or str; others always pass."""
    checks = {bool: boolean, int: integer, float: number, str: text}
    return checks[kind](name, value, error) if kind in checks else value
