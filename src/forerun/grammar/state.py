"""Where a request is in its grammar, and the masks of the tokens of a verify pass."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from forerun.core.plan import SlotGrammar
from forerun.grammar.bitmask import allows_any, forbid, new_bitmask
from forerun.grammar.compiler import GrammarCompiler

if TYPE_CHECKING:
    import xgrammar

# CPU time for one request: in all, and on top of that for every step. In an ambiguous grammar a
# token takes longer the longer the output is; usual ones take a hundredth of this.
MAX_SECONDS, MAX_STEP_SECONDS = 2.0, 0.05


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

    @classmethod
    def of(
        cls, params: SlotGrammar, output: Sequence[int], compiler: GrammarCompiler
    ) -> GrammarState:
        """After `output`, the tokens that the request generated before it was preempted.

        Raises:
            RequestError: the grammar, no longer cached, takes too long to compile again.
        """
        import xgrammar

        source = compiler.source
        matcher = xgrammar.GrammarMatcher(compiler.compile(params.grammar))
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
        row = new_bitmask(1, self.vocab_size)
        return self._fill(row, 0, 0) and not allows_any(row[0])

    def fill_masks(
        self,
        candidates: Sequence[int],
        parents: Sequence[int] | None,
        bitmask: Tensor,
        first: int,
    ) -> list[int]:
        """Masks along the drafted paths.

        Args:
            candidates: of every draft, its token; -1: it cannot be accepted.
            parents: of every draft, its parent's node, an earlier one; None: a chain.
            bitmask: [rows, words] int32 on the host; rows from `first` on are filled.

        Returns:
            Of every node, its row; -1: every token is allowed, or the node cannot be reached.
        """
        rows = [-1] * (len(candidates) + 1)
        if self.too_slow or self.matcher.is_terminated():
            return rows
        self.num_steps += 1
        begin = time.thread_time()
        for node, depth in self._visit(candidates, parents):
            if self._fill(bitmask, first, depth):
                rows[node], first = first, first + 1
            begin = self._count(begin)
            if self.too_slow:
                break
        return rows

    def _visit(
        self, candidates: Sequence[int], parents: Sequence[int] | None
    ) -> Iterator[tuple[int, int]]:
        """(node, depth) of the nodes that the grammar allows, depth first.

        The matcher is at that node meanwhile, and at the committed state afterwards. Nothing
        follows the end of the grammar.
        """
        matcher = self.matcher
        children: list[list[int]] = [[] for _ in range(len(candidates) + 1)]
        for draft, token in enumerate(candidates):
            if token >= 0:
                children[draft if parents is None else parents[draft]].append(draft + 1)
        pending, depth = [(0, 0)], 0
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
        if depth:
            matcher.rollback(depth)

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
