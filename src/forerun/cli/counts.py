"""Flags that count something."""

from __future__ import annotations

from forerun.core.errors import ConfigError


def check_counts(**counts: int | None) -> None:
    """
    Args:
        counts: values of flags, by their names; None: not given.

    Raises:
        ConfigError: one is below 1.
    """
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be >= 1, got {value}.")
