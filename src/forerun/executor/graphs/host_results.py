"""The tokens of captured steps in the host's memory, without copies between the steps."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.executor.step.inputs import DecodeOutput
from forerun.kernels.speculation.host_results import store_results

RING = 4  # steps whose tokens are kept; more than are in flight (`Limits.overlap_depth` + 1)


class HostResults:
    """A ring buffer in pinned memory for steps of B requests and W tokens.

    `store` is part of the captured step. It counts the replays on the device, as `replayed` does
    on the host, so both know the row without telling each other.
    """

    def __init__(self, batch_size: int, num_verify_tokens: int, device: torch.device) -> None:
        self._shape = batch_size, num_verify_tokens
        size = batch_size * (num_verify_tokens + 1)
        pinned = device.type == "cuda"
        self._ring = torch.zeros(RING, size, dtype=torch.int64, pin_memory=pinned)
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self._replays = 0

    def store(self, out: DecodeOutput) -> None:
        """Queues the last kernel of a step."""
        store_results(out.sampled, out.num_committed, self._count, self._ring)

    def reset(self) -> None:
        """Forgets all steps, after a capture has run some."""
        self._count.zero_()
        self._replays = 0

    def replayed(self, count: int) -> tuple[Tensor, Tensor]:
        """What the last replay gave `count` requests: (sampled [B, W], num_committed [B]).

        On the host; complete when the step is, and valid until RING - 1 more are launched.
        """
        row = self._ring[self._replays % RING]
        self._replays += 1
        batch_size, width = self._shape
        tokens = batch_size * width
        return row[:tokens].view(batch_size, width)[:count], row[tokens:][:count]
