"""Checks of what an algorithm's `propose` and `propose_row_layouts` return.

Shapes, types and devices only, so nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.speculative.base import Draft


def checked_draft(
    draft: object, shape: tuple[int, int], device: torch.device, trees: bool
) -> Draft:
    """The draft that goes on to the verify pass. `trees`: the algorithm's drafts are trees.

    Raises:
        TypeError: it is no draft of this shape on this device.
    """
    if not isinstance(draft, Draft):
        raise TypeError(f"propose must return a Draft, got {type(draft).__name__}")
    if draft.parents is not None and not trees:
        raise TypeError("Draft.parents is a tree; declare verify_mask=Mask.CUSTOM in SpecCaps")
    tokens = _checked_ids("tokens", draft.tokens, shape, device)
    if not trees:
        return Draft(tokens, confidence=_checked_confidence(draft.confidence, shape, device))
    if draft.parents is not None:
        return Draft(tokens, _checked_ids("parents", draft.parents, shape, device))
    # A chain is a tree without branches; captured steps need the same inputs every time.
    return Draft(tokens, torch.arange(shape[1], device=device).repeat(shape[0], 1))


def checked_layouts(given: object, slots: Tensor) -> Tensor:
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
