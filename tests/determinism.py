"""The checker of `forerun doctor --determinism`, for tests."""

from __future__ import annotations

from typing import Any

from forerun.doctor.determinism import Sizes, check_determinism


def hold_bits(sizes: Sizes, **settings: Any) -> dict[str, Any]:
    """Fails with the first layer and kernel that differs; returns the report."""
    report = check_determinism(settings, sizes)
    differing = {way["name"]: way["first"] for way in report["ways"] if not way["equal"]}
    assert not differing
    assert report["deterministic"]
    ran = [way for way in report["ways"] if way["refused"] is None]
    assert all(way["requests"] >= sizes.requests and way["tokens"] > 0 for way in ran)
    return report
