"""What the scheduler tells the runner to do in one step. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.core.request import Request


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens [start, start + len(tokens)) of a request; the last chunk also draws a token."""

    request: Request
    slot: int
    start: int
    tokens: tuple[int, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One request of the fixed-width step."""

    request: Request
    slot: int
    kv_len_ub: int  # upper bound of the committed length when the step runs


@dataclass(frozen=True, slots=True)
class Admission:
    """A slot changes hands: the device rows of `slot` are set for `request`."""

    request: Request
    slot: int


@dataclass(slots=True)
class StepPlan:
    """One step, launched as a whole: admissions, page-table writes, decode rows, prefill chunks."""

    admitted: list[Admission] = field(default_factory=list)
    # (slot, first index in its page-table row, page ids)
    page_writes: list[tuple[int, int, list[int]]] = field(default_factory=list)
    decode: list[DecodeRow] = field(default_factory=list)
    # Of `decode`, before it: requests whose drafts hear of so many plain steps now.
    late: list[tuple[Request, int]] = field(default_factory=list)
    width: int = 1  # rows that each of `decode` verifies
    prefill: list[PrefillChunk] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came back, on the host: new tokens of every decode row and last prefill chunk."""

    decode: list[list[int]]  # accepted drafts and the bonus, in order
    prefill: list[int | None]  # None: not the last chunk
