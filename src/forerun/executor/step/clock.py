"""Device time of a step, and how long the device waited for the host before it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class _Timestamp:
    """A point in the device's stream. A CPU computes a step as it is launched: host time there."""

    seconds: float  # time.monotonic() when it was recorded
    event: torch.cuda.Event | None

    @classmethod
    def now(cls, device: torch.device) -> _Timestamp:
        event = None
        if device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return cls(time.monotonic(), event)

    @property
    def passed(self) -> bool:
        """Whether the device has reached it."""
        return self.event is None or self.event.query()

    def until(self, later: _Timestamp) -> float:
        """Seconds on the device, which has reached `later`."""
        if self.event is None or later.event is None:
            return later.seconds - self.seconds
        return float(self.event.elapsed_time(later.event)) * 1e-3


class StepClock:
    """Measures one step on its device, independent of when the host reads the result."""

    def __init__(self, device: torch.device, before: _Timestamp | None) -> None:
        """`before`: the end of the previous step."""
        self._device, self._before = device, before
        self._begin = self._counted_from = _Timestamp.now(device)
        self._end = self._begin
        self._late = False

    @classmethod
    def after(cls, previous: StepClock | None, device: torch.device) -> StepClock:
        """Starts timing on the current device, after the previous step was launched."""
        return cls(device, None if previous is None else previous._end)

    def restart(self) -> None:
        """What was launched so far does not count as the step's."""
        self._counted_from = _Timestamp.now(self._device)

    def stop(self) -> None:
        """Called after the whole step was launched."""
        self._end = _Timestamp.now(self._device)
        # Otherwise this step was queued before the previous one had ended, and followed it at once.
        self._late = self._before is not None and self._before.passed

    @property
    def is_done(self) -> bool:
        """Whether `wait` would not wait."""
        return self._end.passed

    def wait(self) -> float:
        """Waits for the step; returns its time in seconds."""
        if self._end.event is not None:
            self._end.event.synchronize()
        return self._counted_from.until(self._end)

    @property
    def gap_seconds(self) -> float:
        """How long the device was idle between the previous step and this one; after `wait`.

        An upper bound: of a step that was late, on a GPU all the time of its launch counts.
        """
        if not self._late or self._before is None:
            return 0.0
        idle = self._before.until(self._begin)
        return idle if self._end.event is None else idle + self._end.seconds - self._begin.seconds
