"""What a profile of a running engine records. No torch."""

from __future__ import annotations

from dataclasses import dataclass

CPU, GPU = "CPU", "GPU"  # SGLang's names of activities
# Names of steps in a trace, and the stages that SGLang tells apart.
DECODE_STEP, MIXED_STEP, PREFILL_STEP = "decode step", "mixed step", "prefill step"
STAGES = {"DECODE": (DECODE_STEP,), "EXTEND": (MIXED_STEP, PREFILL_STEP)}


@dataclass(frozen=True, slots=True)
class ProfileParams:
    """Which steps are recorded, and where the trace goes.

    The files are `folder`/`name`-TP-`rank`.trace.json.gz and .kernels.md, one pair per rank.
    """

    folder: str
    name: str
    num_steps: int | None = None  # `by_stage`: of each stage; None: until it is stopped
    start_step: int = 0  # steps before the first one that is recorded
    activities: tuple[str, ...] = (CPU, GPU)
    by_stage: bool = False  # a pair of files for each of `STAGES`
    with_stack: bool = False  # files and lines of the Python code
    record_shapes: bool = False  # of the operators' inputs
