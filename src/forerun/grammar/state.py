"""Where a request is in its grammar, and the masks of the tokens of a verify pass."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.core.plan import SlotGrammar
from forerun.grammar.bitmask import allows_any, forbid, new_bitmask
from forerun.grammar.compiler import GrammarCompiler
from forerun.grammar.mask_threads import MaskThreads

if TYPE_CHECKING:
    import xgrammar

# CPU time for one request: in all, and on top of that for every step. In an ambiguous grammar a
# token takes longer the longer the output is; usual ones take a hundredth of this.
MAX_SECONDS, MAX_STEP_SECONDS = 2.0, 0.05
SLOW_SECONDS = 0.005  # CPU time for one mask from which on a request leaves the batch for each
STUCK_SECONDS = 10.0  # for one mask, which nothing can interrupt


@dataclass
class GrammarState:
    """The committed state of one request. Drafts are only visited.

    A node of a verify pass is its last token (node 0) or a draft (node i + 1 is draft i). Its mask
    holds for the token after it.
    """

    params: SlotGrammar
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    matcher: xgrammar.GrammarMatcher
    num_tokens: int = 0  # committed output tokens
    seconds: float = 0.0  # of CPU time so far
    num_steps: int = 0
    limited: bool = True  # False: it may take any time
    # Outside of the batch, its next mask is computed beside the steps:
    slow: bool = False  # one of the last masks took long
    waiting: Future[None] | None = None  # computes `ahead`; None: it takes part in steps
    ahead: Tensor | None = None  # [words] int32: the mask after the committed tokens
    _began: float = 0.0  # time.monotonic() when `waiting` was started

    @classmethod
    def of(
        cls, params: SlotGrammar, output: Sequence[int], compiler: GrammarCompiler
    ) -> GrammarState:
        """Returns the state after `output`, which the request generated before it was preempted.

        Raises:
            RequestError: the grammar, no longer cached, cannot be compiled again.
        """
        import xgrammar

        source = compiler.source
        matcher = xgrammar.GrammarMatcher(compiler.compile_again(params.grammar))
        state = cls(params, source.eos_token_ids, source.vocab_size, matcher)
        state.limited = compiler.options.follow_limit
        state.accept(output)
        return state

    def accept(self, tokens: Sequence[int]) -> bool:
        """Commits tokens, up to the end of the grammar; False: one of them does not match."""
        begin = time.thread_time()
        for token in tokens:
            if self.too_slow or self.matcher.is_terminated():
                break
            self.ahead = None
            if not self.matcher.accept_token(token):
                return False
            self.num_tokens += 1
            begin = self._count(begin)
        return True

    @property
    def too_slow(self) -> bool:
        """Whether it has taken too long. Then its masks are incomplete."""
        return self.limited and self.seconds > MAX_SECONDS + MAX_STEP_SECONDS * self.num_steps

    def _count(self, begin: float) -> float:
        """Adds the time since `begin`; returns the time now."""
        now = time.thread_time()
        self.seconds += now - begin
        return now

    @property
    def is_stuck(self) -> bool:
        """Whether the grammar needs more text, and no token of the vocabulary continues it."""
        if self.too_slow or self.matcher.is_terminated():
            return False
        if self.ahead is not None:
            return not allows_any(self.ahead)
        row = new_bitmask(1, self.vocab_size)
        return self._fill(row, 0, 0) and not allows_any(row[0])

    def leave_step(self, masks: Future[None]) -> None:
        """The step goes on without this request; `masks` computes its `ahead`."""
        self.waiting, self._began = masks, time.monotonic()

    def wait_beside(self, threads: MaskThreads) -> None:
        """Leaves the batch until the mask after the committed tokens is computed."""
        self.leave_step(threads.run_beside(self._look_ahead))

    @torch.inference_mode()
    def _look_ahead(self) -> None:
        begin = time.thread_time()
        row = new_bitmask(1, self.vocab_size)
        if not self.matcher.is_terminated():
            if not self._fill(row, 0, 0):
                row.fill_(-1)
            self.ahead = row[0]
        self.slow = self._count(begin) - begin > SLOW_SECONDS

    def keep(self, rows: Sequence[int], bitmask: Tensor) -> None:
        """Keeps the mask of node 0 of masks that came too late for their step."""
        if rows[0] >= 0:
            self.ahead = bitmask[rows[0]].clone()

    @property
    def can_resume(self) -> bool:
        """Whether its mask is computed, or takes so long that the request ends."""
        return self.waiting is None or self.waiting.done() or self.is_stuck_in_mask

    @property
    def is_stuck_in_mask(self) -> bool:
        """Whether computing one mask does not end."""
        running = self.waiting is not None and not self.waiting.done()
        return running and time.monotonic() - self._began > STUCK_SECONDS

    def resume(self) -> None:
        """Takes part in steps again, with the mask that was computed meanwhile."""
        assert self.waiting is not None, "it has not left the batch"
        self.waiting.result()
        self.waiting = None

    def fill_masks(
        self,
        candidates: Sequence[int],
        parents: Sequence[int] | None,
        bitmask: Tensor,
        first: int,
    ) -> list[int]:
        """Masks along the drafted paths.

        Args:
            candidates: of every draft, its token; one outside the vocabulary cannot be accepted.
            parents: of every draft, its parent's node, an earlier one; None: a chain.
            bitmask: [rows, words] int32 on the host; rows from `first` on are filled.

        Returns:
            Of every node, its row; -1: every token is allowed, or the node cannot be reached.
        """
        rows = [-1] * (len(candidates) + 1)
        if self.too_slow or self.matcher.is_terminated():
            return rows
        self.num_steps += 1
        self.slow, begin = False, time.thread_time()
        with closing(self._visit(candidates, parents)) as visit:
            for node, depth in visit:
                if self._mask(bitmask, first, depth):
                    rows[node], first = first, first + 1
                before, begin = begin, self._count(begin)
                self.slow |= begin - before > SLOW_SECONDS
                if self.too_slow or self.waiting is not None:
                    break
        return rows

    def _visit(
        self, candidates: Sequence[int], parents: Sequence[int] | None
    ) -> Generator[tuple[int, int]]:
        """(node, depth) of the nodes that the grammar allows, depth first.

        The matcher is at that node meanwhile, and at the committed state afterwards. Nothing
        follows the end of the grammar.
        """
        matcher = self.matcher
        children: list[list[int]] = [[] for _ in range(len(candidates) + 1)]
        for draft, token in enumerate(candidates):
            if 0 <= token < self.vocab_size:
                children[draft if parents is None else parents[draft]].append(draft + 1)
        pending, depth = [(0, 0)], 0
        try:
            while pending:
                node, at = pending.pop()
                if depth >= at > 0:
                    matcher.rollback(depth - at + 1)
                    depth = at - 1
                if node:
                    if not matcher.accept_token(candidates[node - 1]):
                        continue
                    depth = at
                if not matcher.is_terminated():
                    yield node, at
                    pending += [(child, at + 1) for child in reversed(children[node])]
        finally:
            if depth:
                matcher.rollback(depth)

    def _mask(self, bitmask: Tensor, row: int, depth: int) -> bool:
        """Does what `_fill` does; the mask of node 0 may have been computed before."""
        if depth or self.ahead is None:
            return self._fill(bitmask, row, depth)
        bitmask[row].copy_(self.ahead)
        return True

    def _fill(self, bitmask: Tensor, row: int, depth: int) -> bool:
        """Whether any token is forbidden after `depth` drafts; fills the row."""
        restricts = self.matcher.fill_next_token_bitmask(bitmask, row)
        early = self.num_tokens + depth < self.params.min_new_tokens
        forbidden = self.params.stop_ids if early else ()
        forbidden += self.eos_token_ids if early or self.params.ignore_eos else ()
        if not forbidden:
            return bool(restricts)
        forbid(bitmask[row], forbidden)
        return True
