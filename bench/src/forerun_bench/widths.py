"""Ragged steps compared with plain decoding, the full width, and one width for all requests.

Each has an engine of its own (the full width shares that of one width), one after the other, so
that each has all of the memory. Requests of a batch may differ in how much they accept: accept
lengths are real, or simulated for each request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from forerun import LLM
from forerun.cli.settings import without_speculation
from forerun.engine.engine import Engine
from forerun.evals.timing import flush_caches, interleaved, median
from forerun.executor.device_executor import device_step
from forerun.scheduler.adaptive_width import FixedWidth
from forerun.speculative.simulate import accept_lengths
from forerun_bench.adaptive import policy
from forerun_bench.one_batch import Trace, trace

PLAIN, FULL, SINGLE, RAGGED = "plain", "full", "single", "ragged"
POLICIES = (PLAIN, FULL, SINGLE, RAGGED)


@dataclass(frozen=True)
class Load:
    """A batch of requests."""

    batch_size: int
    lengths: str | None = None  # simulated mean accept lengths, as "1.3,5"; None: real acceptance


@dataclass
class Cell:
    """What was measured of a load.

    Speeds are medians of tokens/s from the end of the prefill until the first request ends.
    """

    load: Load
    tok_s: dict[str, float] = field(default_factory=dict)  # by policy
    accept_length: dict[str, float | None] = field(default_factory=dict)
    widths: dict[str, dict[float, int]] = field(default_factory=dict)  # steps by width
    texts: set[tuple[tuple[int, ...], ...]] = field(default_factory=set)

    @property
    def over_best(self) -> float:
        """Ragged over the best of the others."""
        return self.tok_s[RAGGED] / max(self.tok_s[name] for name in (PLAIN, FULL, SINGLE))

    @property
    def over_plain(self) -> float:
        return self.tok_s[RAGGED] / self.tok_s[PLAIN]

    @property
    def identical(self) -> bool | None:
        """Whether all policies gave the same greedy texts; None with simulated acceptance."""
        return len(self.texts) == 1 if self.load.lengths is None else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "batch_size": self.load.batch_size,
            "simulated": self.load.lengths,
            "tok_s": self.tok_s,
            "accept_length": self.accept_length,
            "steps_by_width": self.widths,
            "over_best": self.over_best,
            "over_plain": self.over_plain,
            "identical": self.identical,
        }


def engines(settings: Mapping[str, Any]) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    """Settings of each engine, and the policies that it is measured with."""
    spec = {**settings, "speculative_adaptive": True}
    return [
        (without_speculation(settings), (PLAIN,)),
        ({**spec, "speculative_ragged_verify": False}, (FULL, SINGLE)),
        ({**spec, "speculative_ragged_verify": True}, (RAGGED,)),
    ]


def measure(
    llm: LLM,
    names: Sequence[str],
    cells: Sequence[Cell],
    prompts_of: Callable[[LLM, int], Sequence[Sequence[int]]],
    output_len: int,
    repetitions: int,
) -> None:
    """Measures every load with these policies of an engine, and adds the results to the cells.

    `prompts_of`: an engine and a batch size -> prompts.
    """
    engine = llm.engine
    for cell in cells:
        prompts = prompts_of(llm, cell.load.batch_size)
        if cell.load.lengths is not None and names != (PLAIN,):
            simulated = device_step(engine.executor).simulate
            assert simulated is not None, "an engine without simulated acceptance"
            simulated.set(accept_lengths(cell.load.lengths))
        runs = {name: partial(_run, engine, name, prompts, output_len) for name in names}
        for run in runs.values():  # kernels are warm, and policies know the load
            flush_caches(llm)
            run()
        timed = interleaved(runs, repetitions, before=partial(flush_caches, llm))
        for name, results in timed.items():
            traces = [each.value[0] for each in results]
            cell.tok_s[name] = median([each.whole_tok_s for each in traces])
            cell.accept_length[name] = traces[0].acceptance.accept_length
            cell.widths[name] = dict(sum((each.value[1] for each in results), Counter()))
            cell.texts |= {each.output_ids for each in traces}


def _run(
    engine: Engine, name: str, prompts: Sequence[Sequence[int]], output_len: int
) -> tuple[Trace, Counter[float]]:
    widths = engine.scheduler.widths
    own = FixedWidth(widths.widths) if name == FULL else widths
    before = Counter(own.chosen)
    with policy(engine, own) if name == FULL else nullcontext():
        return trace(engine, prompts, output_len), own.chosen - before
