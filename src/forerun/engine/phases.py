"""When the phases of a step began and ended on the device. Only where requests are traced.

    begin · propose · PROPOSED · verify · VERIFIED · commit, observe · COMMITTED

A step is one graph and the host is a step ahead, so neither can say it: a kernel of one thread
stamps the device's clock at each border, and the stamps travel to the host with the tokens.
"""

from __future__ import annotations

import time
from enum import IntEnum

import torch
from torch import Tensor

from forerun.kernels.clock import stamp, tick_ns

WINDOW = 30 * 10**9  # ns within which clocks drift too little to matter
ROUNDS = 5


class Border(IntEnum):
    BEGIN = 0
    PROPOSED = 1
    VERIFIED = 2
    COMMITTED = 3


class PhaseClock:
    """The stamps of one engine's steps; the next step overwrites them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stamps = torch.zeros(len(Border), dtype=torch.int64, device=device)
        self._tick = tick_ns(device)
        self._offset = Offset()
        for _ in range(ROUNDS):
            self.mark(Border.COMMITTED)
            self.unix(self._stamps)  # waits

    def mark(self, border: Border) -> None:
        """Queues a stamp behind what was launched."""
        stamp(self._stamps, border)

    def take(self) -> Tensor:
        """The stamps of the step just launched [4] int64, their copy to the host queued."""
        if self.device.type != "cuda":
            return self._stamps.clone()
        host = torch.empty(len(Border), dtype=torch.int64, pin_memory=True)
        return host.copy_(self._stamps, non_blocking=True)

    def unix(self, stamps: Tensor) -> list[int]:
        """Nanoseconds since 1970 of a step's borders, whose result has just come."""
        ticks: list[int] = stamps.tolist()
        ns = [tick * self._tick for tick in ticks]
        offset = self._offset.seen(ns[Border.COMMITTED], time.time_ns())
        return [at + offset for at in ns]


class Offset:
    """Unix time less the device's. A stamp is older than its arrival: the least difference is it.

    The least of this window and the one before, so that it follows clocks that drift.
    """

    def __init__(self) -> None:
        self._begun = 0
        self._least: int | None = None
        self._before: int | None = None

    def seen(self, device_ns: int, unix_ns: int) -> int:
        """A stamp that was on the host by `unix_ns`; returns the offset."""
        if unix_ns - self._begun > WINDOW:
            self._begun, self._before, self._least = unix_ns, self._least, None
        known = [unix_ns - device_ns, *(x for x in (self._least,) if x is not None)]
        self._least = min(known)
        return self._least if self._before is None else min(self._least, self._before)
