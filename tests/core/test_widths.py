"""The widths of ragged steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from forerun.core.plan import Limits
from forerun.core.widths import captured_width, ragged_widths, verify_widths


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


def shape(requests: int, width: float, cuts_drafts: bool, full: int = 16) -> tuple[int, int]:
    limits = Limits(64, 16, full, full, 64, 512, 0, ragged=True, cuts_drafts=cuts_drafts)
    return limits.verify_shape(requests, width)


@pytest.mark.parametrize("full", [5, 7, 16])
@pytest.mark.parametrize("requests", [1, 2, 3, 8, 40])
def test_no_more_drafts_are_made_than_one_request_can_get(requests: int, full: int) -> None:
    for width in ragged_widths(full)[1:]:
        captured = captured_width(width, requests, full)
        tokens = int(requests * captured)
        most, rows = shape(requests, width, True, full)
        assert most in verify_widths(full, True) and (rows or requests * most) == tokens
        assert most == full or most >= 1 + tokens - requests
        assert most == 2 or captured == full or max(verify_widths(most, True)[:-1]) < tokens
        uncut, all_rows = shape(requests, width, False, full)
        assert uncut == full and (all_rows or requests * full) == tokens


def test_small_passes_are_uniform() -> None:
    limits = Limits(64, 16, 16, 16, 64, 512, 0, ragged=True, cuts_drafts=True, uniform_tokens=64)
    for requests, uniform in ((1, True), (4, True), (5, False), (64, False)):
        assert limits.has_uniform_passes(requests) is uniform
        for width in ragged_widths(16)[1:]:
            captured = captured_width(width, requests, 16)
            most, rows = limits.verify_shape(requests, width)
            assert (rows == 0) == (uniform or captured == 16)
            assert (rows or requests * most) == requests * captured
    assert limits.verify_shape(4, 8, 16) == (16, 32)  # asked for
    fixed = replace(limits, cuts_drafts=False)
    assert fixed.verify_shape(4, 8) == (16, 32)
    assert not replace(limits, max_verify_tokens=2).has_uniform_passes(32)  # drafts for some


def test_steps_of_one_request_are_uniform() -> None:
    assert [shape(1, w, True) for w in (1, 2, 4, 8, 16)] == [(w, 0) for w in (1, 2, 4, 8, 16)]
    assert [shape(4, w, True) for w in (1, 2, 4)] == [(1, 0), (8, 8), (16, 16)]
