"""Between the engine and an algorithm, which may be somebody else's: what it does wrong is kept
and reported, and the step goes on. It can: whatever is proposed, the text is the target's own."""

from __future__ import annotations

import logging

import torch

from forerun.core.errors import AlgorithmError
from forerun.speculative.base import Commit, Draft, SpeculativeAlgorithm, Step, TargetOutput

log = logging.getLogger("forerun")


class SafeAlgorithm:
    """Calls the algorithm, and remembers the first thing that went wrong since it was asked."""

    def __init__(self, algorithm: SpeculativeAlgorithm, trees: bool) -> None:
        self.algorithm = algorithm
        self._trees = trees  # it may give parents
        self._error: AlgorithmError | None = None
        self._retired = False

    def take_error(self) -> AlgorithmError | None:
        error, self._error = self._error, None
        return error

    def retire(self) -> None:
        """It is not called again: every step is plain from now on."""
        self._retired = True

    def propose(self, step: Step) -> Draft:
        """Its proposal, or where it fails the newest token repeated."""
        assert step.width is not None and step.newest is not None
        shape = (step.slots.shape[0], step.width - 1)
        if not self._retired:
            try:
                return _checked(self.algorithm.propose(step), shape, self._trees)
            except Exception as error:  # noqa: BLE001  anybody's code, and nothing is lost
                self._keep("propose", error)
        return Draft(step.newest.unsqueeze(1).expand(shape))

    def observe(self, step: Step, target: TargetOutput, commit: Commit | None) -> None:
        if not self._retired:
            try:
                self.algorithm.observe(step, target, commit)
            except Exception as error:  # noqa: BLE001  anybody's code, and nothing is lost
                self._keep("observe", error)

    def _keep(self, where: str, error: Exception) -> None:
        name = type(self.algorithm).__name__
        log.error("%s.%s failed", name, where, exc_info=error)
        if self._error is None:
            self._error = AlgorithmError(f"{name}.{where}: {type(error).__name__}: {error}")
            self._error.__cause__ = error


def _checked(draft: object, shape: tuple[int, int], trees: bool) -> Draft:
    if not isinstance(draft, Draft):
        raise TypeError(f"propose must return a Draft, got {type(draft).__name__}")
    if draft.parents is not None and not trees:
        raise TypeError("Draft.parents is a tree; declare verify_mask=Mask.CUSTOM in SpecCaps")
    for name, ids in (("tokens", draft.tokens), ("parents", draft.parents)):
        if ids is None and name == "parents":
            continue
        if not isinstance(ids, torch.Tensor) or ids.shape != shape or ids.dtype != torch.int64:
            got = (
                f"{tuple(ids.shape)} {ids.dtype}"
                if isinstance(ids, torch.Tensor)
                else type(ids).__name__
            )
            raise TypeError(f"Draft.{name} must be {shape} torch.int64, got {got}")
    return draft
