"""Calls an algorithm, which may be a plugin, and catches its exceptions.

The step continues: the text does not depend on the drafts.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from forerun.core.errors import AlgorithmError
from forerun.speculative.base import Draft, ObserveInput, ProposeInput, SpeculativeAlgorithm
from forerun.speculative.check import one_line_error
from forerun.speculative.check_draft import checked_draft, checked_layouts

log = logging.getLogger("forerun")
# A plugin's code may raise anything. `sys.exit` would end the engine's thread, with all requests.
FAILURES = (Exception, SystemExit)


class SafeAlgorithm:
    """An algorithm whose exceptions do not leave `propose` and `observe`."""

    def __init__(self, algorithm: SpeculativeAlgorithm, trees: bool) -> None:
        """`trees`: drafts are trees, that is, have parents."""
        self.algorithm = algorithm
        self.observes = type(algorithm).observe is not SpeculativeAlgorithm.observe
        with one_line_error(type(algorithm), ".supports_target_verify_for_draft"):
            self.fixed_shape = algorithm.supports_target_verify_for_draft()
        self._trees = trees
        self._error: AlgorithmError | None = None  # the first since `take_error`
        self._logged: set[tuple[str, str]] = set()  # (method, error) whose traceback was logged
        self._disabled = False

    def take_error(self) -> AlgorithmError | None:
        """The first error since the last call of this method, or None."""
        error, self._error = self._error, None
        return error

    def put_back(self, error: AlgorithmError | None) -> None:
        """Undoes a `take_error`: what it returned is the first error again."""
        self._error = error or self._error

    def disable(self) -> None:
        """Stops calling the algorithm."""
        self._disabled = True

    def propose(self, step: ProposeInput) -> Draft:
        """The algorithm's draft; repetitions of `last_token` if it fails."""
        shape = (step.slots.shape[0], step.num_verify_tokens - 1)
        if not self._disabled:
            try:
                draft = self.algorithm.propose(step)
                return checked_draft(draft, shape, step.slots.device, self._trees)
            except FAILURES as error:  # the text is not affected
                self._report("propose", error)
        tokens = step.last_token.unsqueeze(1).expand(shape).contiguous()
        # A tree if the algorithm drafts trees: captured steps are specialised to it.
        return Draft(tokens, torch.zeros_like(tokens) if self._trees else None)

    def propose_row_layouts(self, step: ProposeInput) -> Tensor | None:
        """Drafts in both row layouts, [2, B, D] int64; None if it fails."""
        if not self._disabled:
            try:
                drafts = self.algorithm.propose_row_layouts(step)
                return checked_layouts(drafts, step.slots)
            except FAILURES as error:  # the text is not affected
                self._report("propose_row_layouts", error)
        return None

    def observe(self, step: ObserveInput) -> None:
        if not self._disabled:
            try:
                self.algorithm.observe(step)
            except FAILURES as error:  # the text is not affected
                self._report("observe", error)

    def _report(self, method: str, error: BaseException) -> None:
        name = type(self.algorithm).__name__
        message = f"{name}.{method}: {type(error).__name__}: {error}"
        seen = (method, type(error).__name__)
        if seen not in self._logged:  # log once: it may fail in every step
            self._logged.add(seen)
            log.error("%s.%s failed", name, method, exc_info=error)
        if self._error is None:
            self._error = AlgorithmError(message)
            self._error.__cause__ = error
