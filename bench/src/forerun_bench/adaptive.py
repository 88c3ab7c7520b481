"""Adaptive width compared with plain decoding and with the full width in every step.

One engine decodes plainly. A second one drafts and runs with either width policy, so that the
policies share weights, pools and graphs. Accept lengths are real or simulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from forerun import LLM
from forerun.engine.engine import Engine
from forerun.evals.timing import Timed, flush_caches, interleaved, median
from forerun.executor.device_executor import device_step
from forerun.scheduler.adaptive_width import FixedWidth, WidthPolicy
from forerun_bench.one_batch import Trace, trace

PLAIN, FIXED, ADAPTIVE = "plain", "fixed", "adaptive"


@dataclass(frozen=True)
class Cell:
    """One batch size at one accept length.

    Speeds are medians of tokens/s from the end of the prefill until the first request ends.
    """

    batch_size: int
    simulated: float | None  # simulated accept length; None: the real one
    plain: float
    fixed: float
    adaptive: float
    widths: dict[float, int]  # adaptive steps by width
    accept_length: float | None  # of the full width
    identical: bool | None  # greedy texts; None with simulated acceptance

    @property
    def ratio(self) -> float:
        """Adaptive over the better of the others."""
        return self.adaptive / max(self.plain, self.fixed)

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "ratio": self.ratio}


@contextmanager
def policy(engine: Engine, widths: WidthPolicy) -> Iterator[None]:
    """Replaces the width policy of an idle engine."""
    scheduler = engine.scheduler
    own, scheduler.widths = scheduler.widths, widths
    try:
        yield
    finally:
        scheduler.widths = own


def sweep(
    plain: LLM,
    spec: LLM,
    batches: Sequence[Sequence[Sequence[int]]],
    output_len: int,
    simulated: Sequence[float],
    repetitions: int = 3,
    on_cell: Callable[[Cell], None] = lambda cell: None,
) -> list[Cell]:
    """Runs every batch of prompts at every simulated accept length; without any, at the real one.

    `spec` must have adaptive width and, for `simulated` lengths, simulated acceptance.
    """
    cells = []
    for prompts in batches:
        runs = _runs(plain.engine, spec.engine, prompts, output_len)
        for index, length in enumerate(simulated or [None]):
            if length is not None:
                _simulate(spec.engine, length)
            # The policy adapts to the new length; kernels are warm after the first round.
            for name in (ADAPTIVE,) if index else runs:
                flush_caches(plain, spec)
                runs[name]()
            chosen = spec.engine.scheduler.widths.chosen
            before = Counter(chosen)
            timed = interleaved(runs, repetitions, before=lambda: flush_caches(plain, spec))
            cells.append(_cell(len(prompts), length, timed, chosen - before))
            on_cell(cells[-1])
    return cells


def _runs(
    plain: Engine, spec: Engine, prompts: Sequence[Sequence[int]], output_len: int
) -> dict[str, Callable[[], Trace]]:
    full = FixedWidth(spec.scheduler.widths.widths)

    def fixed() -> Trace:
        with policy(spec, full):
            return trace(spec, prompts, output_len)

    return {
        PLAIN: lambda: trace(plain, prompts, output_len),
        FIXED: fixed,
        ADAPTIVE: lambda: trace(spec, prompts, output_len),
    }


def _simulate(engine: Engine, length: float) -> None:
    acceptance = device_step(engine.executor).simulate
    assert acceptance is not None, "an engine without simulated acceptance"
    acceptance.set(length)


def _cell(
    batch: int,
    simulated: float | None,
    timed: dict[str, list[Timed[Trace]]],
    widths: Counter[float],
) -> Cell:
    speeds = {name: median([t.value.whole_tok_s for t in runs]) for name, runs in timed.items()}
    texts = {t.value.output_ids for runs in timed.values() for t in runs}
    return Cell(
        batch_size=batch,
        simulated=simulated,
        plain=speeds[PLAIN],
        fixed=speeds[FIXED],
        adaptive=speeds[ADAPTIVE],
        widths=dict(sorted(widths.items())),
        accept_length=timed[FIXED][0].value.acceptance.accept_length,
        identical=len(texts) == 1 if simulated is None else None,
    )
