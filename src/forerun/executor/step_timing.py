"""When the phases of a step began and ended on the device. Only where requests are traced.

    begin · propose · PROPOSED · verify · VERIFIED · commit, observe · COMMITTED

A step is one graph and the host is a step ahead, so neither can say it: a kernel of one thread
timestamps the device's clock at each border, and the timestamps travel to the host with the tokens.
"""

from __future__ import annotations

import time
from enum import IntEnum

import torch
from torch import Tensor

from forerun.kernels.runtime.timestamp import tick_ns, write_timestamp

WINDOW = 30 * 10**9  # ns within which clocks drift too little to matter
ROUNDS = 5


class PhaseBoundary(IntEnum):
    BEGIN = 0
    PROPOSED = 1
    VERIFIED = 2
    COMMITTED = 3


class StepTimer:
    """The timestamps of one engine's steps; the next step overwrites them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._timestamps = torch.zeros(len(PhaseBoundary), dtype=torch.int64, device=device)
        self._tick = tick_ns(device)
        self._offset = Offset()
        for _ in range(ROUNDS):
            self.mark(PhaseBoundary.COMMITTED)
            self.unix(self._timestamps)  # waits

    def mark(self, border: PhaseBoundary) -> None:
        """Queues a write_timestamp behind what was launched."""
        write_timestamp(self._timestamps, border)

    def take(self) -> Tensor:
        """The timestamps of the step just launched [4] int64, their copy to the host queued."""
        if self.device.type != "cuda":
            return self._timestamps.clone()
        host = torch.empty(len(PhaseBoundary), dtype=torch.int64, pin_memory=True)
        return host.copy_(self._timestamps, non_blocking=True)

    def unix(self, timestamps: Tensor) -> list[int]:
        """Nanoseconds since 1970 of a step's boundaries, whose result has just come."""
        ticks: list[int] = timestamps.tolist()
        ns = [tick * self._tick for tick in ticks]
        offset = self._offset.seen(ns[PhaseBoundary.COMMITTED], time.time_ns())
        return [at + offset for at in ns]


class Offset:
    """Unix time less the device's. A timestamp is older than its arrival: the least difference is
    it.

    The least of this window and the one before, so that it follows clocks that drift.
    """

    def __init__(self) -> None:
        self._begun = 0
        self._least: int | None = None
        self._before: int | None = None

    def seen(self, device_ns: int, unix_ns: int) -> int:
        """A write_timestamp that was on the host by `unix_ns`; returns the offset."""
        if unix_ns - self._begun > WINDOW:
            self._begun, self._before, self._least = unix_ns, self._least, None
        known = [unix_ns - device_ns, *(x for x in (self._least,) if x is not None)]
        self._least = min(known)
        return self._least if self._before is None else min(self._least, self._before)
