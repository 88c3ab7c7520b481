"""The beginning and the end of a profile of the engine's steps. No torch.

The executor records; what to record is decided here, as the ranks of an executor must do the same.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter

from forerun.core.errors import BusyError, RequestError
from forerun.core.executor import Executor
from forerun.core.plan import StepPlan
from forerun.core.profile import STAGES, ProfileParams

log = logging.getLogger("forerun")

MAX_STEPS = 1000  # of one profile: its trace may have a megabyte a step
MAX_SECONDS = 60.0
CLOSE_SECONDS = 5.0  # from the end of the engine until files that are not written are given up
POLL_SECONDS = 0.05  # between two looks whether the files are written
DECODE, EXTEND = STAGES


class Profiling:
    """One profile at a time."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._params: ProfileParams | None = None  # of the one that runs
        self._ended: ProfileParams | None = None  # of one that has ended by itself
        self._skip = 0  # steps until it records
        self._end = 0.0  # time.monotonic()
        self._steps: Counter[str] = Counter()  # recorded ones, by stage
        self._recording = False
        self._written: ProfileParams | None = None  # of the last one whose files are written

    def start(self, params: ProfileParams) -> None:
        """Records from the next step on, or `params.start_step` steps later.

        Raises:
            RequestError: a profile is running.
        """
        self._end_if_late()
        if self._params is not None:
            raise RequestError("A profile is running already; end it with /stop_profile.")
        self._params, self._ended = params, None
        self._skip = params.start_step
        self._steps.clear()
        if not self._skip:
            self._record(params)

    def stop(self) -> ProfileParams:
        """Ends the profile, and returns what it was started with; `wait_written` waits for files.

        One that has ended by itself can be stopped once.

        Raises:
            RequestError: none is running, or it has not recorded anything.
        """
        if self._params is not None:
            recorded = self._recording
            self._stop()
            if not recorded:
                self._ended = None
                raise RequestError("The profile has ended before its start_step: it has no files.")
        params, self._ended = self._ended, None
        if params is None:
            raise RequestError("No profile is running; start one with /start_profile.")
        return params

    def before_step(self) -> None:
        """A step is launched next."""
        self._end_if_late()
        if self._params is None or self._recording:
            return
        if self._skip == 0:
            self._record(self._params)
        else:
            self._skip -= 1

    def after_step(self, plan: StepPlan) -> None:
        """A step was launched."""
        params = self._params
        if params is None or not self._recording:
            return
        self._steps[EXTEND if plan.prefill else DECODE] += 1
        total, wanted = self._steps.total(), params.num_steps
        enough = total >= MAX_STEPS
        if wanted is not None and params.by_stage:
            enough |= all(self._steps[stage] >= wanted for stage in STAGES)
        elif wanted is not None:
            enough |= total >= wanted
        if enough:
            self._stop()

    def wait_written(self, params: ProfileParams, seconds: float = math.inf) -> None:
        """Waits until the files of a profile that was stopped are written. Any thread may call it.

        Raises:
            BusyError: not in so many seconds.
            RequestError: they were not.
        """
        end = time.monotonic() + seconds
        while True:
            try:
                return self._executor.check_profile(params.name)
            except BusyError:
                if time.monotonic() > end:
                    raise
                time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Ends the profile that runs, and waits for the files of the last one."""
        end = time.monotonic() + CLOSE_SECONDS
        if self._recording:
            self._stop()
        if self._written is None:
            return
        try:
            self.wait_written(self._written, end - time.monotonic())
        except BusyError:
            why = f"Its files are not written after {CLOSE_SECONDS:g} s."
            log.warning("The profile %s is lost: %s", self._written.name, why)
        except RequestError as error:
            log.warning("The profile %s is lost: %s", self._written.name, error)

    def _record(self, params: ProfileParams) -> None:
        self._executor.start_profile(params)
        self._recording, self._end = True, time.monotonic() + MAX_SECONDS

    def _stop(self) -> None:
        """Ends the one that runs."""
        recorded, self._recording = self._recording, False
        self._ended, self._params = self._params, None
        if recorded:
            self._written = self._ended
            self._executor.stop_profile()

    def _end_if_late(self) -> None:
        if self._recording and time.monotonic() > self._end:
            log.warning("The profile has ended after %.0f s.", MAX_SECONDS)
            self._stop()
