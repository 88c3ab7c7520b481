"""Masks of a step whose requests follow grammars, computed on the host during the forward.

Drafts are copied to the host as soon as they are known, before the target's forward. While the
device is busy with that, the host reads them and, with overlap scheduling, the result of the step
before, walks every grammar along the drafts, and uploads the masks for sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.grammar.bitmask import new_bitmask
from forerun.grammar.state import GrammarState
from forerun.kernels.sampling.bitmask import TokenMasks
from forerun.kernels.speculation.tree import Tree
from forerun.platform.device import upload


@dataclass(frozen=True)
class DraftCopy:
    """The drafts of a step on their way to the host. Its copies may be part of a graph."""

    candidates: Tensor  # [B, K] int64, on the host; -1: cannot be accepted
    parents: Tensor | None  # [B, K + 1] int64, on the host: of every node; None: chains
    copied: torch.cuda.Event | None  # None: on a CPU, where copies do not wait

    @classmethod
    def new(cls, slots: Tensor, num_drafts: int, trees: bool) -> DraftCopy | None:
        """For the requests of `slots` [B]; None: there are no drafts."""
        if num_drafts == 0:
            return None
        size, pinned = slots.shape[0], slots.device.type == "cuda"
        candidates = torch.empty(size, num_drafts, dtype=torch.int64, pin_memory=pinned)
        parents = None
        if trees:
            parents = torch.empty(size, num_drafts + 1, dtype=torch.int64, pin_memory=pinned)
        # External: recorded by every replay of a graph, and visible outside of it.
        event = torch.cuda.Event(external=True) if pinned else None
        return cls(candidates, parents, event)

    def start(self, candidates: Tensor, tree: Tree | None) -> None:
        """Queues the copies."""
        self.candidates.copy_(candidates, non_blocking=True)
        if self.parents is not None:
            assert tree is not None
            self.parents.copy_(tree.parents, non_blocking=True)
        if self.copied is not None:
            self.copied.record()

    def wait(self) -> tuple[list[list[int]], list[list[int]] | None]:
        """Candidates, and for trees the parents of drafts, of each request."""
        if self.copied is not None:
            self.copied.synchronize()
        parents = None if self.parents is None else self.parents[:, 1:].tolist()
        return self.candidates.tolist(), parents


@dataclass(frozen=True)
class GrammarBatch:
    """The grammars of a batch, in the order of its requests; padding may follow them."""

    states: Sequence[GrammarState | None]
    # Commits the tokens of the steps before; None: they have none.
    catch_up: Callable[[], None] | None

    def masks(self, drafts: DraftCopy | None, positions: Tensor) -> TokenMasks | None:
        """For every node of a verify pass; None: every token is allowed.

        positions: [B, W], of the tokens to be sampled. `drafts`: None if W is 1.
        """
        if self.catch_up is not None:
            self.catch_up()
        size, width = positions.shape
        candidates, parents = ([[]] * size, None) if drafts is None else drafts.wait()
        constrained = [(i, state) for i, state in enumerate(self.states) if state is not None]
        bitmask = new_bitmask(
            len(constrained) * width,
            constrained[0][1].vocab_size,
            pinned=positions.device.type == "cuda",
        )
        rows = torch.full((size, width), -1, dtype=torch.int32)
        used = 0
        for i, state in constrained:
            tree = None if parents is None else parents[i]
            own = state.fill_masks(candidates[i], tree, bitmask, used)
            rows[i] = torch.tensor(own, dtype=torch.int32)
            used += sum(row >= 0 for row in own)
        if not used:
            return None
        return TokenMasks(upload(bitmask[:used], positions.device), upload(rows, positions.device))
