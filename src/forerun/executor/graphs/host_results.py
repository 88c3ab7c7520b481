"""The tokens of captured steps in the host's memory, without copies between the steps."""

from __future__ import annotations

import torch

from forerun.executor.step.inputs import DecodeOutput
from forerun.kernels.speculation.host_results import store_results

RING = 4  # steps whose tokens are kept; more than are in flight (`Limits.overlap_depth` + 1)


class HostResults:
    """A ring buffer in pinned memory for steps of B requests and W tokens, of chains or trees, with
    widths if the steps are ragged.

    `store` is part of the captured step. It counts the replays on the device, as `replayed` does
    on the host, so both know the row without telling each other.
    """

    def __init__(
        self,
        batch_size: int,
        num_verify_tokens: int,
        device: torch.device,
        trees: bool = False,
        ragged: bool = False,
    ) -> None:
        self._width, self._trees, self._ragged = num_verify_tokens, trees, ragged
        size = batch_size * (num_verify_tokens * (1 + trees) + ragged + 1)
        self._batch_size = batch_size
        pinned = device.type == "cuda"
        self._ring = torch.zeros(RING, size, dtype=torch.int64, pin_memory=pinned)
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self._replays = 0

    def store(self, out: DecodeOutput) -> None:
        """Queues the last kernel of a step."""
        parts = [out.sampled]
        if out.path is not None:
            parts.append(out.path)
        if out.widths is not None:
            parts.append(out.widths.long().unsqueeze(1))
        rows = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        store_results(rows, out.num_committed, self._count, self._ring)

    def reset(self) -> None:
        """Forgets all steps, after a capture has run some."""
        self._count.zero_()
        self._replays = 0

    def replayed(self, count: int) -> DecodeOutput:
        """What the last replay gave `count` requests: sampled, num_committed, path and widths.

        On the host; complete when the step is, and valid until RING - 1 more are launched.
        """
        ring, width = self._ring[self._replays % RING], self._width
        self._replays += 1
        rows = ring[: -self._batch_size].view(self._batch_size, -1)[:count]
        path = rows[:, width : 2 * width] if self._trees else None
        widths = rows[:, -1] if self._ragged else None
        committed = ring[-self._batch_size :][:count]
        return DecodeOutput(rows[:, :width], committed, path=path, widths=widths)
