"""The interface between engine and executor: a plan in, a result out. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from forerun.core.plan import Limits, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What an engine must know of its executor; fixed once the executor is ready."""

    limits: Limits
    num_pages: int  # of every pool, the null page included
    # Recurrent states that the prefix cache may keep; None: the target has none.
    num_snapshots: int | None
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    prefix_lookahead: int  # 1 where draft K/V at a position depends on the next token
    verify_widths: tuple[int, ...]  # values that `StepPlan.num_verify_tokens` may take
    # Seconds of a decode step by batch size, one for every width; None: the width is not adaptive.
    step_costs: dict[int, list[float]] | None = None
    tree_depth: int | None = None  # drafts on the longest path of a draft tree, if fewer than W - 1
    explain: dict[str, Any] = field(default_factory=dict)  # what was chosen at start, and why


class PendingStep(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Waits until the step is done.

        Raises:
            Exception: the executor failed; its state is undefined.
        """


class Executor(Protocol):
    """Executes plans in the order in which they are launched.

    The device tables are its own: requests are known to it by slot, from the admission on.
    """

    @property
    def info(self) -> ExecutorInfo: ...

    def launch(self, plan: StepPlan) -> PendingStep:
        """Queues a step; does not wait for the device.

        Raises:
            Exception: the step could not be launched; a part of it may have run.
        """

    def disable_drafts(self) -> None:
        """The algorithm is not called any more. Plans ask for plain steps from now on."""

    def close(self) -> None:
        """Frees what it holds; it cannot be used any more."""
