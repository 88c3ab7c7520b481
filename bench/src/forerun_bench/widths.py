"""Width policies compared: plain decoding, the full width, one width for all requests, and ragged
steps.

Each has an engine of its own, except that the full width shares that of one width. Requests of a
batch may differ in how much they accept: accept lengths are real, or simulated for each request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from forerun import LLM
from forerun.cli.settings import without_speculation
from forerun.engine.engine import Engine
from forerun.evals.timing import flush_caches, interleaved, median
from forerun.scheduler.adaptive_width import FixedWidth, WidthPolicy
from forerun.speculative.simulate import accept_lengths
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

    Speeds are medians of tokens/s from the end of the prefill until the first request ends; 0: no
    step had all requests, since the batch does not fit into the K/V.
    """

    load: Load
    tok_s: dict[str, float] = field(default_factory=dict)  # by policy
    accept_length: dict[str, float | None] = field(default_factory=dict)
    widths: dict[str, dict[float, int]] = field(default_factory=dict)  # steps by width
    texts: set[tuple[tuple[int, ...], ...]] = field(default_factory=set)

    @property
    def judged(self) -> str:
        """The policy that is compared with the others: the last of `POLICIES` that was measured."""
        return max(self.tok_s, key=POLICIES.index)

    @property
    def over_best(self) -> float | None:
        """`judged` over the best of the others; None: none of them ran the whole batch."""
        best = max(speed for name, speed in self.tok_s.items() if name != self.judged)
        return self.tok_s[self.judged] / best if best else None

    @property
    def over_plain(self) -> float | None:
        """`judged` over plain decoding; None: that was not measured, or not with all requests."""
        plain = self.tok_s.get(PLAIN)
        return self.tok_s[self.judged] / plain if plain else None

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


@contextmanager
def policy(engine: Engine, widths: WidthPolicy) -> Iterator[None]:
    """Replaces the width policy of an idle engine."""
    scheduler = engine.scheduler
    own, scheduler.widths = scheduler.widths, widths
    try:
        yield
    finally:
        scheduler.widths = own


def engines(
    settings: Mapping[str, Any], names: Sequence[str] = POLICIES
) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    """Settings of each engine, and the policies of `names` that it is measured with."""
    spec = {**settings, "speculative_adaptive": True}
    kinds = [
        (without_speculation(settings), (PLAIN,)),
        ({**spec, "speculative_ragged_verify": False}, (FULL, SINGLE)),
        ({**spec, "speculative_ragged_verify": True}, (RAGGED,)),
    ]
    chosen = [(own, tuple(each for each in of if each in names)) for own, of in kinds]
    return [(own, of) for own, of in chosen if of]


def measure(
    llms: Sequence[tuple[LLM, Sequence[str]]],
    cell: Cell,
    prompts: Sequence[Sequence[int]],
    output_len: int,
    repetitions: int,
) -> None:
    """Measures a load with these engines and policies, interleaved, and adds what it finds."""
    lengths = cell.load.lengths
    own = partial(_run, only_whole=lengths is not None)
    runs = {
        name: partial(own, llm.engine, name, prompts, output_len)
        for llm, names in llms
        for name in names
    }
    drafting = [llm for llm, names in llms if PLAIN not in names]

    def before() -> None:
        """Every run has the same prompts, to be computed, or else the same accept lengths."""
        if lengths is None:
            flush_caches(*(llm for llm, _ in llms))
            return
        for llm in drafting:  # requests have the lengths in turn, from the first one on
            llm.engine.executor.simulate_accept_lengths(accept_lengths(lengths))

    for run in runs.values():  # kernels are warm, and policies know the load
        before()
        run()
    for name, results in interleaved(runs, repetitions, before=before).items():
        traces = [each.value[0] for each in results]
        cell.tok_s[name] = median([each.whole_tok_s for each in traces])
        cell.accept_length[name] = traces[0].acceptance.accept_length
        cell.widths[name] = dict(sum((each.value[1] for each in results), Counter()))
        cell.texts |= {each.output_ids for each in traces}


def _run(
    engine: Engine,
    name: str,
    prompts: Sequence[Sequence[int]],
    output_len: int,
    *,
    only_whole: bool,
) -> tuple[Trace, Counter[float]]:
    widths = engine.scheduler.widths
    own = FixedWidth(widths.widths) if name == FULL else widths
    before = Counter(own.chosen)
    with policy(engine, own) if name == FULL else nullcontext():
        timed = trace(engine, prompts, output_len, only_whole=only_whole)
        return timed, own.chosen - before
