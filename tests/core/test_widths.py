"""The widths of ragged steps."""

from __future__ import annotations

from itertools import pairwise

import pytest

from forerun.core.widths import captured_width, ragged_widths


@pytest.mark.parametrize("full", [1, 2, 3, 5, 8, 16, 33, 256])
def test_widths_of_ragged_steps(full: int) -> None:
    widths = ragged_widths(full)
    assert widths[0] == 1 and widths[-1] == full
    assert list(widths) == sorted(set(widths))
    steps = [wider / width for width, wider in pairwise(widths)]
    assert all(1 < step <= 2 for step in steps)


def test_small_batches_have_few() -> None:
    def captured(batch: int) -> set[float]:
        return {captured_width(width, batch, 16) for width in ragged_widths(16)}

    assert captured(1) == {1, 2, 4, 8, 16}
    assert captured(16) == {1, 2, 4, 5, 6, 8, 10, 12, 16}
    assert captured(64) == set(ragged_widths(16))
    assert captured_width(2.2, 64, 16) == 2.5
    with pytest.raises(ValueError, match="the largest is 16"):
        captured_width(17, 1, 16)
