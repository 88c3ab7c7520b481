"""Scheduling parameters: when a request runs, and until when it is worth running. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from forerun.core.checks import integer, number
from forerun.core.errors import RequestError, shown

MAX_PRIORITY = MAX_TENANT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SchedulingParams:
    """Parameters that the scheduler reads; the text does not depend on them.

    Raises:
        RequestError: a value is out of range.
    """

    # Requests of a higher priority go first, as in SGLang; those of a lower one, as in vLLM, with
    # `schedule_low_priority_values_first`.
    priority: int = 0
    queue_timeout: float | None = None  # most seconds from the arrival to the first slot
    request_timeout: float | None = None  # most seconds from the arrival to the end
    # The user that the request belongs to: the number of an API key, from 1 on; 0: no key. With
    # `speculative_suffix_per_key`, SUFFIX drafts from outputs of the same tenant only.
    tenant: int = 0

    def __post_init__(self) -> None:
        priority = integer("priority", self.priority, RequestError)
        if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise RequestError(f"priority must fit in 32 bits, got {shown(priority)}.")
        object.__setattr__(self, "priority", priority)
        tenant = integer("tenant", self.tenant, RequestError)
        if not 0 <= tenant <= MAX_TENANT:
            raise RequestError(f"tenant must be in [0, {MAX_TENANT}], got {shown(tenant)}.")
        object.__setattr__(self, "tenant", tenant)
        for name in ("queue_timeout", "request_timeout"):
            value = getattr(self, name)
            if value is None:
                continue
            value = number(name, value, RequestError)
            if value <= 0:
                raise RequestError(f"{name} must be > 0 seconds, got {shown(value)}.")
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> SchedulingParams:
        """Makes it from those of `given` that it has and that are not None."""
        known = {name: given[name] for name in SCHEDULING_KEYWORDS if given.get(name) is not None}
        return cls(**known)


DEFAULT_SCHEDULING = SchedulingParams()
SCHEDULING_KEYWORDS = tuple(spec.name for spec in fields(SchedulingParams))
