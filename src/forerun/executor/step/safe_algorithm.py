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

    def disable(self) -> None:
        """Stops calling the algorithm."""
        self._disabled = True

    def propose(self, step: ProposeInput) -> Draft:
        """The algorithm's draft; repetitions of `last_token` if it fails."""
        shape = (step.slots.shape[0], step.num_verify_tokens - 1)
        if not self._disabled:
            try:
                return self._checked(self.algorithm.propose(step), shape, step.slots.device)
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
                return _checked_layouts(drafts, step.slots)
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

    def _checked(self, draft: object, shape: tuple[int, int], device: torch.device) -> Draft:
        if not isinstance(draft, Draft):
            raise TypeError(f"propose must return a Draft, got {type(draft).__name__}")
        if draft.parents is not None and not self._trees:
            raise TypeError("Draft.parents is a tree; declare verify_mask=Mask.CUSTOM in SpecCaps")
        tokens = _checked_ids("tokens", draft.tokens, shape, device)
        if not self._trees:
            return Draft(tokens, confidence=_checked_confidence(draft.confidence, shape, device))
        if draft.parents is not None:
            return Draft(tokens, _checked_ids("parents", draft.parents, shape, device))
        # A chain is a tree without branches; captured steps need the same inputs every time.
        return Draft(tokens, torch.arange(shape[1], device=device).repeat(shape[0], 1))


def _checked_layouts(given: object, slots: Tensor) -> Tensor:
    """
    Raises:
        TypeError: not int64 drafts of these requests in two row layouts, on their device.
    """
    wanted = f"propose_row_layouts must return [2, {len(slots)}, D] torch.int64 on {slots.device}"
    if not isinstance(given, Tensor):
        raise TypeError(f"{wanted}, got {type(given).__name__}")
    right = given.dim() == 3 and given.shape[:2] == (2, len(slots)) and given.shape[2] > 0
    if not right or given.dtype != torch.int64 or given.device != slots.device:
        raise TypeError(f"{wanted}, got {list(given.shape)} {given.dtype} on {given.device}")
    return given


def _checked_confidence(
    given: object, shape: tuple[int, int], device: torch.device
) -> Tensor | None:
    """
    Raises:
        TypeError: not a float32 tensor of this shape on this device.
    """
    if given is None:
        return None
    if not isinstance(given, Tensor):
        raise TypeError(f"Draft.confidence must be a tensor, got {type(given).__name__}")
    if given.shape != shape or given.dtype != torch.float32 or given.device != device:
        raise TypeError(
            f"Draft.confidence must be {shape} torch.float32 on {device}, got"
            f" {tuple(given.shape)} {given.dtype} on {given.device}"
        )
    return given


def _checked_ids(name: str, ids: object, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Validates `ids` and makes the elements of each request contiguous.

    Raises:
        TypeError: not a dense int64 tensor of this shape on this device.
    """
    if not isinstance(ids, Tensor):
        raise TypeError(f"Draft.{name} must be a tensor, got {type(ids).__name__}")
    if ids.shape != shape or ids.dtype != torch.int64:
        raise TypeError(
            f"Draft.{name} must be {shape} torch.int64, got {tuple(ids.shape)} {ids.dtype}"
        )
    if ids.layout != torch.strided:
        raise TypeError(f"Draft.{name} must be a dense tensor, got {ids.layout}")
    if ids.device != device:
        raise TypeError(f"Draft.{name} must be on {device}, got {ids.device}")
    return ids if shape[1] == 1 or ids.stride(1) == 1 else ids.contiguous()
