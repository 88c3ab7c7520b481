"""Device timestamps of the phases of a step, if requests are traced.

    begin · propose · PROPOSED · verify · VERIFIED · commit, observe · COMMITTED

A step is one graph and the host runs a step ahead, so phases cannot be timed on the host. A kernel
of one thread stores the device's clock at each phase boundary, and the timestamps are copied to the
host with the tokens.
"""

from __future__ import annotations

import time
from enum import IntEnum

import torch
from torch import Tensor

from forerun.kernels.runtime.timestamp import tick_ns, write_timestamp

WINDOW = 30 * 10**9  # ns in which the drift between the two clocks is negligible
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
        """Queues a timestamp after the work launched so far."""
        write_timestamp(self._timestamps, boundary)

    def take(self) -> Tensor:
        """Queues the copy of the step's timestamps [4] int64 to the host."""
        if self.device.type != "cuda":
            return self._timestamps.clone()
        host = torch.empty(len(PhaseBoundary), dtype=torch.int64, pin_memory=True)
        return host.copy_(self._timestamps, non_blocking=True)

    def unix(self, timestamps: Tensor) -> tuple[int, ...]:
        """Unix ns of a step's phase boundaries; called when its result has just arrived."""
        ticks: list[int] = timestamps.tolist()
        ns = [tick * self._tick for tick in ticks]
        offset = self._offset.update(ns[PhaseBoundary.COMMITTED], time.time_ns())
        return tuple(at + offset for at in ns)


class ClockOffset:
    """Unix time minus device time.

    A timestamp is older than its arrival on the host, so the smallest difference is the best
    estimate. It is taken over the current and the previous window, because the clocks drift.
    """

    def __init__(self) -> None:
        self._window_start = 0
        self._smallest: int | None = None
        self._previous: int | None = None

    def update(self, device_ns: int, unix_ns: int) -> int:
        """Adds a timestamp that arrived on the host by `unix_ns`; returns the offset in ns."""
        if unix_ns - self._window_start > WINDOW:
            self._window_start, self._previous, self._smallest = unix_ns, self._smallest, None
        known = [unix_ns - device_ns, *(x for x in (self._smallest,) if x is not None)]
        self._smallest = min(known)
        return self._smallest if self._previous is None else min(self._smallest, self._previous)
