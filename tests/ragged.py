"""Ragged verify passes of random widths, whatever the drafts promise and steps cost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.core.executor import ExecutorInfo
from forerun.core.request import Request
from forerun.core.widths import captured_width
from forerun.engine import engine
from forerun.executor.step import costs, device_step
from forerun.executor.step.costs import MeasurementBudget
from forerun.scheduler.adaptive_width import WidthChoice, WidthPolicy
from forerun.speculative.ragged.allocate import allocate

SETTINGS: dict[str, Any] = {"speculative_adaptive": True, "speculative_ragged_verify": True}


class RandomWidths(WidthPolicy):
    """Every mean width that the requests allow, in random order, with drafts for some of them."""

    def __init__(self, widths: Sequence[float], drafts_for_some: bool, cuts: Sequence[int]) -> None:
        """`cuts`: W that a step may draft for; none: it follows from the width."""
        super().__init__(widths)
        self._cuts = cuts
        self._random, self._count = random.Random(len(widths)), 0
        self._drafts_for_some = drafts_for_some

    def _choose(self, requests: Sequence[Request], max_index: int) -> float:
        self._count = len(requests)
        return self._random.choice(self.widths[: max_index + 1])

    def _choice(self, width: float) -> WidthChoice:
        count = self._random.randint(1, self._count) if self._count else 0
        if width == 1 or not self._drafts_for_some or count == self._count:
            return WidthChoice(width, most=self._most(width) if width > 1 else None)
        return WidthChoice(width, tuple(self._random.sample(range(self._count), count)))

    def _most(self, width: float) -> int | None:
        least = captured_width(width, self._count, self.max_drafts + 1)
        return self._random.choice([None, *(cut for cut in self._cuts if cut >= least)])


class RandomDivision:
    """Gives some requests much and others hardly anything."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []  # widths of all passes
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, survival: Tensor, total: int) -> Tensor:
        shape = survival.shape
        values = torch.rand(shape, generator=self._generator).sort(1, descending=True).values
        kept = torch.rand(shape[0], 1, generator=self._generator) < 0.6
        widths = allocate((values * kept).to(survival.device), total)
        self.seen.append(widths.tolist())
        assert sum(self.seen[-1]) == total
        assert all(1 <= width <= shape[1] + 1 for width in self.seen[-1])
        return widths


def divide_at_random(monkeypatch: pytest.MonkeyPatch) -> RandomDivision:
    """For engines that are made with `SETTINGS` afterwards; not for captured steps."""
    division = RandomDivision()
    monkeypatch.setattr(device_step, "allocate", division)
    choose_at_random(monkeypatch)
    return division


def choose_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a step; the step itself divides them as in service."""

    def policy(info: ExecutorInfo) -> RandomWidths:
        of_drafts = info.draft_costs
        return RandomWidths(info.verify_widths, of_drafts is not None, list(of_drafts or ()))

    monkeypatch.setattr(engine, "_width_policy", policy)
    monkeypatch.setattr(costs, "EAGER", MeasurementBudget(0.0, 1, 1))  # it takes any costs
