"""The widths that steps may have: tokens verified per request, of a ragged step in the mean. No
torch.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

FINE_TOKENS = 64  # of a pass: from so many on they cost time, and passes are closer to each other
DRAFTING_BATCH = 32  # requests: smaller batches draft for all or none
_WIDTHS = (1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192)


def verify_widths(full: int, flexible: bool) -> tuple[int, ...]:
    """The widths that steps can have: 1, the full one, and powers of two between them."""
    between = [1 << n for n in range(1, full.bit_length())] if flexible else []
    return (1, *(w for w in between if w <= 0.75 * full), *([full] if full > 1 else []))


def ragged_widths(full: int) -> tuple[float, ...]:
    """The widths that a step may have: 1, `full`, and some between them."""
    between = (width for width in _WIDTHS if width <= 0.85 * full)
    return (1, *between, *([full] if full > 1 else []))


def captured_width(width: float, batch_size: int, full: int) -> float:
    """The next of `ragged_widths` with which so many requests are verified.

    Where all tokens of a pass are about as fast as one, that is a power of two or `full`.
    """
    widths = ragged_widths(full)
    for wider in widths[bisect.bisect_left(widths, width) :]:
        is_power = wider == int(wider) and int(wider).bit_count() == 1
        if is_power or wider == full or wider * batch_size >= FINE_TOKENS:
            return wider
    raise ValueError(f"no step verifies {width} tokens per request; the largest is {full}")


def drafting_width(tokens: int, requests: int, widths: Sequence[int]) -> int:
    """The smallest of `widths` that has room for what one request can get of so many tokens.

    That is all that is left, when every other request has one. Else the largest of `widths`.
    """
    return next((width for width in widths if width > tokens - requests), widths[-1])
