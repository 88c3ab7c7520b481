"""Parts of error messages."""

from __future__ import annotations

from forerun.core.errors import divisors


def test_divisors() -> None:
    assert divisors(12) == "1, 2, 3, 4, 6, 12"
    assert divisors(12, 8) == divisors(8, 12) == "1, 2, 4"
    assert divisors(12, at_most=4) == "1, 2, 3, 4"
    assert divisors(7, 12) == "1"
    assert divisors(2**62) == "1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024"  # at once
