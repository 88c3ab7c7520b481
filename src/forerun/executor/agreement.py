"""Numbers that all tensor-parallel ranks must take alike: they decide which steps are run.

Memory and times differ between ranks, and a rank that runs one step more waits for the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.layers.communication import Communicator


class Agreement:
    """What the ranks of `comm` agree on; at start only, since it waits for the device."""

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self._comm, self._device = comm, device

    def largest(self, number: float) -> float:
        """The largest of all ranks."""
        return self._largest([number])[0]

    def least(self, numbers: Sequence[int]) -> list[int]:
        """The smallest of all ranks, of each number."""
        return [-int(each) for each in self._largest([-float(number) for number in numbers])]

    def _largest(self, values: list[float]) -> list[float]:
        if self._comm.size == 1:
            return values
        own = torch.tensor(values, dtype=torch.float64, device=self._device)
        largest: list[float] = self._comm.all_reduce_max(own).tolist()
        return largest
