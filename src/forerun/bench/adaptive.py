"""Adaptive width beside its alternatives: plain decoding, and the full width in every step.

One engine decodes plainly; another, with drafts, runs with either policy, so that both have the
same weights, pools and graphs. Accept lengths are those of the text, or forced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from forerun import LLM
from forerun.bench.one_batch import Trace, trace
from forerun.bench.timing import Timed, interleaved, median
from forerun.engine.engine import Engine
from forerun.executor.device_executor import device_step
from forerun.scheduler.adaptive_width import FixedWidth, WidthPolicy

PLAIN, FIXED, ADAPTIVE = "plain", "fixed", "adaptive"


@dataclass(frozen=True)
class Cell:
    """One batch size at one accept length. Speeds: medians of tokens/s from the end of the
    prefill until the first request ends."""

    batch_size: int
    forced: float | None  # accept length; None: the text's own
    plain: float
    fixed: float
    adaptive: float
    widths: dict[int, int]  # adaptive steps by width
    accept_length: float | None  # of the full width
    identical: bool | None  # greedy texts, all ways; None where lengths are forced

    @property
    def ratio(self) -> float:
        """Adaptive over the better of the others."""
        return self.adaptive / max(self.plain, self.fixed)

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "ratio": self.ratio}


@contextmanager
def policy(engine: Engine, widths: WidthPolicy) -> Iterator[None]:
    """Lets an idle engine choose its widths by another policy."""
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
    forced: Sequence[float],
    repetitions: int = 3,
    on_cell: Callable[[Cell], None] = lambda cell: None,
) -> list[Cell]:
    """Every batch of prompts at every forced accept length, or with none at the text's own.

    `spec` must have been made with adaptive width, and, where lengths are forced, with one to
    begin with.
    """
    cells = []
    for prompts in batches:
        runs = _runs(plain.engine, spec.engine, prompts, output_len)
        for index, length in enumerate(forced or [None]):
            if length is not None:
                _force(spec.engine, length)
            # What was learnt from another length is forgotten; kernels were warm after the first.
            for name in (ADAPTIVE,) if index else runs:
                _flush(plain, spec)
                runs[name]()
            chosen = spec.engine.scheduler.widths.chosen
            before = Counter(chosen)
            timed = interleaved(runs, repetitions, before=lambda: _flush(plain, spec))
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


def _force(engine: Engine, length: float) -> None:
    simulated = device_step(engine.executor).simulate
    assert simulated is not None, "an engine made without simulated acceptance"
    simulated.set(length)


def _flush(*engines: LLM) -> None:
    for llm in engines:
        llm.engine.flush_cache()


def _cell(
    batch: int, forced: float | None, timed: dict[str, list[Timed[Trace]]], widths: Counter[int]
) -> Cell:
    speeds = {name: median([t.value.whole_tok_s for t in runs]) for name, runs in timed.items()}
    texts = {t.value.output_ids for runs in timed.values() for t in runs}
    return Cell(
        batch_size=batch,
        forced=forced,
        plain=speeds[PLAIN],
        fixed=speeds[FIXED],
        adaptive=speeds[ADAPTIVE],
        widths=dict(sorted(widths.items())),
        accept_length=timed[FIXED][0].value.acceptance.accept_length,
        identical=len(texts) == 1 if forced is None else None,
    )
