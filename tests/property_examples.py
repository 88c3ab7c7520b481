"""How many examples of a property are tried."""

from __future__ import annotations

from typing import Any

quick = False  # whether exhaustive tests are left out; `conftest.py` knows


def examples(count: int, **more: Any) -> Any:
    """Settings: as many without a deadline, or a fifth where exhaustive tests are left out."""
    from hypothesis import settings  # tests of a GPU do without

    tried = max(count // 5, min(count, 5)) if quick else count
    return settings(max_examples=tried, deadline=None, **more)
