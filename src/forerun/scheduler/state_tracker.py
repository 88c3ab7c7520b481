"""Snapshots of recurrent states while requests decode, for the prefix cache. No torch.

A state is valid at one length only, so what a request has generated can be shared up to a length at
which its state was kept. That is every `interval` tokens. While a step runs only the device knows
which lengths it commits; so every step that may go past the next of these lengths is asked for the
state there (`StepPlan.tracked`), with one row for all of them. The one that does writes it, and its
result tells.

Of these states a request keeps the last one that its text surely reaches; it goes to the cache with
its pages when the request ends or is preempted. Where no row is free, none is kept. With an
interval shorter than what two steps commit a length may be passed before a step is asked for it.
"""

from __future__ import annotations

from forerun.core.plan import StepPlan, TrackedState
from forerun.core.request import Request
from forerun.kvcache.prefix_cache import PrefixCache


class StateTracker:
    """Asks for states, and keeps those that were written.

    `interval`: tokens; 0: `plan` is not called.
    """

    def __init__(self, prefix: PrefixCache, interval: int) -> None:
        self._prefix = prefix
        self.interval = interval
        self.num_tracked = 0  # states that were written

    def plan(self, request: Request, plan: StepPlan) -> TrackedState | None:
        """Plans for a request of the next decode step; the step's tokens are in `pending`."""
        self._drop_older(request)
        done = max(request.kv_len, request.prefill_done)
        length = (done // self.interval + 1) * self.interval
        before = max(request.kv_len + len(request.pending) - 1, done)  # every step commits a token
        if not before < length <= request.kv_len_ub:
            return None
        if request.tracked_row is None:
            request.tracked_row = self._prefix.allocate_snapshot()
        if request.tracked_row is None:
            return None
        plan.tracked.append(TrackedState(request.slot, request.tracked_row, length))
        return plan.tracked[-1]

    def _drop_older(self, request: Request) -> None:
        """Frees states before one that stays, whatever comes.

        Those of a prompt that is not in the cache yet are needed, and tokens whose observe is
        deferred may stay outside of it.
        """
        kept = request.snapshots
        if request.kv_len < request.prefill_done:
            return
        while len(kept) > 1 and kept[1][0] <= request.kv_len - request.pending_observe:
            self._prefix.free_snapshot(kept.pop(0)[1])

    def complete(self, request: Request, asked: TrackedState, before: int) -> None:
        """A step that was asked has completed without failure; `before`: its length until then."""
        if before < asked.length <= request.kv_len:
            request.snapshots.append((asked.length, asked.row))
            request.tracked_row = None
            self.num_tracked += 1

    def release(self, request: Request, kv_len: int) -> None:
        """Hands states of its first `kv_len` tokens, which went to the prefix cache, there too."""
        for length, row in request.snapshots:
            if length <= kv_len and not request.failed:
                self._prefix.attach_snapshot(request.tokens, length, row)
            else:
                self._prefix.free_snapshot(row)
        request.snapshots.clear()
        if request.tracked_row is not None:
            self._prefix.free_snapshot(request.tracked_row)
            request.tracked_row = None
