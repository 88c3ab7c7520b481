"""The interface between engine and executor: step plans in, step results out. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from forerun.core.grammar import Grammar
from forerun.core.plan import Limits, StepPlan, StepResult
from forerun.core.profile import ProfileParams


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What the engine needs to know about its executor; fixed once that is built."""

    limits: Limits
    num_pages: int  # per pool, including the null page
    # Recurrent states that the prefix cache can keep; None: the target has none.
    num_snapshots: int | None
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    prefix_lookahead: int  # n if draft K/V at a position depends on the n tokens after it
    verify_widths: tuple[int | float, ...]  # tokens per request that a step may verify, in the mean
    # Seconds of a decode step by batch size, one for every width; None: fixed width.
    step_costs: dict[int, list[float]] | None = None
    # Of these, seconds of the drafts, by each W that a step can draft for and by the number of
    # requests; None: a step drafts for all or none.
    draft_costs: dict[int, dict[int, float]] | None = None
    drafting_parts: int = 1  # of a batch, that a step can draft for; whole batches if small
    num_window_pages: int | None = None  # the same of windowed pools; None: there are none
    # Prompt tokens attend to windowed pools; False: only decode steps do.
    window_in_prefill: bool = True
    tree_depth: int | None = None  # drafts on the longest path of a draft tree; None: chains
    hidden_size: int = 0  # of the vectors that requests pool
    has_lm_head: bool = True  # False: requests can only pool
    explain: dict[str, Any] = field(default_factory=dict)  # choices made at start, and why


class PendingStep(Protocol):
    """A launched step whose result has not been read."""

    def result(self) -> StepResult:
        """Waits for the step to complete.

        Raises:
            Exception: the executor failed; its state is undefined.
        """


class Executor(Protocol):
    """Executes plans in launch order.

    It owns the device tables and identifies requests by slot, from their admission on.
    """

    @property
    def info(self) -> ExecutorInfo: ...

    def launch(self, plan: StepPlan) -> PendingStep:
        """Launches a step without waiting for the device.

        Raises:
            Exception: the step could not be launched; a part of it may have run.
        """

    def compile_grammar(self, grammar: Grammar, client: str = "") -> None:
        """Checks a grammar, and compiles it for admissions that name it. From any thread.

        Args:
            client: who asks for it. Costly grammars of a client are compiled one after another.

        Raises:
            RequestError: it is invalid or takes too long, or xgrammar is not installed.
            BusyError: it cannot be compiled now.
        """

    def prepare_grammars(self) -> None:
        """Reads the vocabulary before the first grammar needs it, which takes a second.

        `explain` says what compiles grammars, or why nothing does.
        """

    def can_resume(self, rid: str) -> bool:
        """Whether a request of `StepResult.held` may be admitted again."""

    def disable_drafts(self) -> None:
        """Stops calling the algorithm. All later plans must have `num_verify_tokens` = 1."""

    def simulate_accept_lengths(self, means: Sequence[float]) -> None:
        """Gives the next requests these mean accept lengths, in turn; for benchmarks.

        Raises:
            ConfigError: acceptance is not simulated, or no step can commit so many tokens.
        """

    def start_profile(self, params: ProfileParams) -> None:
        """Records from the next step on. What goes wrong, `check_profile` says."""

    def stop_profile(self) -> None:
        """Ends the recording, and writes it beside the steps that follow."""

    def check_profile(self, name: str) -> None:
        """Any thread may call it, after `stop_profile`. `name`: of the profile's parameters.

        Raises:
            BusyError: files are still being written.
            RequestError: something was not recorded or not written.
        """

    def close(self) -> None:
        """Releases all resources; the executor cannot be used afterwards."""
