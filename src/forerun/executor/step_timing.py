"""When the phases of a step began and ended on the device. Only where requests are traced.

    begin · propose · PROPOSED · verify · VERIFIED · commit, observe · COMMITTED

A step is one graph and the host runs a step ahead, so host time says nothing about the phases. A
one-thread kernel stores the device's clock at each phase boundary, and the timestamps travel to
the host with the tokens.
"""

from __future__ import annotations

import time
from enum import IntEnum

import torch
from torch import Tensor

from forerun.kernels.runtime.timestamp import tick_ns, write_timestamp

WINDOW = 30 * 10**9  # ns within which the two clocks drift too little to matter
CALIBRATION_ROUNDS = 5


class PhaseBoundary(IntEnum):
    BEGIN = 0
    PROPOSED = 1
    VERIFIED = 2
    COMMITTED = 3


class StepTimer:
    """Timestamps of one executor's steps; the next step overwrites them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._timestamps = torch.zeros(len(PhaseBoundary), dtype=torch.int64, device=device)
        self._tick = tick_ns(device)
        self._offset = ClockOffset()
        for _ in range(CALIBRATION_ROUNDS):
            self.mark(PhaseBoundary.COMMITTED)
            self.unix(self._timestamps)  # waits

    def mark(self, boundary: PhaseBoundary) -> None:
        """Queues a timestamp after what was launched."""
        write_timestamp(self._timestamps, boundary)

    def take(self) -> Tensor:
        """Timestamps of the step just launched [4] int64; their copy to the host is queued."""
        if self.device.type != "cuda":
            return self._timestamps.clone()
        host = torch.empty(len(PhaseBoundary), dtype=torch.int64, pin_memory=True)
        return host.copy_(self._timestamps, non_blocking=True)

    def unix(self, timestamps: Tensor) -> tuple[int, ...]:
        """Nanoseconds since 1970 of a step's phase boundaries; its result has just arrived."""
        ticks: list[int] = timestamps.tolist()
        ns = [tick * self._tick for tick in ticks]
        offset = self._offset.update(ns[PhaseBoundary.COMMITTED], time.time_ns())
        return tuple(at + offset for at in ns)


class ClockOffset:
    """Unix time minus device time.

    A timestamp is older than its arrival on the host, so the smallest difference seen is the best
    estimate: that of this window and of the one before, so that it follows clocks that drift.
    """

    def __init__(self) -> None:
        self._window_start = 0
        self._smallest: int | None = None
        self._previous: int | None = None

    def update(self, device_ns: int, unix_ns: int) -> int:
        """A timestamp that was on the host by `unix_ns`; returns the offset in ns."""
        if unix_ns - self._window_start > WINDOW:
            self._window_start, self._previous, self._smallest = unix_ns, self._smallest, None
        known = [unix_ns - device_ns, *(x for x in (self._smallest,) if x is not None)]
        self._smallest = min(known)
        return self._smallest if self._previous is None else min(self._smallest, self._previous)
