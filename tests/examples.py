"""How many examples of a property are tried."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

quick = False  # whether exhaustive tests are left out; `conftest.py` knows


def examples(count: int, **more: Any) -> settings:
    """As many without a deadline, or a third of them where exhaustive tests are left out."""
    tried = max(count // 3, min(count, 10)) if quick else count
    return settings(max_examples=tried, deadline=None, **more)
