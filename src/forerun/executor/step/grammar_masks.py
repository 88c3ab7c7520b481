"""Masks of a step whose requests follow grammars, computed on the host during the forward.

Drafts are copied to the host as soon as they are known, before the target's forward. While the
device is busy with that, the host reads them and, with overlap scheduling, the result of the step
before, walks every grammar along the drafts, and uploads the masks for sampling. A request whose
grammar takes long leaves the batch, and comes back when its next mask is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock

import torch
from torch import Tensor

from forerun.grammar.bitmask import new_bitmask
from forerun.grammar.mask_threads import PATIENCE, MaskThreads
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
        """Makes one for the requests of `slots` [B]; None: there are no drafts."""
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
    # Compute the masks, and requests that take long leave the batch; None: the step waits.
    threads: MaskThreads | None = None

    def masks(self, drafts: DraftCopy | None, positions: Tensor) -> TokenMasks | None:
        """Returns a mask for every node of a verify pass; None: every token is allowed.

        Requests that have left the batch, or do so here, have no masks: their tokens are dropped.

        positions: [B, W], of the tokens to be sampled. `drafts`: None if W is 1.
        """
        if self.catch_up is not None:
            self.catch_up()
        size, width = positions.shape
        candidates, parents = ([[]] * size, None) if drafts is None else drafts.wait()
        paths = {
            i: _Paths(state, candidates[i], None if parents is None else parents[i])
            for i, state in enumerate(self.states)
            if state is not None and state.waiting is None
        }
        paths = dict(sorted(paths.items(), key=lambda item: not item[1].ready))
        walk = _Walk.start(list(paths.values()), width, positions.device.type == "cuda")
        if walk is None:
            return None
        if self.threads is None:
            walk.finish()
        else:
            walk = walk.finish_in(self.threads)
        if not walk.used:
            return None
        rows = torch.full((size, width), -1, dtype=torch.int32)
        for i, own in zip(paths, walk.rows, strict=True):
            rows[i] = torch.tensor(own, dtype=torch.int32)
        bitmask = upload(walk.bitmask[: walk.used], positions.device)
        return TokenMasks(bitmask, upload(rows, positions.device))


@dataclass(frozen=True)
class _Paths:
    """A request's grammar and drafts."""

    state: GrammarState
    candidates: Sequence[int]
    parents: Sequence[int] | None

    @property
    def ready(self) -> bool:
        """Whether all of its masks have been computed before."""
        return self.state.ahead is not None and not self.candidates


@dataclass
class _Walk:
    """One thread's way through the grammars of a step, one request after the other."""

    paths: Sequence[_Paths]
    bitmask: Tensor  # [rows, words] int32, on the host
    width: int
    rows: list[list[int]] = field(default_factory=list)  # of the requests that are done
    used: int = 0  # rows of `bitmask`
    left: bool = False  # the step has gone on without the request that comes next
    lock: Lock = field(default_factory=Lock)

    @classmethod
    def start(cls, paths: Sequence[_Paths], width: int, pinned: bool) -> _Walk | None:
        if not paths:
            return None
        vocab_size = paths[0].state.vocab_size
        return cls(paths, new_bitmask(len(paths) * width, vocab_size, pinned), width)

    @torch.inference_mode()
    def finish(self, only_ready: bool = False) -> None:
        for each in self.paths[len(self.rows) :]:
            if only_ready and not each.ready:
                return
            own = each.state.fill_masks(each.candidates, each.parents, self.bitmask, self.used)
            with self.lock:
                if self.left:
                    each.state.keep(own, self.bitmask)
                    break
                self._add(own)

    def finish_in(self, threads: MaskThreads) -> _Walk:
        """Computes it in a thread. A request that takes too long leaves the batch."""
        self.finish(only_ready=True)  # or they might never come back
        if len(self.rows) == len(self.paths):
            return self
        masks, done = threads.run(self.finish), 0
        while True:
            try:
                masks.result(PATIENCE)
                return self
            except TimeoutError:
                with self.lock:
                    if len(self.rows) > done or len(self.rows) == len(self.paths):
                        done = len(self.rows)
                        continue
                    self.left = True
                threads.leave()
                self.paths[done].state.leave_step(masks)
                rest = replace(
                    self,
                    bitmask=self.bitmask.clone(),  # the thread still writes to the other one
                    rows=list(self.rows),
                    left=False,
                    lock=Lock(),
                )
                rest._add([-1] * self.width)
                return rest.finish_in(threads)

    def _add(self, own: list[int]) -> None:
        self.rows.append(own)
        self.used += sum(row >= 0 for row in own)
